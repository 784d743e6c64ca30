package main

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// This file is the programme: what (a), (b) and (c) do, and what each of them must show.

// stampedeKinds are the ways of (a), in the order of the table.
var stampedeKinds = []string{kindUnprotected, kindSingleflight, kindLock, kindFetch}

// missTime is about what one miss takes, for the progress bar.
const missTime = 150 * time.Millisecond

// stampedeLimit is when one way of (a) begins no other miss.
const stampedeLimit = 10 * time.Second

// hotPerOwn is how many goroutines of (c) want the hot key for each that locks a key of its own.
// Handoffs need no Redis, so the hot key alone would hardly notice a dead node; every lock of the
// others needs a quorum. No client has more than maxOwn of them, for embedded nodes are slow.
const (
	hotPerOwn = 25
	maxOwn    = 10
)

// step is one stretch of the programme.
type step struct {
	phase    string // a, b or c
	name     string
	expected time.Duration
	run      func(context.Context, *report) error
}

func (b *bench) steps() (all []step) {
	for _, kind := range stampedeKinds {
		run := func(ctx context.Context, rep *report) error { return b.stampede(ctx, kind, rep) }
		all = append(all, step{"a", "stampede: " + kind, missTime * time.Duration(b.cfg.misses), run})
	}
	perHammer := b.cfg.duration + b.cfg.warmup
	all = append(all, step{"b", "hot key", perHammer, b.hotKey}, step{"c", "a node dies", perHammer, b.nodeDies})
	return slices.DeleteFunc(all, func(s step) bool { return !b.cfg.runs(s.phase) })
}

func (b *bench) phases(ctx context.Context) (*report, error) {
	steps := b.steps()
	var expected time.Duration
	for _, s := range steps {
		expected += s.expected
	}
	b.bar.Start(expected)
	rep := newReport(b)
	for _, s := range steps {
		title := fmt.Sprintf("(%s) %s", s.phase, s.name)
		b.bar.Next(title, s.expected)
		if err := s.run(ctx, rep); err != nil {
			return nil, fmt.Errorf("%s: %w", title, err)
		}
	}
	return rep, nil
}

// stampede lets all callers run into a cold key, again and again, with nobody who is slow making it
// endless. Under the lock, each miss may be loaded once.
func (b *bench) stampede(ctx context.Context, kind string, rep *report) error {
	sum, misses := newOutcome(1), 0
	for began := time.Now(); misses < b.cfg.misses && time.Since(began) < stampedeLimit; misses++ {
		j := job{Kind: kind, URLs: b.nodes.urls, Goroutines: b.cfg.callers, Load: originTime, Parts: 1}
		out, _, err := b.do(ctx, j, nil)
		if err != nil {
			return err
		}
		if (kind == kindLock || kind == kindFetch) && out.Loads > 1 {
			rep.violated(1, fmt.Sprintf("(a) miss %d was loaded %d times under the lock (%s)", misses+1, out.Loads,
				kind))
		}
		sum.merge(out)
	}
	if sum.Parts[0].Waits.Count() == 0 {
		rep.violated(1, "(a) "+kind+": not one caller got the value")
	}
	rep.addStampede(kind, misses, len(b.nodes.urls), sum)
	return nil
}

// hotKey lets all goroutines of all clients hammer one key.
func (b *bench) hotKey(ctx context.Context, rep *report) error {
	j := job{Kind: kindHammer, URLs: b.nodes.urls, Goroutines: b.cfg.goroutines, Work: b.cfg.work,
		Parts: 1, Part: b.cfg.duration, Warmup: b.cfg.warmup}
	out, gaps, err := b.do(ctx, j, nil)
	if err != nil {
		return err
	}
	if out.Parts[0].Locks == 0 {
		rep.violated(1, "(b) not one lock was granted")
	}
	rep.addHotKey(b.cfg.duration, out, gaps)
	return nil
}

// nodeDies hammers too, with a node that is gone in the second of three parts.
func (b *bench) nodeDies(ctx context.Context, rep *report) error {
	if b.nodes.skipDown != "" {
		rep.NodeDies = &nodeDiesFigures{Skipped: b.nodes.skipDown}
		return nil
	}
	part := (b.cfg.duration / 3).Truncate(time.Millisecond)
	j := job{Kind: kindHammer, URLs: b.nodes.viaProxy, Goroutines: b.cfg.goroutines, Work: b.cfg.work,
		OwnKeys: min(maxOwn, (b.cfg.goroutines+hotPerOwn-1)/hotPerOwn), Parts: 3, Part: part, Warmup: b.cfg.warmup}
	out, gaps, err := b.do(ctx, j,
		func(ctx context.Context, start time.Time) error { return b.dieAndComeBack(ctx, start, part) })
	if err != nil {
		return err
	}
	if out.Parts[0].Locks+out.Parts[1].Locks+out.Parts[2].Locks == 0 {
		rep.violated(1, "(c) not one lock was granted")
	}
	rep.addNodeDies(part, out, gaps)
	return nil
}

func (b *bench) dieAndComeBack(ctx context.Context, start time.Time, part time.Duration) error {
	if err := sleep(ctx, time.Until(start.Add(part))); err != nil {
		return err
	}
	b.nodes.proxy.down()
	if err := sleep(ctx, time.Until(start.Add(2*part))); err != nil {
		return err
	}
	return b.nodes.proxy.up()
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
