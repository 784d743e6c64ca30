package quorum

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// With one of three nodes refusing, silent or stopped, everything works, at the pace of the others;
// and the loser's error names the node that did not answer, and why if that is known.
func TestOneNodeAway(t *testing.T) {
	for _, c := range []struct {
		name string
		away func(t *testing.T) (addr string, end func()) // end is for Close, which waits for answers
	}{
		{"refused", func(t *testing.T) (string, func()) { return redistest.RefusedAddr(t), func() {} }},
		{"black hole", func(t *testing.T) (string, func()) {
			p := redistest.StartProxy(t, redistest.RefusedAddr(t))
			p.BlackHole(true)
			return p.Addr(), func() { _ = p.Close() }
		}},
		{"stopped", func(t *testing.T) (string, func()) {
			s := redistest.StartServer(t)
			if err := s.Stop(); err != nil {
				t.Fatal(err)
			}
			return s.Addr(), func() { _ = s.Kill() }
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			away, end := c.away(t)
			addrs := []string{redistest.StartServer(t).Addr(), redistest.StartServer(t).Addr(), away}
			x, y := tcpClient(t, "x", addrs), tcpClient(t, "y", addrs)
			t.Cleanup(end)
			start := time.Now()
			for range 20 {
				l, _ := x.must(key, time.Minute, 1)
				if _, f := x.beginRefresh(l, time.Minute, 5).wait(); f != nil {
					t.Fatal(describe(f))
				}
				_, _, f := y.try(key, time.Minute, 1)
				wantReason(t, f, Taken)
				if a := f.Nodes[2]; a.Name != addrs[2] || a.Reply.Err == nil {
					t.Errorf("%+v", a)
				}
				if f := x.release(l); f != nil {
					t.Fatal(describe(f))
				}
			}
			if took := time.Since(start); took > 10*time.Second {
				t.Errorf("took %v: the node that is away was waited for", took)
			}
		})
	}
}

// A node that answers later than NodeTimeout has no vote, so votes that are split among the others
// are not kept until it could have answered: nobody else would get the key meanwhile. When it
// answers in time again, it is waited for.
func TestSplitVotesDoNotWaitForANodeThatIsTooSlow(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		x := r.client("x")
		r.warm(x, key)
		r.delays(0, 0, nodeTimeout) // each way
		l, _ := x.must(key, ttl, 1)
		synctest.Wait() // or the release might take the acquire back before it was written to node 3
		if f := x.release(l); f != nil {
			t.Fatal(describe(f))
		}
		r.settle()

		r.give(key, "other", time.Hour, 0)
		start := time.Now()
		_, _, f := x.try(key, ttl, 1)
		wantReason(t, f, Taken)
		if took := time.Since(start); took > 0 {
			t.Errorf("the attempt failed after %v", took)
		}
		r.settle()
		r.wantHolders(key, "other", "", "")

		r.delays(0, 0, ms(1))
		for range 10 { // the first that reaches node 3 before the others decide finds out
			l, _, f = x.try(key, ttl, 1)
			if f == nil {
				break
			}
			r.settle()
		}
		if f != nil {
			t.Fatal(describe(f))
		}
		r.wantHolders(key, "other", l.Owner(), l.Owner())
		x.release(l)
	})
}

// tcpClient makes a client of the servers at these addresses.
func tcpClient(t *testing.T, name string, addrs []string) *client {
	var conns []redis.UniversalClient
	for _, addr := range addrs {
		conn := redis.NewClient(&redis.Options{Addr: addr})
		t.Cleanup(func() { _ = conn.Close() })
		conns = append(conns, conn)
	}
	return newPatientClient(t, name, conns, 10*time.Second) // more than a test takes when nobody waits
}

// A stopped server executes pending requests when it continues, long after the attempt failed. What
// it granted then is undone.
func TestStoppedNodeKeepsNothing(t *testing.T) {
	t.Parallel()
	a, b := redistest.StartServer(t), redistest.StartServer(t)
	c := tcpClient(t, "x", []string{a.Addr(), b.Addr()})
	l, _ := c.must(key, time.Hour, 1)
	c.release(l)
	if err := b.Stop(); err != nil {
		t.Fatal(err)
	}
	_, _, f := c.try(key, time.Hour, 1)
	wantReason(t, f, Unreachable)
	if err := b.Cont(); err != nil {
		t.Fatal(err)
	}
	redistest.Eventually(t, 15*time.Second, "both servers are rid of the key", func() bool {
		return len(a.Keys(t)) == 1 && len(b.Keys(t)) == 1 && c.nodes[1].Debts() == 0
	})
}

// A whole Redis Cluster can be one of three nodes: with its vote, keys of every master are locked
// while one of the others is down.
func TestClusterIsOneNode(t *testing.T) {
	t.Parallel()
	cluster, single, gone := redistest.StartCluster(t, 3), redistest.StartServer(t), redistest.StartServer(t)
	conns := func() []redis.UniversalClient {
		return []redis.UniversalClient{cluster.Client(t), single.Client(t), gone.Client(t)}
	}
	x, y := newPatientClient(t, "x", conns(), 5*time.Second), newPatientClient(t, "y", conns(), 5*time.Second)
	if err := gone.Kill(); err != nil {
		t.Fatal(err)
	}
	for i := range 30 {
		k := fmt.Sprintf("lock:{%d}:k", i)
		l, g := x.must(k, time.Minute, 2)
		_, _, f := y.try(k, time.Minute, 1)
		wantReason(t, f, Taken)
		g2, f := x.refresh(l, time.Minute, 3)
		if f != nil || g2.First <= g.Last {
			t.Fatalf("%+v after %+v, %s", g2, g, describe(f))
		}
		if f := x.release(l); f != nil {
			t.Fatal(describe(f))
		}
		l, g = y.must(k, time.Minute, 1)
		if g.First <= g2.Last {
			t.Errorf("token %d after %d", g.First, g2.Last)
		}
		if f := y.release(l); f != nil {
			t.Fatal(describe(f))
		}
	}
}
