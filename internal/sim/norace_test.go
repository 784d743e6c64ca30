//go:build !race

package sim

import (
	"bytes"
	"cmp"
	"runtime"
	"runtime/debug"
	"testing"
)

// fewSeeds is how many worlds are run by default.
const fewSeeds = 50

// A seed gives the same trace each time, to the nanosecond. What a world does depends on its seed and on
// virtual time alone, but for one thing: the order in which the Go scheduler runs goroutines that become
// ready in the same instant, which another processor, the garbage collector, or the system's scheduler (a
// goroutine that stood for 10 ms goes behind the others) changes now and then. The first two are kept out.
// For the last, where two traces differ, three more are made, and two of the five must be the same: a world
// that asks a map for an order, or a clock for the time, asks so often that no two are.
func TestSameSeedSameTrace(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	in := newInterpreter()
	for seed := *firstFlag; seed < *firstFlag+cmp.Or(*seedsFlag, 10); seed++ {
		var traces [][]byte
		trace := func(n int) {
			for range n {
				var out bytes.Buffer
				simulate(t, newPlan(seed, in), &out)
				runtime.GC()
				traces = append(traces, out.Bytes())
			}
		}
		trace(2)
		if n := bytes.Count(traces[0], []byte("\n")); n < 10 {
			t.Errorf("seed %d has a trace of %d lines", seed, n)
		}
		if bytes.Equal(traces[0], traces[1]) {
			continue
		}
		trace(3)
		if mostAlike(traces) < 2 {
			t.Errorf("seed %d: of %d traces no two are the same. The first two: %s",
				seed, len(traces), difference(traces[0], traces[1]))
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
