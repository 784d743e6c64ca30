package quorum

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// withDuplicates makes a client whose i-th node is server names[i] of the rig: the same number twice
// is one server under two names.
func (r *rig) withDuplicates(name string, names ...int) *client {
	var conns []redis.UniversalClient
	for _, i := range names {
		conns = append(conns, r.mem[i].Client(r.t))
	}
	return newClient(r.t, name, conns)
}

// wantMisconfigured checks that f names both nodes and that retrying is useless.
func wantMisconfigured(t *testing.T, f *Failure, i, j int) {
	t.Helper()
	wantReason(t, f, Misconfigured)
	a, b := fmt.Sprintf("nodes[%d]", i), fmt.Sprintf("nodes[%d]", j)
	if !f.Final || !strings.Contains(f.Err.Error(), a) || !strings.Contains(f.Err.Error(), b) {
		t.Errorf("final %v, %v; want %s and %s named", f.Final, f.Err, a, b)
	}
}

// One server under two names has one vote (S14). Two of two are no majority, so the first attempt
// fails already, and gives the reason.
func TestSameServerTwiceOfTwo(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, r *rig) {
		c := r.withDuplicates("x", 0, 0)
		for range 2 {
			_, _, f := c.try(key, ttl, 1)
			wantMisconfigured(t, f, 0, 1)
		}
		r.wantNoKey(key)
	})
}

// Two of three are no majority either, when the third cannot be reached; when it can,
// the lease needs its vote, and the next attempt is refused.
func TestSameServerTwiceOfThree(t *testing.T) {
	inBubble(t, 2, func(t *testing.T, r *rig) {
		r.mem[1].Down(true)
		c := r.withDuplicates("x", 0, 1, 0)
		_, _, f := c.try(key, ttl, 1)
		wantMisconfigured(t, f, 0, 2)
		r.mem[1].Down(false)
		r.wantNoKey(key)
	})
	inBubble(t, 2, func(t *testing.T, r *rig) {
		c := r.withDuplicates("x", 0, 1, 0)
		r.mem[1].SetDelay(ms(5))
		a := c.begin(key, ttl, 1)
		synctest.Wait()
		if a.answered() {
			t.Error("one server has made a majority of three")
		}
		l, f := a.l, (*Failure)(nil)
		if _, f = a.wait(); f != nil {
			t.Fatal(describe(f))
		}
		_, _, f = c.try("lock:other", ttl, 1)
		wantMisconfigured(t, f, 0, 2)
		c.release(l) // for the nodes' sake; one server of two need not be a majority of three
		r.wantNoKey(key)
	})
}

// No second vote of that server counts later on: not in the raise, not in a refresh, not in
// a release.
func TestShadowHasNoVote(t *testing.T) {
	hold := func(t *testing.T, r *rig) (*client, *Lease) {
		c := r.withDuplicates("x", 0, 1, 0)
		l, _ := c.must(key, ttl, 1)
		time.Sleep(ms(10))
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.duplicateMask == 0 {
			t.Fatal("not noticed")
		}
		return c, l
	}
	inBubble(t, 2, func(t *testing.T, r *rig) {
		c, l := hold(t, r)
		r.mem[1].Stall(true)
		_, f := c.refresh(l, ttl, 0)
		wantReason(t, f, Unreachable)
		if f.Got != 1 {
			t.Errorf("%d votes", f.Got)
		}
		wantReason(t, c.release(l), Unreachable)
		r.mem[1].Stall(false)
		r.wantNoKey(key)
	})
}

// "Already yours" without a second name for it, as from a proxy that repeats requests, is not a
// vote, but it reports no duplicate.
func TestFalseAlarmDoesNotPoison(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key)
		var compared atomic.Int32
		same := c.q.Same
		c.q.Same = func(ctx context.Context, i, j int) (bool, error) {
			compared.Add(1)
			return same(ctx, i, j)
		}
		r.delays(ms(5), ms(5), ms(5))
		a := c.begin(key, ttl, 1)
		r.give(key, a.l.Owner(), ttl, 0, 1) // as if the request had come twice
		_, f := a.wait()
		wantReason(t, f, Unreachable)
		r.wantNoKey(key)
		if n := compared.Load(); n == 0 || n > 4 {
			t.Errorf("compared %d pairs", n)
		}
		if _, _, f := c.try(key, ttl, 1); f != nil {
			t.Error(describe(f))
		}
	})
}

// "Already yours" that arrives after the decision counts for nothing in that attempt, and is
// followed up all the same.
func TestLateReplayIsFollowedUp(t *testing.T) {
	inBubble(t, 2, func(t *testing.T, r *rig) {
		c := r.withDuplicates("x", 0, 1, 0)
		l := prepare(c.q, key, ttl, 1)
		round := l.newRound("acquire", node.Granted, 0, func(*round) {})
		round.Answer(0, node.Reply{Kind: node.Granted, Counter: 1})
		round.Answer(1, node.Reply{Kind: node.Granted, Counter: 1})
		round.Answer(2, node.Reply{Kind: node.Replayed, Counter: 1})
		time.Sleep(ms(10))
		_, _, f := c.try(key, ttl, 1)
		wantMisconfigured(t, f, 0, 2)
	})
}

