package app

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/flightlock/flightlock/examples/service/internal/variant"
	"github.com/flightlock/flightlock/internal/redistest"
)

// Each tick is started once, also those that fall into an outage of all nodes, or into a deploy.
func TestEachTickIsStartedOnce(t *testing.T) {
	w := newWorld(t, 3)
	procs := w.two("-node-timeout", "0")
	started := func(n int) func() bool { return func() bool { return len(w.ticks(procs[0])) >= n } }
	redistest.Eventually(t, patience, "first tick", started(1))
	for _, n := range w.nodes {
		n.Stop()
	}
	time.Sleep(1500 * time.Millisecond) // some tick falls into it
	before := len(w.ticks(procs[0]))
	for _, n := range w.nodes {
		n.Cont()
	}
	redistest.Eventually(t, patience, "more ticks", started(before+2))
	procs[1].shutDown()
	before = len(w.ticks(procs[0]))
	redistest.Eventually(t, patience, "more ticks", started(before+1))
	ticks := w.ticks(procs[0])
	for i, tick := range ticks {
		if i > 0 && tick != ticks[i-1]+1 {
			t.Errorf("tick %d follows %d", tick, ticks[i-1])
		}
	}
}

// A process that was stopped after its look, and has been overtaken, starts nothing: whether the other
// process has started the tick, or has only looked.
func TestAStoppedProcessStartsNoTick(t *testing.T) {
	for name, startsFirst := range map[string]bool{"the other has started it": true,
		"the other has looked": false} {
		t.Run(name, func(t *testing.T) {
			db, err := OpenDB(t.Context(), t.TempDir()+"/bank.db")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { db.Close() })
			stopped, other := &ticks{db: db, process: "p1"}, &ticks{db: db, process: "p2"}
			for token, j := range []*ticks{stopped, other} {
				if last, err := j.read(t.Context(), 10, int64(token+1)); err != nil || last != 9 {
					t.Fatal(last, err)
				}
			}
			late := func() {
				if err := stopped.start(t.Context(), 10, 1); !errors.Is(err, errOvertaken) {
					t.Errorf("got %v", err)
				}
			}
			if !startsFirst {
				late()
			}
			if err := other.start(t.Context(), 10, 2); err != nil {
				t.Error(err)
			}
			if startsFirst {
				late()
			}
			if last, err := other.read(t.Context(), 11, 3); err != nil || last != 10 {
				t.Error(last, err)
			}
			if _, err := stopped.read(t.Context(), 11, 2); !errors.Is(err, errOvertaken) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// There is one leader at a time, and when it is shut down another leads at once, not after a ttl.
func TestOneLeaderAtATime(t *testing.T) {
	w := newWorld(t, 1)
	procs := w.two()
	redistest.Eventually(t, patience, "a leader", func() bool { return len(w.leaders(procs[0])) == 1 })
	first, other := procs[0], procs[1]
	if w.leaders(procs[0])[0].process == "p2" {
		first, other = other, first
	}
	owner := w.owner("lock:leader")
	first.shutDown()
	if owner == "" || w.owner("lock:leader") == owner {
		t.Errorf("%q still has the lock", owner)
	}
	redistest.Eventually(t, patience, "another leader", func() bool { return len(w.leaders(other)) == 2 })
	other.shutDown()
	again := w.start("p3")
	redistest.Eventually(t, patience, "a third leader", func() bool { return len(w.leaders(again)) == 3 })
	all := w.leaders(again)
	for i := range all[1:] {
		if all[i].until > all[i+1].from || all[i].fence >= all[i+1].fence {
			t.Errorf("%+v overlap", all[i:i+2])
		}
	}
	if !slices.IsSortedFunc(all, func(a, b span) int { return int(a.from - b.from) }) {
		t.Errorf("%+v", all)
	}
}

// owner is who holds a lock, by the first node.
func (w *world) owner(key string) string {
	owner, _ := w.nodes[0].Do(w.t, "GET", key).(string)
	return owner
}

// After a long outage the latest maxTicks are made up for, and none before them.
func TestOldTicksAreSkipped(t *testing.T) {
	db, err := OpenDB(t.Context(), t.TempDir()+"/bank.db")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	locks, err := variant.New(variant.Singleflight, variant.Env{}) // which locks nothing
	if err != nil {
		t.Fatal(err)
	}
	j := &ticks{db: db, process: "p1", locks: locks}
	for _, now := range []int64{1000, 2000} {
		if err := j.due(t.Context(), now); err != nil {
			t.Fatal(err)
		}
	}
	var n, first int64
	row := db.QueryRowContext(t.Context(), `SELECT count(*), min(tick) FROM runs WHERE tick > 1000`)
	if err := row.Scan(&n, &first); err != nil {
		t.Fatal(err)
	}
	if n != maxTicks || first != 2000-maxTicks+1 {
		t.Errorf("%d ticks from %d, want %d from %d", n, first, maxTicks, 2000-maxTicks+1)
	}
}
