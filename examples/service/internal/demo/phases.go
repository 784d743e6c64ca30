package demo

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// phase is what happens to the service while callers come.
type phase struct {
	name   string
	own    bool   // it stops or flushes servers, so they must be the demo's
	broken string // the process whose errors are told apart
	fails  bool   // loads fail in it
	weather

	// happen makes things happen and mends them again. Callers come until it has returned, and for the length of
	// a phase at least. What it breaks is broken for three fifths of that.
	happen func(ctx context.Context, s *stage, saw *seen) error

	// load, if set, says who comes in place of the usual callers: so many, at that rate.
	load func(s *stage) (next func() call, limit, rate int)
}

const broken = 0.6 // of a phase

// phases are all of them, in the order of the table.
func phases() []phase {
	return []phase{
		{name: "cold start", weather: fine, happen: nothing, load: coldStart},
		{name: "steady", weather: fine | prompt, happen: nothing},
		{name: "rolling deploy", weather: fine | prompt, happen: deploy},
		{name: "origin slow", weather: fine, happen: originSlow},
		{name: "origin failing", happen: originFailing, fails: true},
		{name: "one process broken", weather: answered, happen: brokenProcess, broken: "p1", fails: true},
		{name: "processors busy", weather: fine | prompt, happen: busy},
		{name: "one node stopped", weather: fine | prompt, own: true,
			happen: stopped(func(s *servers) []server { return s.nodes[:1] })},
		{name: "all nodes stopped", own: true, happen: stopped((*servers).all)},
		{name: "node killed and empty", weather: fine, own: true, happen: killed},
		{name: "cache flushed", weather: fine, own: true, happen: flushed},
		{name: "cache slow", weather: answered | sluggish, own: true, happen: slowed},
		{name: "cache stopped", weather: answered, own: true,
			happen: stopped(func(s *servers) []server { return []server{s.cache} })},
		{name: "cache killed and empty", weather: answered, own: true, happen: cacheKilled},
	}
}

// short is how -only may write a phase: without blanks.
func short(name string) string { return strings.ReplaceAll(name, " ", "-") }

func phaseNames() (names []string) {
	for _, p := range phases() {
		names = append(names, short(p.name))
	}
	return names
}

// choosePhases reads the value of -only: names, or what they begin with.
func choosePhases(only string) (chosen []phase, err error) {
	if only == "" {
		return phases(), nil
	}
	want := map[string]bool{}
	for name := range strings.SplitSeq(only, ",") {
		want[short(strings.TrimSpace(name))] = true
	}
	for _, p := range phases() {
		for name := range want {
			if name != "" && strings.HasPrefix(short(p.name), name) {
				chosen = append(chosen, p)
				delete(want, name)
				break
			}
		}
	}
	for name := range want {
		return nil, fmt.Errorf("-only: no phase %q; there are %s", name, strings.Join(phaseNames(), ", "))
	}
	return chosen, nil
}

func nothing(context.Context, *stage, *seen) error { return nil }

// coldLength is how many lengths of a phase a cold start takes.
const coldLength = 6

// coldStart asks for every key twice at once.
func coldStart(s *stage) (next func() call, limit, rate int) {
	limit = 2 * s.cfg.Keys
	return eachTwice(s.cfg.Keys, s.cfg.seed), limit, max(1, int(float64(limit)/s.seconds(coldLength).Seconds()))
}

// deploy ends one process after the other and starts it again on its port, the next one when the balancer has
// it back.
func deploy(ctx context.Context, s *stage, _ *seen) error {
	for _, p := range s.procs {
		if err := p.end(); err != nil {
			return s.withLog(p, err)
		}
		if err := p.start(); err != nil {
			return err
		}
		if err := p.ready(ctx); err != nil {
			return s.withLog(p, err)
		}
		pause(ctx, 3*checkEvery)
	}
	return nil
}

// originSlow makes each load take 25 times as long.
func originSlow(ctx context.Context, s *stage, _ *seen) error {
	s.origin.setLatency(25 * s.cfg.Latency)
	defer s.origin.setLatency(s.cfg.Latency)
	pause(ctx, s.seconds(broken))
	return nil
}

// originFailing makes each load fail.
func originFailing(ctx context.Context, s *stage, _ *seen) error {
	s.origin.setFailing(true)
	defer s.origin.setFailing(false)
	pause(ctx, s.seconds(broken))
	return nil
}

// brokenProcess takes the first process's credentials for the origin away.
func brokenProcess(ctx context.Context, s *stage, _ *seen) error {
	if err := s.b.admin("/admin/token?t=wrong", 0); err != nil {
		return err
	}
	pause(ctx, s.seconds(broken))
	return s.b.admin("/admin/token?t="+originToken, 0)
}

// busy takes the processors away: all processes compute something else besides.
func busy(ctx context.Context, s *stage, _ *seen) error {
	if err := s.b.admin(fmt.Sprintf("/admin/spin?n=%d", s.cfg.Spin), s.everyProcess()...); err != nil {
		return err
	}
	pause(ctx, s.seconds(broken))
	return s.b.admin("/admin/spin?n=0", s.everyProcess()...)
}

// stopped stops servers and lets them go on. Calls for hot keys that are due later than a second after that,
// and before they go on, are measured by themselves.
func stopped(which func(*servers) []server) func(context.Context, *stage, *seen) error {
	return func(ctx context.Context, s *stage, saw *seen) (err error) {
		d := s.seconds(broken)
		began := time.Now()
		saw.hotUntil.Store(began.Add(d).UnixNano())
		saw.hotFrom.Store(began.Add(time.Second).UnixNano())
		for _, one := range which(s.servers) {
			err = errors.Join(err, one.stop())
		}
		pause(ctx, d-time.Since(began))
		for _, one := range which(s.servers) {
			err = errors.Join(err, one.resume())
		}
		return err
	}
}

// slowed has the cache's server stand still for half of the time.
func slowed(ctx context.Context, s *stage, _ *seen) (err error) {
	for end := time.Now().Add(s.seconds(broken)); err == nil && ctx.Err() == nil && time.Now().Before(end); {
		err = s.servers.cache.stop()
		pause(ctx, slowFor)
		err = errors.Join(err, s.servers.cache.resume())
		pause(ctx, slowFor)
	}
	return err
}

const slowFor = 100 * time.Millisecond

// cacheKilled kills the cache's server, which comes back empty.
func cacheKilled(ctx context.Context, s *stage, _ *seen) error {
	err := s.servers.cache.kill()
	pause(ctx, s.seconds(broken/2))
	defer s.origin.cacheFlushed()
	return errors.Join(err, s.servers.cache.restart())
}

// killed kills a node, which comes back empty.
func killed(ctx context.Context, s *stage, _ *seen) error {
	err := s.servers.nodes[0].kill()
	pause(ctx, s.seconds(broken/2))
	return errors.Join(err, s.servers.nodes[0].restart())
}

// flushed takes all values from the cache, at once.
func flushed(ctx context.Context, s *stage, _ *seen) error {
	pause(ctx, s.seconds(broken/3))
	defer s.origin.cacheFlushed()
	return s.servers.cache.flush()
}
