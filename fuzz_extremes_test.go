package flightlock_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// extremes are the values of all options and policies, and of all other arguments of a caller.
type extremes struct {
	nodeTimeout, maxTTL  time.Duration
	drift                float64
	slice                time.Duration
	maxWaiters           int64
	deaf                 bool // DisableNotify
	ttl, deadline        time.Duration
	interval, timeout    time.Duration
	maxHold              time.Duration
	maxRefreshes         int64
	strategy             uint8
	delay, most          time.Duration
	count                int64
	fetchTTL, load, wait time.Duration
	errorHold            time.Duration
	unlocked             int64
}

// FuzzExtremes sets all options, policies and strategies to any values. Each is refused, by its
// name and before any traffic, or it works as documented: one holder, a validity within the ttl,
// rising tokens, a refresh in time, a wait as long as the strategy's without busy polling, one
// load, a Close that returns. What was refused is left out, and the rest is tried all the same.
func FuzzExtremes(f *testing.F) {
	for i, e := range extremeSeeds() {
		if redistest.Raced && i%4 != 0 {
			continue
		}
		f.Add(int64(e.nodeTimeout), int64(e.maxTTL), e.drift, int64(e.slice), e.maxWaiters, e.deaf,
			int64(e.ttl), int64(e.deadline),
			int64(e.interval), int64(e.timeout), int64(e.maxHold), e.maxRefreshes,
			e.strategy, int64(e.delay), int64(e.most), e.count,
			int64(e.fetchTTL), int64(e.load), int64(e.wait), int64(e.errorHold), e.unlocked)
	}
	f.Fuzz(func(
		t *testing.T, nodeTimeout, maxTTL int64, drift float64, slice, maxWaiters int64, deaf bool,
		ttl, deadline int64,
		interval, timeout, maxHold, maxRefreshes int64,
		strategy uint8, delay, most, count int64,
		fetchTTL, load, wait, errorHold, unlocked int64,
	) {
		d := func(n int64) time.Duration { return time.Duration(n) }
		extremes{
			nodeTimeout: d(nodeTimeout), maxTTL: d(maxTTL), drift: drift, slice: d(slice), maxWaiters: maxWaiters, deaf: deaf,
			ttl: d(ttl), deadline: d(deadline),
			interval: d(interval), timeout: d(timeout), maxHold: d(maxHold), maxRefreshes: maxRefreshes,
			strategy: strategy, delay: d(delay), most: d(most), count: count,
			fetchTTL: d(fetchTTL), load: d(load), wait: d(wait), errorHold: d(errorHold), unlocked: unlocked,
		}.run(t)
	})
}

// extremeSeeds are each limit, the values just beyond it, and values that have failed before.
func extremeSeeds() (all []extremes) {
	const forever, never, ms, day = math.MaxInt64, math.MinInt64, time.Millisecond, 24 * time.Hour
	add := func(change func(e *extremes)) {
		e := extremes{ttl: time.Second, count: 5, delay: 10 * ms, most: 100 * ms, strategy: 2}
		change(&e)
		all = append(all, e)
	}
	add(func(*extremes) {})
	for _, d := range []time.Duration{never, -1, 1, ms - 1, ms, 10*ms - 1, 10 * ms, time.Minute, time.Minute + 1, day,
		day + 1, forever / 2, forever - 1, forever} {
		add(func(e *extremes) {
			e.nodeTimeout, e.slice, e.ttl, e.interval, e.strategy, e.delay, e.load = d, d, d, d, 2, d, d
		})
		add(func(e *extremes) {
			e.maxTTL, e.deaf, e.ttl, e.deadline, e.timeout, e.maxHold, e.strategy, e.most = d, true, d, d, d, d, 3, d
			e.fetchTTL, e.wait, e.errorHold = d, d, d
		})
	}
	for kind := range uint8(strategies) {
		for _, n := range []int64{-1, forever} {
			add(func(e *extremes) {
				e.maxWaiters, e.maxRefreshes, e.unlocked, e.count, e.strategy, e.delay, e.most = n, n, n, n, kind, forever, forever
			})
		}
		add(func(e *extremes) { e.deaf, e.strategy, e.delay, e.most = true, kind, 1, 1 })
	}
	for _, n := range []int64{never, 1, math.MaxInt32, math.MaxInt32 + 1} {
		add(func(e *extremes) { e.maxWaiters, e.maxRefreshes, e.unlocked, e.count = n, n, n, n })
	}
	add(func(e *extremes) { e.load, e.wait, e.strategy, e.delay = forever, forever, 6, never })
	for _, drift := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), -0.1, math.Copysign(0, -1),
		math.SmallestNonzeroFloat64,
		0.4999999, math.Nextafter(0.5, 0), 0.5} {
		add(func(e *extremes) { e.drift, e.maxTTL, e.ttl = drift, 10*ms, 10*ms })
	}
	add(func(e *extremes) { e.drift, e.ttl, e.interval, e.maxTTL = math.Nextafter(0.5, 0), day, ms, day })
	return all
}

