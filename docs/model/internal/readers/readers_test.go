package readers

import (
	"math/rand/v2"
	"testing"
)

// With all rules no writer is valid beside a reader, on one node in every order of nine steps, and on up to
// three by chance. Without any of them one is; for OwnShare see below.
func TestReadersBesideAWriter(t *testing.T) {
	one := Model{All, 1}
	states, err := one.Explore(9)
	if err != nil {
		t.Error("one node:", err)
	}
	t.Logf("%d states", states)
	for nodes := 1; nodes <= maxNodes; nodes++ {
		m := Model{All, nodes}
		for seed := range uint64(60) {
			if err := m.Walk(rand.New(rand.NewPCG(seed, uint64(nodes))), 5000); err != nil {
				t.Fatalf("%d nodes, seed %d: %v", nodes, seed, err)
			}
		}
	}
	for name, without := range map[string]func(*Rules){
		"the first reader that leaves releases the key":     func(r *Rules) { r.LastOut = false },
		"the key lives as long as the share that came last": func(r *Rules) { r.Longest = false },
		"half of the nodes decide":                          func(r *Rules) { r.Majority = false },
		"a writer is granted what readers share":            func(r *Rules) { r.Exclusive = false },
	} {
		m := Model{All, maxNodes}
		if without(&m.Rules); !m.Majority {
			m.Nodes = 2
		}
		found := false
		for seed := uint64(0); seed < 2000 && !found; seed++ {
			found = m.Walk(rand.New(rand.NewPCG(seed, 9)), 5000) != nil
		}
		if !found {
			t.Errorf("%s, and the model finds nothing", name)
		}
	}
}

// A reader that has two of three nodes renews its lease on one of them, and on the third, where it has no
// share. If that counted, a writer could get the third when its reader leaves, and the second when the share
// there ends. It takes so many steps that chance does not find it.
func TestARefreshWithoutAShare(t *testing.T) {
	for _, own := range []bool{true, false} {
		m := Model{All, 3}
		m.OwnShare = own
		s := new(State)
		arrive := func(p, kind int, at ...int) {
			for _, i := range at {
				m.arrive(s, ownerOf(p, s), i, kind, true)
			}
		}
		m.act(s, 0, false)
		arrive(0, acquire, 0, 1)
		s.tick()
		s.tick()
		m.act(s, 1, false)
		arrive(1, acquire, 2)
		s.tick()
		m.act(s, 0, false)
		arrive(0, refresh, 0, 2)
		m.act(s, 1, true)
		arrive(1, leave, 2)
		s.tick()
		m.act(s, writer, false)
		arrive(writer, acquire, 1, 2)
		if !s.procs[writer].held || (s.violation() == nil) != own {
			t.Errorf("with OwnShare=%v: %+v, %v", own, s.procs, s.violation())
		}
	}
}
