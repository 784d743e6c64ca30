package flightlock_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// extremes are the values of all options and policies, and of all other arguments of a caller.
type extremes struct {
	nodeTimeout, maxTTL time.Duration
	drift               float64
	slice               time.Duration
	maxWaiters          int64
	deaf                bool // DisableNotify
	ttl, deadline       time.Duration
	interval            time.Duration
	maxHold             time.Duration
	maxRefreshes        int64
	strategy            uint8
	delay, most         time.Duration
	count               int64
}

// FuzzExtremes sets all options, policies and strategies to any values. Each is refused, by its
// name and before any traffic, or it works as documented: one holder, a validity within the ttl,
// rising tokens, a refresh in time, a wait as long as the strategy's without busy polling, a Close
// that returns. What was refused is left out, and the rest is tried all the same.
func FuzzExtremes(f *testing.F) {
	for i, e := range extremeSeeds() {
		if i%testkit.Sized(1, 12) != 0 {
			continue
		}
		f.Add(int64(e.nodeTimeout), int64(e.maxTTL), e.drift, int64(e.slice), e.maxWaiters, e.deaf,
			int64(e.ttl), int64(e.deadline),
			int64(e.interval), int64(e.maxHold), e.maxRefreshes,
			e.strategy, int64(e.delay), int64(e.most), e.count)
	}
	f.Fuzz(func(
		t *testing.T, nodeTimeout, maxTTL int64, drift float64, slice, maxWaiters int64, deaf bool,
		ttl, deadline int64,
		interval, maxHold, maxRefreshes int64,
		strategy uint8, delay, most, count int64,
	) {
		d := func(n int64) time.Duration { return time.Duration(n) }
		extremes{
			nodeTimeout: d(nodeTimeout), maxTTL: d(maxTTL), drift: drift, slice: d(slice), maxWaiters: maxWaiters,
			deaf: deaf,
			ttl:  d(ttl), deadline: d(deadline),
			interval: d(interval), maxHold: d(maxHold), maxRefreshes: maxRefreshes,
			strategy: strategy, delay: d(delay), most: d(most), count: count,
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
	for _, d := range []time.Duration{never, -1, 1, ms - 1, ms, 10*ms - 1, 10 * ms, time.Minute, time.Minute + 1,
		day, day + 1, forever / 2, forever - 1, forever} {
		add(func(e *extremes) {
			e.nodeTimeout, e.slice, e.ttl, e.interval, e.strategy, e.delay = d, d, d, d, 2, d
		})
		add(func(e *extremes) {
			e.maxTTL, e.deaf, e.ttl, e.deadline, e.maxHold, e.strategy, e.most = d, true, d, d, d, 3, d
		})
	}
	for kind := range uint8(strategies) {
		for _, n := range []int64{-1, forever} {
			add(func(e *extremes) {
				e.maxWaiters, e.maxRefreshes, e.count, e.strategy, e.delay, e.most = n, n, n, kind, forever, forever
			})
		}
		add(func(e *extremes) { e.deaf, e.strategy, e.delay, e.most = true, kind, 1, 1 })
	}
	for _, n := range []int64{never, 1, math.MaxInt32, math.MaxInt32 + 1} {
		add(func(e *extremes) { e.maxWaiters, e.maxRefreshes, e.count = n, n, n })
	}
	add(func(e *extremes) { e.strategy, e.delay = 6, never })
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
		x.forgets()
		start := time.Now()
		lockkit.Close(t, x.a)
		lockkit.Close(t, x.b)
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
		NodeTimeout: x.nodeTimeout, MaxTTL: x.maxTTL, DriftFactor: x.drift, HandoffSlice: x.slice,
		MaxWaiters: whole(x.maxWaiters), DisableNotify: x.deaf,
	}
	c, err := flightlock.New(x.opts, x.clients...)
	if x.refused(err, map[string]bool{
		"Options.NodeTimeout": x.nodeTimeout != 0 && beyond(x.nodeTimeout, time.Millisecond, time.Minute),
		"Options.MaxTTL":      x.maxTTL != 0 && beyond(x.maxTTL, 10*time.Millisecond, 24*time.Hour),
		"Options.DriftFactor": !(x.drift >= 0 && x.drift < 0.5),
		"Options.MaxWaiters":  x.maxWaiters < 0,
	}) {
		x.opts = flightlock.Options{DisableNotify: x.deaf}
		c, err = flightlock.New(x.opts, x.clients...)
		testkit.Must(x.t, err)
	}
	x.t.Cleanup(func() { lockkit.Close(x.t, c) }) // again, or for the first time if the test ends here
	x.a, x.b = c, lockkit.New(x.t, x.opts, x.clients...)
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
	testkit.Must(t, err)
	if valid := l.Until().Sub(asked); valid <= 0 || valid > x.ttl {
		t.Errorf("valid for %v of a ttl of %v", valid, x.ttl)
	}
	if _, err := x.b.TryLock(ctx, "k", x.ttl); !errors.Is(err, flightlock.ErrNotAcquired) {
		t.Errorf("another gets it too: %v", err)
	}
	lockkit.Release(t, l)
	synctest.Wait()
	next, err := x.b.TryLock(ctx, "k", x.ttl)
	testkit.Must(t, err)
	if next.Fence() <= l.Fence() {
		t.Errorf("token %d after %d", next.Fence(), l.Fence())
	}
	lockkit.Release(t, next)

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
			lockkit.Release(t, l)
		}
	}
}

