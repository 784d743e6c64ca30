package quorum

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

func epochs(text ...string) (all []*node.Epoch) {
	for _, t := range text {
		if t == "" {
			all = append(all, nil)
			continue
		}
		states := map[byte]node.EpochState{'n': node.EpochNew, 'l': node.EpochLost, 'k': node.EpochKept}
		all = append(all, &node.Epoch{Name: t[1:], State: states[t[0]]})
	}
	return all
}

// Nodes are established together only if all are new, and each in the epoch in which it
// was before any of them was asked again.
func TestJudge(t *testing.T) {
	for _, c := range []struct {
		before, now []*node.Epoch
		want        verdict
	}{
		{epochs("n1", "n2", "n3"), epochs("n1", "n2", "n3"), establish},
		{nil, epochs("n1", "n2", "n3"), retry},
		{epochs("n1", "n2", ""), epochs("n1", "n2", "n3"), retry},
		{epochs("n1", "n2", "n3"), epochs("n4", "n2", "n3"), retry}, // it lost its data once more
		{epochs("k1", "n2", "n3"), epochs("n1", "n2", "n3"), retry},
		{epochs("l1", "n2", "n3"), epochs("n4", "n2", "n3"), retry},
		{epochs("n1", "n2", "n3"), epochs("n1", "n2", ""), leave},
		{epochs("n1", "n2", "n3"), epochs("n1", "n2", "l3"), leave},
		{epochs("n1", "n2", "n3"), epochs("k1", "n2", "n3"), retry}, // somebody else is about it
		{epochs("k1", "k2", "n3"), epochs("k1", "k2", "n3"), leave},
		{epochs("k1", "k2", "k3"), epochs("k1", "k2", "k3"), leave},
		{epochs("l1", "l2", "l3"), epochs("l1", "l2", "l3"), leave},
	} {
		if got := judge(c.before, c.now, 2); got != c.want {
			t.Errorf("judge(%v, %v) = %d, want %d", c.before, c.now, got, c.want)
		}
	}
}

// A grant counts in an epoch that is kept, and in one that was established since.
func TestCounts(t *testing.T) {
	for _, c := range []struct {
		m, now string
		want   bool
	}{
		{"k1", "", true}, {"k1", "l2", true}, {"n1", "", false}, {"n1", "n1", false}, {"n1", "k1", true},
		{"n1", "k2", false}, {"l1", "l1", false}, {"l1", "k1", true}, {"l1", "k2", false},
	} {
		if got := counts(epochs(c.m)[0], epochs(c.now)[0]); got != c.want {
			t.Errorf("counts(%s, %s) = %v", c.m, c.now, got)
		}
	}
}

// While a bootstrap may make votes of grants, the round is not decided; then it is, and not
// because somebody holds the key.
func TestGrantsInLimbo(t *testing.T) {
	for _, c := range []struct {
		t    tally
		lost bool
	}{
		{tally{nodes: 3, need: 2, undecided: 2, pending: 1}, false},
		{tally{nodes: 3, need: 2, undecided: 2, bad: 1}, false},
		{tally{nodes: 3, need: 2, undecided: 1, yes: 1, no: 1, held: 1}, false},
		{tally{nodes: 3, need: 2, undecided: 1, bad: 2}, true},
		{tally{nodes: 3, need: 2, bad: 2, pending: 1}, true},
		{tally{nodes: 3, need: 2, undecided: 1, no: 2, held: 2}, true},
	} {
		if got := c.t.failedForGood(true); got != c.lost {
			t.Errorf("%+v: lost is %v", c.t, got)
		}
	}
}

