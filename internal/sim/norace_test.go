//go:build !race

package sim

import (
	"bytes"
	"cmp"
	"runtime"
	"testing"
)

// fewSeeds is how many worlds are run by default.
const fewSeeds = 50

// A seed gives the same trace each time, to the nanosecond. What a world does depends on its seed
// and on virtual time alone, but for one thing: the order in which the Go scheduler runs goroutines
// that become ready in the same instant, which the garbage collector or a busy machine changes now
// and then. So where two traces differ, three more are made, and four of the five must be the same.
func TestSameSeedSameTrace(t *testing.T) {
	in := newInterpreter()
	for seed := *firstFlag; seed < *firstFlag+cmp.Or(*seedsFlag, 10); seed++ {
		trace := func() []byte {
			var out bytes.Buffer
			simulate(t, newPlan(seed, in), &out)
			runtime.GC()
			return out.Bytes()
		}
		traces := [][]byte{trace(), trace()}
		if bytes.Equal(traces[0], traces[1]) {
			if n := bytes.Count(traces[0], []byte("\n")); n < 10 {
				t.Errorf("seed %d has a trace of %d lines", seed, n)
			}
			continue
		}
		for tries := 3; ; tries-- {
			for len(traces) < 5 {
				traces = append(traces, trace())
			}
			most := mostAlike(traces)
			if most >= len(traces)-1 {
				break
			}
			if tries == 1 {
				t.Errorf("seed %d: of %d traces only %d are the same. The first two: %s",
					seed, len(traces), most, difference(traces[0], traces[1]))
				break
			}
			traces = nil
		}
	}
}

// mostAlike is how many of the traces are the same, at most.
func mostAlike(traces [][]byte) (most int) {
	for _, a := range traces {
		same := 0
		for _, b := range traces {
			if bytes.Equal(a, b) {
				same++
			}
		}
		most = max(most, same)
	}
	return most
}

// difference is the first line in which two traces differ.
func difference(a, b []byte) string {
	x, y := bytes.Split(a, []byte("\n")), bytes.Split(b, []byte("\n"))
	for i := range min(len(x), len(y)) {
		if !bytes.Equal(x[i], y[i]) {
			return string(x[i]) + "\n" + string(y[i])
		}
	}
	return "one is the beginning of the other"
}