// extremeRun is a run with the accepted values.
type extremeRun struct {
	extremes
	t       *testing.T
	nodes   []*redistest.MemNode
	clients []redis.UniversalClient
	opts    flightlock.Options
	a, b    *flightlock.Client // two processes
	longest time.Duration      // MaxTTL
}

func (e extremes) run(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := &extremeRun{extremes: e, t: t, nodes: redistest.StartMemNodes(t, 3)}
		for _, n := range x.nodes {
			x.clients = append(x.clients, n.Client(t))
		}
		x.open()
		x.locks()
		x.refreshes()
		x.waits()
		x.fetches()
		x.forgets()
		start := time.Now()
		closeClient(t, x.a)
		closeClient(t, x.b)
		if took := time.Since(start); took > time.Second {
			t.Errorf("Close took %v", took)
		}
	})
}

// refused checks that err names one of the bad values: either nothing is bad, or err is an
// ErrInvalid.
func (x *extremeRun) refused(err error, bad map[string]bool) bool {
	x.t.Helper()
	var names []string
	for name, is := range bad {
		if is {
			names = append(names, name)
		}
	}
	switch {
	case len(names) == 0 && err != nil:
		x.t.Fatalf("all is within its limits, but: %v", err)
	case len(names) == 0:
		return false
	case !errors.Is(err, flightlock.ErrInvalid):
		x.t.Fatalf("%v is beyond its limits, but: %v", names, err)
	}
	for _, name := range names {
		if strings.Contains(err.Error(), name+" is ") && strings.Contains(err.Error(), ", but ") {
			return true
		}
	}
	x.t.Fatalf("%v is beyond its limits, but: %v", names, err)
	return true
}

func beyond(d, least, most time.Duration) bool { return d < least || d > most }

// whole is n as an int.
func whole(n int64) int { return int(min(max(n, math.MinInt), math.MaxInt)) }

func (x *extremeRun) open() {
	x.opts = flightlock.Options{
		Nodes: x.clients, NodeTimeout: x.nodeTimeout, MaxTTL: x.maxTTL, DriftFactor: x.drift, HandoffSlice: x.slice,
		MaxWaiters: whole(x.maxWaiters), DisableNotify: x.deaf,
	}
	c, err := flightlock.New(x.opts)
	if x.refused(err, map[string]bool{
		"Options.NodeTimeout": x.nodeTimeout != 0 && beyond(x.nodeTimeout, time.Millisecond, time.Minute),
		"Options.MaxTTL":      x.maxTTL != 0 && beyond(x.maxTTL, 10*time.Millisecond, 24*time.Hour),
		"Options.DriftFactor": !(x.drift >= 0 && x.drift < 0.5),
		"Options.MaxWaiters":  x.maxWaiters < 0,
	}) {
		x.opts = flightlock.Options{Nodes: x.clients, DisableNotify: x.deaf}
		c, err = flightlock.New(x.opts)
		must(x.t, err)
	}
	x.t.Cleanup(func() { closeClient(x.t, c) }) // again, or for the first time if the test ends here
	x.a, x.b = c, newClient(x.t, x.opts, x.clients...)
	x.longest = time.Minute
	if x.opts.MaxTTL != 0 {
		x.longest = x.opts.MaxTTL
	}
}

