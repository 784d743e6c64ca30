package sim

import (
	"cmp"
	"testing"
	"time"
)

// No key stays free while somebody waits for it: not without faults, and not for long where scripts are
// forgotten, processes close, or one node of three or more is away, hangs, is out of reach of one process,
// forgets, or loses its connections again and again.
func TestNobodyWaitsForAFreeKey(t *testing.T) {
	in := newInterpreter()
	n := cmp.Or(*seedsFlag, fewSeeds)
	var grants, loads int
	var longest time.Duration
	for seed := *firstFlag; seed < *firstFlag+n; seed++ {
		p := newPlan(seed, in)
		p.makeGentle()
		res := simulate(t, p, nil)
		for _, v := range res.violations {
			t.Errorf("seed %d: %s; faults: %v", seed, v, p.faults)
		}
		grants, loads, longest = grants+res.grants, loads+res.loads, max(longest, res.longest)
		collect(seed)
	}
	t.Logf("%d seeds from %d: %d locks, %d loads; a key was free for %v at most", n, *firstFlag, grants, loads,
		longest)
	if n >= 50 && loads == 0 {
		t.Error("nothing was loaded")
	}
}

// makeGentle leaves one kind of fault at most, which costs no more than a few NodeTimeouts.
func (p *plan) makeGentle() {
	p.faults, p.down, p.mute, p.spikes, p.copies = nil, nil, nil, 0, 0
	p.forgets, p.loose, p.informed, p.deployed = false, false, 0, true
	p.latency, p.nodeTimeout = min(p.latency, time.Millisecond), max(p.nodeTimeout, 20*time.Millisecond)
	for i := range p.own {
		p.own[i].nodeTimeout = max(p.own[i].nodeTimeout, 20*time.Millisecond)
	}
	p.chaos, p.enough, p.patience = 2*time.Second, 3000, 300*time.Millisecond
	kind := p.seed % 9
	if p.nodes < 3 {
		kind %= 4
	}
	f := fault{
		at: 250 * time.Millisecond, lasts: 10 * time.Second, up: p.seed%3 != 0, down: p.seed%3 != 1,
		server: int(p.seed/9) % p.nodes, client: int(p.seed/5) % p.clients,
	}
	often := func(what what, times int, pause time.Duration) {
		for i := range times {
			g := f
			g.what, g.late = what, i%2 == 0
			g.at, g.server, g.client = f.at+time.Duration(i)*pause, (f.server+i)%p.nodes, (f.client+3*i)%p.clients
			p.faults = append(p.faults, g)
		}
	}
	switch kind {
	case 2:
		often(closeClient, 6, 300*time.Millisecond)
	case 3:
		often(forgetScripts, 6, 300*time.Millisecond)
	case 4:
		f.what = crashServer
	case 5:
		f.what = stopServer
	case 6:
		f.what = cutLink
	case 7:
		f.what = flushServer
	case 8:
		often(resetConns, 20, 80*time.Millisecond)
	}
	if kind >= 4 && kind <= 7 {
		p.faults = []fault{f}
	}
}