// refreshes: a lock is kept beyond its ttl, as long as the policy says, by as many refreshes as it takes.
func (x *extremeRun) refreshes() {
	t := x.t
	for _, n := range x.nodes { // so that a refresh needs time, of the shortest Interval, too
		n.SetDelay(300 * time.Microsecond)
		defer n.SetDelay(0)
	}
	start := time.Now()
	l := lockkit.Lock(t, x.a, "r", x.ttl)
	defer func() { _ = l.Release(context.Background()) }()
	valid := l.Until().Sub(start)
	p := flightlock.RefreshPolicy{Interval: x.interval, MaxRefreshes: whole(x.maxRefreshes),
		MaxHold: x.maxHold}
	if x.refused(l.AutoRefresh(t.Context(), p), map[string]bool{
		"RefreshPolicy.Interval":     x.interval != 0 && beyond(x.interval, time.Millisecond, valid-1),
		"RefreshPolicy.MaxRefreshes": x.maxRefreshes < 0,
		"RefreshPolicy.MaxHold":      x.maxHold < 0,
	}) {
		p = flightlock.RefreshPolicy{}
		testkit.Must(t, l.AutoRefresh(t.Context(), p))
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
func (x *extremeRun) strategyOf() (
	s flightlock.RetryStrategy, bad map[string]bool, least, most time.Duration,
) {
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
			map[string]bool{"LimitedRetry's interval": x.delay <= 0, "Limit's max": count < 0}, times(x.delay),
			times(x.delay)
	case 5:
		return asSaid{x.delay, count}, nil, times(x.delay), times(x.delay)
	case 6:
		return asSaid{x.delay, math.MaxInt}, nil, forever, forever
	}
	return flightlock.Limit(nil, count), map[string]bool{"Limit's max": count < 0}, times(0),
		times(250 * time.Millisecond)
}

// waits: a waiter waits exactly as long as its strategy says, and makes no more attempts than that.
func (x *extremeRun) waits() {
	s, bad, least, most := x.strategyOf()
	l, err := x.a.SingleFlightLock(x.t.Context(), "w", x.ttl, s)
	if x.refused(err, bad) {
		return
	}
	lockkit.Release(x.t, l)
	x.waitFor("another process", x.b, s, least, most)
	x.waitFor("the queue", x.a, s, least, most)
}

func (x *extremeRun) waitFor(way string, c *flightlock.Client, s flightlock.RetryStrategy, least,
	most time.Duration) {
	const (
		held = 100 * time.Millisecond
		late = 60 * time.Millisecond // polls where there are no notices
	)
	t := x.t
	ttl := min(10*time.Second, x.longest)
	holder := lockkit.Lock(t, x.a, "w", ttl)
	testkit.Must(t, holder.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
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
		l, err := c.SingleFlightLock(ctx, "w", ttl, s)
		ended <- outcome{l, err, time.Since(start)}
	}()
	time.Sleep(held)
	lockkit.Release(t, holder)
	got := <-ended
	after := c.Stats()
	if got.err == nil {
		if got.l.Fence() <= holder.Fence() {
			t.Errorf("%s: token %d after %d", way, got.l.Fence(), holder.Fence())
		}
		lockkit.Release(t, got.l)
	}
	switch {
	case most < held-5*time.Millisecond:
		if !errors.Is(got.err, flightlock.ErrNotAcquired) || got.took < least ||
			got.took > most+2*time.Millisecond {
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

// forgets: with any MaxTTL, a node that was emptied has no vote.
func (x *extremeRun) forgets() {
	t := x.t
	ttl := min(time.Minute, x.longest)
	l := lockkit.Lock(t, x.a, "q", ttl)
	defer func() { _ = l.Release(context.Background()) }()
	synctest.Wait()
	x.nodes[2].Mini.Del("lock:q") // as if it had never had it: the others are a majority
	x.nodes[0].Mini.FlushAll()
	late := lockkit.New(t, x.opts, x.clients...)
	for _, c := range []*flightlock.Client{x.b, late} {
		_, err := c.TryLock(t.Context(), "q", ttl)
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

// FuzzKey tries any bytes as a key, with any bytes as a prefix: it is refused before any traffic,
// or it can be locked by one client at a time and is returned by every method unchanged.
func FuzzKey(f *testing.F) {
	for _, key := range []string{"k", "", "{", "{}", "{a}b", "\x00", "\xff\xfe", "lock:k", "flightlock:{x}",
		"a b\r\nDEL k", strings.Repeat("x", 4097)} {
		for _, prefix := range []string{"", "flightlock:"} {
			f.Add(prefix, false, key)
			f.Add(prefix, true, key)
		}
	}
	m, err := redistest.LaunchMemNode("10.0.0.1:6379")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(m.Close)
	conn := redis.NewClient(m.Options())
	f.Cleanup(func() { _ = conn.Close() })
	f.Fuzz(func(t *testing.T, prefix string, none bool, key string) {
		ctx := context.Background()
		opts := flightlock.Options{KeyPrefix: prefix, NoPrefix: none, NodeTimeout: 10 * time.Second,
			DisableNotify: true}
		a, err := flightlock.New(opts, conn)
		if err != nil {
			lockkit.WantInvalid(t, err, "KeyPrefix")
			return
		}
		defer a.Close(ctx)
		b, err := flightlock.New(opts, conn)
		testkit.Must(t, err)
		defer b.Close(ctx)
		l, err := a.TryLock(ctx, key, time.Minute)
		if err != nil {
			lockkit.WantInvalid(t, err, "key")
			return
		}
		if l.Key() != key || l.Fence() == 0 || l.Err() != nil {
			t.Errorf("key %q, token %d, err %v", l.Key(), l.Fence(), l.Err())
		}
		if _, err := b.TryLock(ctx, key, time.Minute); !errors.Is(err, flightlock.ErrNotAcquired) {
			t.Errorf("a second client gets %v", err)
		}
		testkit.Must(t, errors.Join(l.Refresh(ctx), l.Release(ctx)))
		next, err := b.TryLock(ctx, key, time.Minute)
		testkit.Must(t, err)
		if next.Fence() <= l.Fence() {
			t.Errorf("token %d after %d", next.Fence(), l.Fence())
		}
		testkit.Must(t, next.Release(ctx))
	})
}

// Bad options are an ErrInvalid that names the field, before any traffic. FuzzExtremes has all numbers.
func TestNewRefusesBadOptions(t *testing.T) {
	node := func() redis.UniversalClient {
		c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
		t.Cleanup(func() { c.Close() })
		return c
	}
	one := node()
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	defer ring.Close()
	failover := redis.NewFailoverClusterClient(&redis.FailoverOptions{MasterName: "m",
		SentinelAddrs: []string{"127.0.0.1:1"}})
	defer failover.Close()
	universal := redis.NewUniversalClient(&redis.UniversalOptions{MasterName: "m",
		Addrs:          []string{"127.0.0.1:1"},
		RouteByLatency: true})
	defer universal.Close()
	var many []redis.UniversalClient
	for range 65 {
		many = append(many, one)
	}
	type (
		options = flightlock.Options
		clients = []redis.UniversalClient
		policy  = flightlock.RefreshPolicy
	)
	type traced struct{ redis.UniversalClient } // a user's own
	for name, tc := range map[string]struct {
		opts  flightlock.Options
		nodes []redis.UniversalClient // nil: one
		says  string                  // each of them
	}{
		"no nodes":           {options{}, clients{}, "nodes|at least one"},
		"too many nodes":     {options{}, many, "nodes|65|64"},
		"nil node":           {options{}, clients{one, nil}, "nodes[1]|nil"},
		"typed nil node":     {options{}, clients{(*redis.Client)(nil)}, "nodes[0]|nil"},
		"struct":             {options{}, clients{traced{one}}, "nodes[0]|traced"},
		"ring":               {options{}, clients{ring}, "nodes[0]|Ring"},
		"failover cluster":   {options{}, clients{one, failover}, "nodes[1]|NewFailoverClient"},
		"universal failover": {options{}, clients{universal}, "nodes[0]|NewFailoverClient"},
		"same client twice":  {options{}, clients{one, one}, "nodes[1]|nodes[0]"},
		"same address twice": {options{}, clients{one, node()}, "nodes[1]|127.0.0.1:1|nodes[0]"},
		"long KeyPrefix":     {options{KeyPrefix: strings.Repeat("x", 4097)}, nil, "KeyPrefix|4097|4096"},
		"Refresh.Interval": {options{Refresh: policy{Interval: time.Minute}}, nil,
			"Options.Refresh.Interval|1m0s"},
		"Refresh.MaxHold": {options{Refresh: policy{MaxHold: -1}}, nil, "Options.Refresh.MaxHold|-1ns"},
		"Refresh.Retry": {options{Refresh: policy{Retry: flightlock.Limit(nil, -1)}}, nil,
			"Limit's max|-1"},
		"NoPrefix and KeyPrefix": {options{NoPrefix: true, KeyPrefix: "lock:"}, nil, `KeyPrefix|"lock:"|NoPrefix`},
		"long Label":             {options{Label: strings.Repeat("x", 257)}, nil, "Options.Label|257|256"},
		"reserved KeyPrefix": {options{KeyPrefix: "flightlock:{app}:"}, nil,
			"KeyPrefix|flightlock:{app}:|reserved"},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.nodes == nil {
				tc.nodes = clients{one}
			}
			_, err := flightlock.New(tc.opts, tc.nodes...)
			lockkit.WantInvalid(t, err, strings.Split(tc.says, "|")...)
		})
	}
}

// A Client that is a zero value says so.
func TestAZeroClientIsInvalid(t *testing.T) {
	var c flightlock.Client
	ctx := t.Context()
	_, single := c.SingleFlightLock(ctx, "k", time.Second, nil)
	_, try := c.TryLock(ctx, "k", time.Second)
	_, check := c.Check(ctx)
	cache := &fetchkit.Cache{}
	_, fetcher := fetch.New(&c, cache.Store(), cache.Load, fetch.Options{})
	do := c.Do(ctx, "k", time.Second, nil, func(context.Context, *flightlock.Lock) error { return nil })
	for what, err := range map[string]error{
		"SingleFlightLock": single, "TryLock": try, "Do": do, "Check": check, "fetch.New": fetcher,
		"Ready": c.Ready(ctx), "Close": c.Close(ctx),
	} {
		if !errors.Is(err, flightlock.ErrInvalid) || !strings.Contains(err.Error(), "not made by New or Open") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if s := c.Stats(); s != (flightlock.Stats{}) {
		t.Errorf("Stats: %+v", s)
	}
}

// A Fetcher whose locks Options.Refresh would refresh too late is refused.
func TestAFetcherNeedsARefreshBeforeItsTTL(t *testing.T) {
	dead := redis.NewClient(&redis.Options{Addr: redistest.RefusedAddr(t)})
	defer dead.Close()
	c := lockkit.New(t, flightlock.Options{Refresh: flightlock.RefreshPolicy{Interval: 15 * time.Second}}, dead)
	cache := &fetchkit.Cache{}
	_, err := fetch.New(c, cache.Store(), cache.Load, fetch.Options{})
	lockkit.WantInvalid(t, err, "Options.Refresh.Interval", "15s", "10s")
	fetchkit.New(t, c, cache, fetch.Options{TTL: 20 * time.Second})
}

// A bad key, ttl or strategy is an ErrInvalid that names value and limit, and nothing is
// sent: the node does not even exist. FuzzExtremes has more numbers.
func TestBadArgumentsAreRefusedBeforeAnyTraffic(t *testing.T) {
	dead := redis.NewClient(&redis.Options{Addr: redistest.RefusedAddr(t)})
	defer dead.Close()
	c := lockkit.New(t, flightlock.Options{NoPrefix: true, MaxTTL: 30 * time.Second}, dead)
	const ok = time.Second
	for name, tc := range map[string]struct {
		key   string
		ttl   time.Duration
		retry flightlock.RetryStrategy
		says  []string
	}{
		"empty key":        {"", ok, nil, []string{"key", "empty"}},
		"key of 4 KiB + 1": {strings.Repeat("k", 4097), ok, nil, []string{"key", "4097", "4096"}},
		"a key of ours":    {"flightlock:{abc}:fence:0", ok, nil, []string{"key", "flightlock:{"}},
		"ttl 9.999ms":      {"k", 9999 * time.Microsecond, nil, []string{"ttl", "9.999ms", "10ms"}},
		"ttl over MaxTTL":  {"k", 30*time.Second + 1, nil, []string{"ttl", "30.000000001s", "30s"}},
		"interval 0":       {"k", ok, flightlock.LimitedRetry(0, 3), []string{"interval", "0s"}},
		"backoff max below min": {"k", ok, flightlock.ExponentialBackoff(time.Second, time.Millisecond),
			[]string{"max", "1ms", "1s"}},
		"Within 0": {"k", ok, flightlock.Within(nil, 0), []string{"Within's d", "0s"}},
		"negative Within in FailFast": {"k", ok, flightlock.FailFast(flightlock.Within(nil, -1)),
			[]string{"Within's d", "-1ns"}},
		"Within of a bad one": {"k", ok, flightlock.Within(flightlock.LimitedRetry(-1, 1), 1),
			[]string{"interval"}}, "negative Limit": {"k", ok, flightlock.Limit(nil, -1), []string{"Limit", "-1"}},
		"Limit of a bad one": {"k", ok, flightlock.Limit(flightlock.LimitedRetry(-1, 1), 1), []string{"interval"}},
		"FailFast of one":    {"k", ok, flightlock.FailFast(flightlock.LimitedRetry(-1, 1)), []string{"interval"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.SingleFlightLock(t.Context(), tc.key, tc.ttl, tc.retry)
			lockkit.WantInvalid(t, err, tc.says...)
			if tc.retry == nil {
				_, err = c.TryLock(t.Context(), tc.key, tc.ttl)
				lockkit.WantInvalid(t, err, tc.says...)
			}
		})
	}
	if n := c.Stats().Commands; n != 0 {
		t.Errorf("%d commands were written", n)
	}
}

// Strategies are values: one call does not use up another's retries.
func TestStrategiesAreImmutable(t *testing.T) {
	s := flightlock.Limit(flightlock.ExponentialBackoff(time.Millisecond, 4*time.Millisecond), 3)
	for range 3 {
		for n := 1; n <= 3; n++ {
			d, ok := s.Next(n)
			if bound := time.Millisecond << (n - 1); !ok || d <= 0 || d > bound {
				t.Errorf("Next(%d) = %v, %v; want up to %v", n, d, ok, bound)
			}
		}
		if _, ok := s.Next(4); ok {
			t.Error("a fourth retry")
		}
	}
	if _, ok := flightlock.NoRetry().Next(1); ok {
		t.Error("NoRetry retries")
	}
	huge := flightlock.ExponentialBackoff(time.Second, math.MaxInt64)
	if d, ok := huge.Next(1 << 20); !ok || d <= 0 {
		t.Errorf("backoff overflows: %v, %v", d, ok)
	}
}