// locks: one holder, for its ttl at most, and tokens that rise.
func (x *extremeRun) locks() {
	t, ctx := x.t, x.t.Context()
	asked := time.Now()
	l, err := x.a.TryLock(ctx, "k", x.ttl)
	if x.refused(err, map[string]bool{"ttl": beyond(x.ttl, 10*time.Millisecond, x.longest)}) {
		if n := x.a.Stats().Commands; n != 0 {
			t.Errorf("%d commands before a ttl was refused", n)
		}
		x.ttl = min(time.Second, x.longest)
		l, err = x.a.TryLock(ctx, "k", x.ttl)
	}
	must(t, err)
	if valid := l.Until().Sub(asked); valid <= 0 || valid > x.ttl {
		t.Errorf("valid for %v of a ttl of %v", valid, x.ttl)
	}
	if _, err := x.b.TryLock(ctx, "k", x.ttl); !errors.Is(err, flightlock.ErrNotAcquired) {
		t.Errorf("another gets it too: %v", err)
	}
	mustRelease(t, l)
	synctest.Wait()
	next, err := x.b.TryLock(ctx, "k", x.ttl)
	must(t, err)
	if next.Fence() <= l.Fence() {
		t.Errorf("token %d after %d", next.Fence(), l.Fence())
	}
	mustRelease(t, next)

	if x.deadline != 0 { // a ctx that has ended sends nothing; the largest time is no deadline
		before := x.a.Stats().Commands
		ctx, cancel := context.WithDeadline(ctx, time.Now().Add(x.deadline))
		defer cancel()
		l, err := x.a.TryLock(ctx, "d", x.ttl)
		switch {
		case x.deadline < 0 && (!errors.Is(err, context.DeadlineExceeded) || x.a.Stats().Commands != before):
			t.Errorf("after the end of its ctx: %v", err)
		case x.deadline > time.Millisecond && err != nil:
			t.Errorf("%v before the end of its ctx: %v", x.deadline, err)
		case err == nil:
			mustRelease(t, l)
		}
	}
}

// refreshes: a lock is kept beyond its ttl, as long as the policy says, by as many refreshes as it takes.
func (x *extremeRun) refreshes() {
	t := x.t
	start := time.Now()
	l := mustLock(t, x.a, "r", x.ttl)
	defer func() { _ = l.Release(context.Background()) }()
	valid := l.Until().Sub(start)
	p := flightlock.RefreshPolicy{Interval: x.interval, Timeout: x.timeout, MaxRefreshes: whole(x.maxRefreshes),
		MaxHold: x.maxHold}
	if x.refused(l.AutoRefresh(p), map[string]bool{
		"RefreshPolicy.Interval":     x.interval != 0 && beyond(x.interval, time.Millisecond, valid-1),
		"RefreshPolicy.Timeout":      x.timeout != 0 && beyond(x.timeout, time.Millisecond, math.MaxInt64),
		"RefreshPolicy.MaxRefreshes": x.maxRefreshes < 0,
		"RefreshPolicy.MaxHold":      x.maxHold < 0,
	}) {
		p = flightlock.RefreshPolicy{}
		must(t, l.AutoRefresh(p))
	}
	interval := p.Interval
	if interval == 0 {
		interval = min(x.ttl.Truncate(time.Millisecond)/3, valid/2)
	}
	hold := p.MaxHold
	if hold == 0 {
		hold = math.MaxInt64
	}
	before := x.a.Stats().Refreshes
	wait := min(x.ttl/2*5, 40*interval, 2*time.Minute)
	time.Sleep(wait)
	n := x.a.Stats().Refreshes - before
	if most := uint64(wait/max(interval-5*time.Millisecond, interval/2)) + 1; n > most {
		t.Errorf("%d refreshes in %v, at an interval of %v", n, wait, interval)
	}
	endless := p.MaxRefreshes == 0 || p.MaxRefreshes > 100
	if endless && hold >= wait && interval <= valid/4*3 && l.Err() != nil {
		t.Errorf("after %v of a ttl of %v, refreshed each %v: %v", wait, x.ttl, interval, l.Err())
	}
	if left := time.Until(l.Until()); left > x.ttl {
		t.Errorf("%v left of a ttl of %v", left, x.ttl)
	}
}

// strategies is the number of kinds of strategyOf.
const strategies = 8

// asSaid is a custom strategy that does not declare whether it ends.
type asSaid struct {
	delay time.Duration
	count int
}

func (s asSaid) Next(attempt int) (time.Duration, bool) { return s.delay, attempt <= s.count }

