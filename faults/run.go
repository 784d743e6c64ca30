//go:build linux

package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

// Phases of a run.
const (
	before = iota // the fault
	during
	after
	phases
)

// A verdict is the result of one run of a scenario, or several.
type verdict struct {
	scenario scenario
	faults   int
	granted  [phases]int
	failed   map[string]int // tries that ended in that error
	lost     map[string]int // locks that ended before their release, by reason
	reused   int            // locks by a lease that was retained
	refused  int            // accesses to the register with a token that was too old
	gap      time.Duration  // longest time that the hot key went without a new holder
	back     time.Duration  // from the end of the last fault until it had one
	accesses int

	overlaps, falls, illegal []string
}

// violations are what must not happen.
func (v *verdict) violations() []string { return slices.Concat(v.overlaps, v.falls, v.illegal) }

// runScenario starts a cell, repeats the fault until the given time is over, at least once, and
// judges what the processes did.
func runScenario(ctx context.Context, s scenario, set setup, atLeast time.Duration) (*verdict, error) {
	clock, err := newMachineClock()
	if err != nil {
		return nil, err
	}
	set.Sleeps = s.sleeps
	c, err := s.newCell(ctx, set, 3)
	if err != nil {
		return nil, err
	}
	defer c.close()
	if err := c.allServed(ctx, 0); err != nil {
		return nil, err
	}
	pause(ctx, set.TTL/2)
	v := &verdict{scenario: s}
	begin := clock.now()
	for end := time.Now().Add(atLeast); v.faults == 0 || time.Now().Before(end); v.faults++ {
		if err := s.fault(ctx, c); err != nil {
			return nil, fmt.Errorf("%v: %w", s, err)
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	end := clock.now()
	if err := c.allServed(ctx, end); err != nil {
		return nil, fmt.Errorf("%v: after the fault: %w", s, err)
	}
	pause(ctx, set.TTL/2)
	h, err := c.finish()
	if err != nil {
		return nil, fmt.Errorf("%v: %w", s, err)
	}
	v.judge(h, begin, end)
	return v, nil
}

// newCell starts what the scenario runs on.
func (s scenario) newCell(ctx context.Context, set setup, procs int) (*cell, error) {
	kind, err := redistest.KindNamed(cmp.Or(set.Kind, redistest.Plain.Name))
	switch {
	case err != nil:
		return nil, err
	case kind.IsSharded():
		return newEndpointCell(ctx, set, procs, s.args...)
	case s.masters > 0:
		return newClusterCell(ctx, set, procs, s.masters, s.empty, s.args...)
	case s.nodes > 0:
		return newCell(ctx, set, procs, s.nodes, s.args...)
	}
	return newCell(ctx, set, procs, 3, s.args...)
}

// allServed waits until each key has been locked and released since then.
func (c *cell) allServed(ctx context.Context, since int64) error {
	keys := c.keys()
	return c.await(ctx, "every key is served", func() bool {
		seen := map[string]bool{}
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, h := range slices.Backward(c.history.holds) {
			if h.Given < since-int64(patience) {
				break
			}
			if h.granted() && h.Given > since && h.Released {
				seen[h.Key] = true
			}
		}
		return !slices.ContainsFunc(keys, func(key string) bool { return !seen[key] })
	})
}

// judge counts and checks.
func (v *verdict) judge(h *history, begin, end int64) {
	v.failed, v.lost = map[string]int{}, map[string]int{}
	var hot []int64
	for _, x := range h.holds {
		switch {
		case !x.granted():
			v.failed[x.Err]++
			continue
		case x.Given < begin:
			v.granted[before]++
		case x.Given < end:
			v.granted[during]++
		default:
			v.granted[after]++
		}
		if x.Reused {
			v.reused++
		}
		if x.Lost != "" {
			v.lost[x.Lost]++
		}
		if x.Key == hotKey {
			hot = append(hot, x.Given)
		}
	}
	slices.Sort(hot)
	for i := 1; i < len(hot); i++ {
		v.gap = max(v.gap, time.Duration(hot[i]-hot[i-1]))
	}
	if i, _ := slices.BinarySearch(hot, end); i < len(hot) {
		v.back = time.Duration(hot[i] - end)
	}
	for _, a := range h.accesses {
		v.accesses++
		if a.Stale {
			v.refused++
		}
	}
	v.overlaps, v.falls = h.meetings()
	v.illegal = h.notLinearizable()
}

// add sums up two runs of the same scenario.
func (v *verdict) add(w *verdict) {
	v.faults += w.faults
	for i := range phases {
		v.granted[i] += w.granted[i]
	}
	for m, n := range map[*map[string]int]map[string]int{&v.failed: w.failed, &v.lost: w.lost} {
		for what, times := range n {
			(*m)[what] += times
		}
	}
	v.reused += w.reused
	v.refused += w.refused
	v.accesses += w.accesses
	v.gap, v.back = max(v.gap, w.gap), max(v.back, w.back)
	v.overlaps = append(v.overlaps, w.overlaps...)
	v.falls = append(v.falls, w.falls...)
	v.illegal = append(v.illegal, w.illegal...)
}

// counted lists what happened how often, most frequent first.
func counted(m map[string]int) []string {
	names := slices.SortedFunc(maps.Keys(m), func(a, b string) int {
		if m[a] != m[b] {
			return m[b] - m[a]
		}
		return len(a) - len(b)
	})
	for i, name := range names {
		names[i] = fmt.Sprintf("%d %s", m[name], name)
	}
	return names
}
