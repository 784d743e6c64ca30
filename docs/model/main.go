package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"

	"github.com/flightlock/flightlock/docs/model/internal/links"
)

func main() {
	worlds := flag.Int("worlds", 500, "how many worlds each variant is played in")
	only := flag.String("only", "", "the one variant to play")
	trace := flag.Int64("trace", -1, "the seed of one world, of which everything is written that happens")
	flag.Parse()
	played, err := links.Play(os.Stdout, *worlds, *only)
	if played == 0 || *only == "" {
		err = errors.Join(err, play(os.Stdout, *worlds, *only, *trace))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "model:", err)
		os.Exit(1)
	}
	if *only != "" || *trace >= 0 {
		return
	}
	switch err := searchAll(os.Stdout, "docs/model", true); {
	case errors.Is(err, errNoSpin):
		fmt.Fprintf(os.Stderr,
			"\n*** THE EXHAUSTIVE SEARCHES OF grants.pml AND retained.pml WERE NOT MADE: %v ***\n",
			err)
	case err != nil:
		fmt.Fprintln(os.Stderr, "model:", err)
		os.Exit(1)
	}
}

// play runs the variants, and returns an error if one does not find what it should.
func play(out io.Writer, worlds int, only string, trace int64) error {
	var failed error
	played := 0
	for _, v := range variants {
		if only != "" && only != v.name {
			continue
		}
		played++
		if trace >= 0 {
			v.world(uint64(trace), out).run()
			continue
		}
		o := v.play(worlds)
		fmt.Fprintf(out, "%-45s %s\n", v.name, o)
		if err := o.asExpected(v); err != nil && failed == nil {
			failed = fmt.Errorf("%s: %w", v.name, err)
		}
	}
	if played == 0 {
		return fmt.Errorf("there is no variant %q", only)
	}
	return failed
}

func (v variant) world(seed uint64, log io.Writer) *world {
	r, f := all(), every()
	v.change(&r, &f)
	return newWorld(r, f, seed, log)
}

// outcome is the result of the worlds of one variant.
type outcome struct {
	worlds  int
	found   map[string]int    // in how many
	seed    map[string]uint64 // in which first
	counts  counts
	longest float64
}

// play runs worlds, from the first seed on, one at a time on each processor.
func (v variant) play(worlds int) outcome {
	o := outcome{worlds: worlds, found: map[string]int{}, seed: map[string]uint64{}}
	var mu sync.Mutex
	var wg sync.WaitGroup
	procs := runtime.GOMAXPROCS(0)
	for p := range procs {
		wg.Go(func() {
			for i := p; i < worlds; i += procs {
				seed := rare[v.name] + uint64(i)
				w := v.world(seed, nil).run()
				mu.Lock()
				o.add(seed, w)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return o
}

func (o *outcome) add(seed uint64, w *world) {
	o.counts.leases += w.count.leases
	o.counts.byGrant += w.count.byGrant
	o.counts.reused += w.count.reused
	o.counts.commands += w.count.commands
	o.counts.idle += w.count.idle
	for i, n := range w.count.of {
		o.counts.of[i] += n
	}
	o.longest = max(o.longest, w.longest)
	if w.found != "" {
		if first, is := o.seed[w.found]; !is || seed < first {
			o.seed[w.found] = seed
		}
		o.found[w.found]++
	}
}

func (o outcome) String() string {
	n := float64(max(o.counts.leases, 1))
	s := fmt.Sprintf("%d leases, %2.0f%% by grant, %.1f commands each, idle %.1f ms, shares %d, longest wait "+
		"%4.0f ms",
		o.counts.leases, 100*float64(o.counts.byGrant)/n, float64(o.counts.commands)/n, float64(o.counts.idle)/n,
		o.counts.of, o.longest)
	if o.counts.reused > 0 {
		s += fmt.Sprintf(", retained and used again %d times", o.counts.reused)
	}
	for _, what := range []string{twoHolders, lowToken, starved, outlives, idles, again} {
		if n := o.found[what]; n > 0 {
			s += fmt.Sprintf("; %s: %d of %d worlds, first with seed %d", what, n, o.worlds, o.seed[what])
		}
	}
	return s
}

// asExpected returns an error if the worlds have found what they should not, or not what they
// should.
func (o outcome) asExpected(v variant) error {
	for what := range o.found {
		if v.breaks == "" {
			return fmt.Errorf("%s, with seed %d", what, o.seed[what])
		}
	}
	if v.breaks != "" && o.found[v.breaks] == 0 {
		return fmt.Errorf("%d worlds have not found %s", o.worlds, v.breaks)
	}
	return nil
}