// strategyOf is the strategy, what is wrong with it, and how long it waits in all at least and at
// most.
func (x *extremeRun) strategyOf() (s flightlock.RetryStrategy, bad map[string]bool, least, most time.Duration) {
	const forever = math.MaxInt64
	count := whole(x.count)
	times := func(d time.Duration) time.Duration { // count delays of d
		d = max(d, time.Millisecond)
		switch {
		case count <= 0:
			return 0
		case d > forever/time.Duration(count):
			return forever
		}
		return d * time.Duration(count)
	}
	switch x.strategy % strategies {
	case 0:
		return nil, nil, forever, forever
	case 1:
		return flightlock.NoRetry(), nil, 0, 0
	case 2:
		return flightlock.LimitedRetry(x.delay, count),
			map[string]bool{"LimitedRetry's interval": x.delay <= 0, "LimitedRetry's max": count < 0},
			times(x.delay), times(x.delay)
	case 3:
		return flightlock.ExponentialBackoff(x.delay, x.most),
			map[string]bool{"ExponentialBackoff's min": x.delay <= 0,
				"ExponentialBackoff's max": x.most < x.delay}, forever, forever
	case 4:
		return flightlock.Limit(flightlock.LimitedRetry(x.delay, math.MaxInt), count),
			map[string]bool{"LimitedRetry's interval": x.delay <= 0, "Limit's max": count < 0}, times(x.delay), times(x.delay)
	case 5:
		return asSaid{x.delay, count}, nil, times(x.delay), times(x.delay)
	case 6:
		return asSaid{x.delay, math.MaxInt}, nil, forever, forever
	}
	return flightlock.Limit(nil, count), map[string]bool{"Limit's max": count < 0}, times(0), times(250 * time.Millisecond)
}

// waits: a waiter waits exactly as long as its strategy says, and makes no more attempts than that.
func (x *extremeRun) waits() {
	s, bad, least, most := x.strategyOf()
	l, err := x.a.SingleFlightLock(x.t.Context(), "w", x.ttl, s)
	if x.refused(err, bad) {
		return
	}
	mustRelease(x.t, l)
	x.waitFor("SingleFlightLock", x.b, x.b.SingleFlightLock, s, least, most)
	x.waitFor("Lock", x.b, x.b.Lock, s, least, most)
	x.waitFor("the queue", x.a, x.a.SingleFlightLock, s, least, most)
}

type lockFunc func(
	ctx context.Context, key string, ttl time.Duration, retry flightlock.RetryStrategy,
) (*flightlock.Lock, error)

func (x *extremeRun) waitFor(way string, c *flightlock.Client, lock lockFunc, s flightlock.RetryStrategy, least,
	most time.Duration) {
	const (
		held = 100 * time.Millisecond
		late = 60 * time.Millisecond // polls where there are no notices
	)
	t := x.t
	ttl := min(10*time.Second, x.longest)
	holder := mustLock(t, x.a, "w", ttl)
	must(t, holder.AutoRefresh(flightlock.RefreshPolicy{}))
	synctest.Wait()
	type outcome struct {
		l    *flightlock.Lock
		err  error
		took time.Duration
	}
	ended := make(chan outcome, 1)
	before := c.Stats()
	start := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	if x.deadline != 0 {
		cancel()
		ctx, cancel = context.WithDeadline(t.Context(), start.Add(x.deadline))
		least, most = min(least, max(x.deadline, 0)), min(most, max(x.deadline, 0))
	}
	defer cancel()
	go func() {
		l, err := lock(ctx, "w", ttl, s)
		ended <- outcome{l, err, time.Since(start)}
	}()
	time.Sleep(held)
	mustRelease(t, holder)
	got := <-ended
	after := c.Stats()
	if got.err == nil {
		if got.l.Fence() <= holder.Fence() {
			t.Errorf("%s: token %d after %d", way, got.l.Fence(), holder.Fence())
		}
		mustRelease(t, got.l)
	}
	switch {
	case most < held-5*time.Millisecond:
		if !errors.Is(got.err, flightlock.ErrNotAcquired) || got.took < least || got.took > most+2*time.Millisecond {
			t.Errorf("%s: after %v of %v to %v: %v", way, got.took, least, most, got.err)
		}
	case least > held+late:
		if got.err != nil || got.took > held+late {
			t.Errorf("%s: after %v, of %v to %v: %v", way, got.took, least, most, got.err)
		}
	}
	gap := time.Millisecond
	if kind := x.strategy % strategies; kind != 0 && kind != 3 && kind != 7 {
		gap = min(max(x.delay, gap), ttl/2)
	}
	attempts := int64(after.Attempts - before.Attempts)
	if limit := int64(got.took/gap) + int64(got.took/(50*time.Millisecond)) + 5; attempts > limit {
		t.Errorf("%s: %d attempts in %v, by a strategy of %v", way, attempts, got.took, gap)
	}
}