// Another client establishes the nodes one by one: a bootstrap that finds some of them established
// reads again, and does not take the rest for nodes that have lost their epoch. One that has restarted in
// between is not established, whatever was known of it.
func TestABootstrapDuringAnothers(t *testing.T) {
	var conns []redis.UniversalClient
	var servers []*redistest.Server
	for range 3 {
		s := redistest.StartServer(t)
		servers, conns = append(servers, s), append(conns, s.Client(t))
	}
	x, z := newClient(t, "x", conns), newClient(t, "z", conns)
	x.guard(time.Minute)
	z.guard(time.Minute)
	ask := func(i int, establish string) node.Epoch { // y's bootstrap, by hand
		t.Helper()
		n, err := node.New(conns[i], nodeTimeout, false)
		if err != nil {
			t.Fatal(err)
		}
		defer n.Close(t.Context())
		n.SetGuard(node.Guard{Limit: time.Minute, Name: func() string { return fmt.Sprint("y-", i, establish) }, Changed: func(_ node.Epoch, store func()) { store() }})
		got := make(chan node.Epoch, 1)
		n.Boot(establish, func(m node.Epoch, err error) {
			if err != nil {
				t.Error(err)
			}
			got <- m
		})
		return <-got
	}
	// y reads, and is slow to go on.
	var before []node.Epoch
	for i := range servers {
		before = append(before, ask(i, ""))
	}
	l, _ := x.must(key, time.Minute, 1) // x has established all
	if err := servers[0].Restart(); err != nil {
		t.Fatal(err)
	}
	for i, m := range before { // y goes on
		after := ask(i, m.Name)
		if want := i != 0; after.State == node.EpochKept != want || after.Name == m.Name != want {
			t.Errorf("node %d: %+v after %+v", i, after, m)
		}
	}
	servers[2].Do(t, "DEL", key)
	_, _, f := z.try(key, time.Minute, 1)
	if f == nil {
		t.Error("granted twice")
	}
	x.release(l)
}

// A bootstrap begins before the node's epoch is known to have changed, and ends after that: or the
// node would have no vote, and would never be read again. A round with a vote in that epoch
// finds the bootstrap under way.
func TestABootstrapSeesWhatItIsAbout(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		c.guard(ttl)
		k := c.q.quarantine
		for _, n := range c.q.Nodes {
			n.SetGuard(node.Guard{Limit: ttl, Name: c.q.EpochName, Changed: func(m node.Epoch, store func()) {
				k.changed(m, func() {
					if k.mu.TryLock() {
						k.mu.Unlock()
						t.Error("a bootstrap may end in this instant")
					}
					if m.State != node.EpochKept && !k.underWay() {
						t.Error("a vote would be turned away")
					}
					store()
				})
				time.Sleep(ms(20))
			}})
		}
		l, _ := c.must(key, ttl, 1)
		c.release(l)
		before := c.q.Nodes[0].Epoch().Name
		r.mem[0].Mini.FlushAll()
		l, _ = c.must(key, ttl, 1)
		synctest.Wait() // until node 0 was asked, too
		c.release(l)
		r.settle()
		if m := c.q.Nodes[0].Epoch(); m.State != node.EpochKept || m.Name == before {
			t.Errorf("%v after it began, its epoch is %+v; it was %s", time.Since(m.Began), m, before)
		}
	})
}

// A change that a node reports after Close begins no bootstrap.
func TestNoBootstrapAfterClose(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		c.guard(time.Minute)
		k := c.q.quarantine
		forget := func() {
			before := c.q.Nodes[0].Epoch().Name
			r.mem[0].Mini.FlushAll()
			c.begin(key, ttl, 1)
			time.Sleep(ttl)
			if c.q.Nodes[0].Epoch().Name == before {
				t.Error("it was not noticed")
			}
		}
		l, _ := c.must(key, ttl, 1)
		c.release(l)
		forget() // it is in quarantine for a minute
		_ = c.q.Close(context.Background())
		forget()
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.underWay() || k.running {
			t.Errorf("a bootstrap is under way: %v; run is: %v", k.underWay(), k.running)
		}
	})
}

var memoryNames atomic.Int64

// guard turns quarantine on for a client that has not done anything.
func (c *client) guard(limit time.Duration) {
	c.q.Quarantine = limit
	c.q.EpochName = func() string { return fmt.Sprint("m-", memoryNames.Add(1)) }
	c.q.quarantine = newQuarantine(c.q)
	c.nodeTimeout(5 * time.Second)
}