// A search that hangs delays a failure by one NodeTimeout, and Close not at all.
func TestSearchThatHangs(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, r *rig) {
		c := r.withDuplicates("x", 0, 0)
		c.q.Same = func(ctx context.Context, i, j int) (bool, error) {
			<-ctx.Done()
			return false, ctx.Err()
		}
		start := time.Now()
		_, _, f := c.try(key, ttl, 1)
		wantReason(t, f, Unreachable)
		if took := time.Since(start); took != nodeTimeout {
			t.Errorf("took %v", took)
		}
		start = time.Now()
		_ = c.q.Close(context.Background())
		if took := time.Since(start); took != 0 {
			t.Errorf("Close took %v", took)
		}
		_, _, f = c.try(key, ttl, 1) // after Close there is no search, and still an answer
		wantReason(t, f, Unreachable)
	})
}

// On real servers behind proxies, which have addresses of their own and hide the server's.
func TestSameServerBehindProxies(t *testing.T) {
	for _, names := range [][]int{{0, 0}, {0, 1, 0}, {0, 0, 1}, {1, 0, 0}} {
		t.Run(fmt.Sprint(names), func(t *testing.T) {
			t.Parallel()
			servers := []*redistest.Server{redistest.StartServer(t), redistest.StartServer(t)}
			var conns []redis.UniversalClient
			var duplicates []int
			for i, s := range names {
				conn := redis.NewClient(&redis.Options{Addr: redistest.StartProxy(t, servers[s].Addr()).Addr()})
				t.Cleanup(func() { _ = conn.Close() })
				conns = append(conns, conn)
				if s == 0 {
					duplicates = append(duplicates, i)
				}
			}
			c := newPatientClient(t, "x", conns, patience)
			var f *Failure
			redistest.Eventually(t, patience, "an attempt is refused", func() bool {
				var l *Lease
				if l, _, f = c.try(key, time.Minute, 1); f == nil {
					c.release(l)
				}
				return f != nil
			})
			wantMisconfigured(t, f, duplicates[0], duplicates[1])
			c.quiet()
			if slices.Contains(servers[0].Keys(t), key) {
				t.Error("the key was left behind")
			}
		})
	}
}

// The vote of a duplicate counts in no later round of its lease: raise, refresh or release.
func TestShadowsReplyIsIgnored(t *testing.T) {
	for _, op := range []struct {
		name string
		vote node.Kind
	}{{"acquire", node.Renewed}, {"refresh", node.Renewed}, {"release", node.Deleted}} {
		l := muteLease(t, 3)
		l.duplicateMask = 1 << 1
		round := l.newRound(op.name, op.vote, 0, func(*round) {})
		round.Answer(0, replyOf('y', op.vote))
		round.Answer(1, replyOf('y', op.vote))
		if round.decided {
			t.Errorf("%s: the shadow's vote counted", op.name)
		}
		round.Answer(2, node.Reply{Kind: node.Missing})
		if !round.decided || round.won {
			t.Errorf("%s: the round is not decided although all have answered", op.name)
		}
	}
}

// A duplicate that is noticed during a round, by a late answer to the one before, has answered that round
// without a vote: the raise, which has no deadline of its own, waited for it for ever.
func TestADuplicateThatIsNoticedDuringTheRaise(t *testing.T) {
	l := muteLease(t, 3)
	raise := l.newRound("acquire", node.Renewed, 9, func(*round) {})
	raise.Answer(0, node.Reply{Kind: node.Renewed, Counter: 9})
	l.duplicateMask = 1 << 1
	raise.Answer(1, node.Reply{Kind: node.Renewed, Counter: 9})
	raise.Answer(2, node.Reply{Kind: node.Failed, Err: errors.New("cut off")})
	if !raise.decided || raise.won {
		t.Errorf("decided: %v, won: %v", raise.decided, raise.won)
	}
}

// A node that does not answer does not keep duplicates from being detected.
func TestMuteNodeDoesNotHideTwins(t *testing.T) {
	inBubble(t, 2, func(t *testing.T, r *rig) {
		r.mem[1].Stall(true)
		c := r.withDuplicates("x", 1, 0, 0)
		start := time.Now()
		_, _, f := c.try(key, ttl, 1)
		wantMisconfigured(t, f, 1, 2)
		if took := time.Since(start); took > nodeTimeout+ms(20) {
			t.Errorf("took %v", took)
		}
		r.mem[1].Stall(false)
		r.wantNoKey(key)
	})
}

// An offer that was made before two nodes turned out to be one server is not won by their votes either.
func TestNoOfferIsWonFromDuplicates(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		_, _, c, offer := r.offers(1)
		c.q.duplicate.Store(c.q.duplicateFailure(0, 1))
		for i := range 2 {
			c.vote(i, offer, 1, 5)
		}
		_, f := offer.outcome(t)
		wantMisconfigured(t, f, 0, 1)
	})
}

// With one of three nodes refusing, silent or stopped, everything works, at the pace of the others (see
// TestSlowMinorityCostsNothing), and the loser's error names the node that did not answer, and why if that is
// known.
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
	return newPatientClient(t, name, conns, patience)
}

// A stopped server executes pending requests when it continues, long after the attempt failed. What
// it granted then is undone.
func TestStoppedNodeKeepsNothing(t *testing.T) {
	inBubble(t, 2, func(t *testing.T, r *rig) {
		c := r.client("x")
		l, _ := c.must(key, time.Hour, 1)
		c.release(l)
		r.settle()
		r.mem[1].Stall(true)
		_, _, f := c.try(key, time.Hour, 1)
		wantReason(t, f, Unreachable)
		time.Sleep(time.Minute) // the bubble's time
		r.mem[1].Stall(false)
		r.settle()
		r.wantNoKey(key)
		if d := c.nodes[1].Debts(); d != 0 {
			t.Errorf("%d debts", d)
		}
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
	x, y := newPatientClient(t, "x", conns(), patience), newPatientClient(t, "y", conns(), patience)
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