// fetches: one load for two processes, and errors for as long as they are held.
func (x *extremeRun) fetches() {
	t := x.t
	o := &origin{takes: 20 * time.Millisecond}
	opts := flightlock.FetchOptions{TTL: x.fetchTTL, LoadTimeout: x.load, WaitTimeout: x.wait, ErrorHold: x.errorHold,
		MaxUnlockedLoads: whole(x.unlocked)}
	trial, err := flightlock.NewFetcher(x.a, o.source(), opts)
	if x.refused(err, map[string]bool{
		"FetchOptions.TTL":              x.fetchTTL != 0 && beyond(x.fetchTTL, 10*time.Millisecond, x.longest),
		"FetchOptions.LoadTimeout":      x.load < 0,
		"FetchOptions.WaitTimeout":      x.wait < 0,
		"FetchOptions.MaxUnlockedLoads": x.unlocked < 0,
	}) {
		opts = flightlock.FetchOptions{}
	} else {
		x.closeFetchers(trial)
	}
	f, other := newFetcher(t, x.a, o, opts), newFetcher(t, x.b, o, opts)
	for name, d := range map[string]time.Duration{"LoadTimeout": opts.LoadTimeout, "WaitTimeout": opts.WaitTimeout} {
		if d != 0 && d < 200*time.Millisecond {
			t.Logf("%s of %v is too short to say what comes of it", name, d)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			if _, err := f.Fetch(ctx, "f"); ctx.Err() != nil {
				t.Errorf("a Fetch that does not end: %v", err)
			}
			x.closeFetchers(f, other)
			return
		}
	}
	mine, theirs := fetching(t.Context(), f, "f", 2), fetching(t.Context(), other, "f", 2)
	wantAll(t, mine, 2, "f=1")
	wantAll(t, theirs, 2, "f=1")

	var loads atomic.Int64
	o.load = func(context.Context, string) (string, error) {
		loads.Add(1)
		return "", errors.New("no value")
	}
	failing := newFetcher(t, x.a, o, opts)
	for range 2 {
		if _, err := failing.Fetch(t.Context(), "g"); err == nil || !strings.HasSuffix(err.Error(), "no value") {
			t.Errorf("a load that failed: %v", err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	hold := opts.ErrorHold
	if hold == 0 {
		hold = time.Second
	}
	switch n := loads.Load(); {
	case hold > 20*time.Millisecond && n != 1, hold < 5*time.Millisecond && n != 2:
		t.Errorf("%d loads, with an error held for %v", n, hold)
	}
	x.closeFetchers(f, other, failing)
}

func (x *extremeRun) closeFetchers(all ...*flightlock.Fetcher[string]) {
	for _, f := range all {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		must(x.t, f.Close(ctx))
	}
}

// forgets: with any MaxTTL, a node that was emptied has no vote.
func (x *extremeRun) forgets() {
	t := x.t
	ttl := min(time.Minute, x.longest)
	l := mustLock(t, x.a, "q", ttl)
	defer func() { _ = l.Release(context.Background()) }()
	synctest.Wait()
	x.nodes[2].Mini.Del("lock:q") // as if it had never had it: the others are a majority
	x.nodes[0].Mini.FlushAll()
	late := newClient(t, x.opts, x.clients...)
	for _, c := range []*flightlock.Client{x.b, late} {
		_, err := c.Lock(t.Context(), "q", ttl, flightlock.NoRetry())
		synctest.Wait() // two nodes may have decided before the third was verified
		switch {
		case l.Err() != nil: // a ttl too short to prove anything
			return
		case err == nil:
			t.Errorf("with MaxTTL %v and DriftFactor %v, a node that forgot has a vote", x.longest, x.opts.DriftFactor)
		case c.Stats().Quarantined != 1:
			t.Errorf("with MaxTTL %v, %d nodes are in quarantine", x.longest, c.Stats().Quarantined)
		}
	}
}
