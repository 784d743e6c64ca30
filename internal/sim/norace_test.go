//go:build !race

package sim

import (
	"bytes"
	"cmp"
	"runtime"
	"testing"
)

// fewSeeds is how many worlds are run when nobody says so.
const fewSeeds = 50

// A seed gives the same trace each time, to the nanosecond.
func TestSameSeedSameTrace(t *testing.T) {
	in := newInterpreter()
	for seed := *firstFlag; seed < *firstFlag+cmp.Or(*seedsFlag, 10); seed++ {
		var a, b bytes.Buffer
		simulate(t, newPlan(seed, in), &a)
		simulate(t, newPlan(seed, in), &b)
		x, y := bytes.Split(a.Bytes(), []byte("\n")), bytes.Split(b.Bytes(), []byte("\n"))
		for i := range min(len(x), len(y)) {
			if !bytes.Equal(x[i], y[i]) {
				t.Errorf("seed %d differs in line %d:\n%s\n%s", seed, i+1, x[i], y[i])
				break
			}
		}
		if len(x) != len(y) || len(x) < 10 {
			t.Errorf("seed %d has a trace of %d lines, and then of %d", seed, len(x), len(y))
		}
		runtime.GC()
	}
}
