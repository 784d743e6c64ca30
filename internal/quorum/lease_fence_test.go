package quorum

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// When the counters of a majority agree, its block ends there, and no node gets a second request.
func TestEqualCountersNeedNoRaise(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key, 100, 100, 100)
		before := c.commands(nil)
		_, g := c.must(key, ttl, 5)
		synctest.Wait()
		if g.First != 101 || g.Last != 105 {
			t.Errorf("block %d to %d", g.First, g.Last)
		}
		if got := c.commands(before); !slices.Equal(got, []uint64{1, 1, 1}) {
			t.Errorf("commands per node: %v", got)
		}
	})
}

// When they differ, the block ends at the largest, and a majority has that counter before
// the lock is given out (S8). The order in which the votes come in does not matter, nor
// does the one that comes too late.
func TestDifferentCountersAreRaisedToTheLargest(t *testing.T) {
	for _, c := range []struct {
		counters []int64
		delays   []int // in ms; the slowest is not among the first two votes
		want     int64 // the block's end, for blocks of 10
	}{
		{[]int64{100, 200, 300}, []int{0, 1, 5}, 210},
		{[]int64{200, 100, 300}, []int{0, 1, 5}, 210},
		{[]int64{100, 200, 300}, []int{5, 1, 0}, 310},
		{[]int64{300, 200, 200}, []int{0, 1, 5}, 310},
		{[]int64{200, 200, 300}, []int{0, 1, 5}, 210}, // these two agree
	} {
		inBubble(t, 3, func(t *testing.T, r *rig) {
			x := r.client("x")
			r.warm(x, key, c.counters...)
			for i, d := range c.delays {
				r.mem[i].SetDelay(ms(d))
			}
			_, g := x.must(key, ttl, 10)
			confirmed := 0
			for i := range r.mem {
				if r.counter(i) >= g.Last {
					confirmed++
				}
			}
			if g.First != c.want-9 || g.Last != c.want || confirmed < 2 {
				t.Errorf("%+v: block %d to %d, confirmed by %d", c, g.First, g.Last, confirmed)
			}
		})
	}
}

// Whichever majority the next holder gets, its tokens are larger.
func TestNextHolderHasLargerTokens(t *testing.T) {
	for out := range 3 { // the node that the next holder cannot reach
		for slow := range 3 { // the one that is last to answer the first holder
			inBubble(t, 3, func(t *testing.T, r *rig) {
				x, y := r.client("x"), r.client("y")
				r.warm(x, key, 100, 200, 300)
				r.mem[slow].SetDelay(ms(5))
				l, a := x.must(key, ttl, 10)
				x.release(l)
				r.settle()
				r.mem[slow].SetDelay(0)
				r.mem[out].Down(true)
				_, b := y.must(key, ttl, 1)
				if b.First <= a.Last {
					t.Errorf("node %d slow, then %d down: tokens to %d, then from %d", slow, out, a.Last, b.First)
				}
				r.mem[out].Down(false)
			})
		}
	}
}

// The raise must be confirmed by a majority, while the key is still ours there. If it is
// not, the attempt has failed and is undone.
func TestRaiseNeedsAMajority(t *testing.T) {
	for _, c := range []struct {
		name   string
		break2 func(r *rig) // what happens to node 1 and 2 after they granted
		want   Reason
	}{
		{"down", func(r *rig) { r.mem[1].Down(true); r.mem[2].Down(true) }, Unreachable},
		{"mute", func(r *rig) { r.mem[1].Stall(true); r.mem[2].Stall(true) }, Unreachable},
		{"lost", func(r *rig) { r.mem[1].Mini.Del(key); r.mem[2].Mini.Del(key) }, Unreachable},
		{"taken", func(r *rig) { r.give(key, "other", time.Second, 1, 2) }, Taken},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, 3, func(t *testing.T, r *rig) {
				x := r.client("x")
				r.warm(x, key, 100, 200, 300)
				r.delays(ms(4), ms(4), ms(4))
				a := x.begin(key, ttl, 10)
				time.Sleep(ms(10)) // the raise is half way there
				c.break2(r)
				_, f := a.wait()
				wantReason(t, f, c.want)
				if f.Op != "acquire" || f.Got > 1 {
					t.Error(describe(f))
				}
				r.delays(0, 0, 0)
				for _, m := range r.mem {
					m.Stall(false)
					m.Down(false)
				}
				r.wantNoKey(key)
			})
		})
	}
}

// A raise that arrives when its attempt is long undone, and the next holder has the key,
// changes no counter: the tokens of the holders go on rising.
func TestStaleRaiseChangesNothing(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		x, y := r.client("x"), r.client("y")
		r.warm(y, key)
		r.warm(x, key, 100, 200, 100)
		r.delays(ms(2), ms(2), ms(30))
		a := x.begin(key, ttl, 10) // is granted 110 and 210
		time.Sleep(ms(3))
		r.delays(ms(30), ms(30), ms(30))
		time.Sleep(ms(2)) // the raise to 210 is on its way, and will be for 29ms
		a.l.Cancel()
		if _, f := a.wait(); f == nil {
			t.Fatal("not cancelled")
		}
		r.mem[0].Mini.Del(key) // as if x's keys had expired
		r.mem[1].Mini.Del(key)
		r.delays(0, ms(30), 0)
		l, g := y.must(key, ttl, 1)
		synctest.Wait()
		before := r.counter(0)
		time.Sleep(ms(500))
		if after := r.counter(0); before >= 210 || after != before {
			t.Errorf("the counter went from %d to %d under the next holder", before, after)
		}
		y.release(l)
		r.settle()
		if _, h := x.must(key, ttl, 1); h.First <= g.Last {
			t.Errorf("tokens %d, then %d", g.Last, h.First)
		}
	})
}

// Every refresh makes sure that the counters are not behind the tokens of the lease (S9).
func TestEveryRefreshRaisesTheCounters(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key, 100, 100, 100)
		l, g := c.must(key, ttl, 10)
		synctest.Wait()
		r.setCounter(0, 50)
		r.setCounter(1, 50)
		if _, f := c.refresh(l, ttl, 0); f != nil {
			t.Fatal(describe(f))
		}
		synctest.Wait()
		for i := range r.mem {
			if got := r.counter(i); got != g.Last {
				t.Errorf("counter %d is %d, want %d", i, got, g.Last)
			}
		}
	})
}

// The blocks of an acquire and of the refreshes after it are disjoint and rise, also when
// the nodes do not agree, or have executed reservations that were never confirmed (S9).
func TestReservedBlocksRise(t *testing.T) {
	for n := 1; n <= 5; n++ {
		inBubble(t, n, func(t *testing.T, r *rig) {
			c := r.client("x")
			r.warm(c, key, slices.Repeat([]int64{100}, n)...)
			l, g := c.must(key, ttl, 3)
			last := g.Last
			for i := range 20 {
				skew := i % (n + 1) // a node whose counter others pushed ahead, mostly
				if skew < n {
					r.setCounter(skew, r.counter(skew)+int64(7*i))
				}
				g, f := c.reserve(l, ttl, 5)
				if f != nil {
					t.Fatal(describe(f))
				}
				if g.Last-g.First != 4 || g.First <= last {
					t.Fatalf("%d nodes: block %d to %d after %d", n, g.First, g.Last, last)
				}
				last = g.Last
				confirmed := 0
				for i := range r.mem {
					if r.counter(i) >= last {
						confirmed++
					}
				}
				if confirmed < c.q.Need() {
					t.Fatalf("%d nodes: %d confirmed", n, confirmed)
				}
			}
		})
	}
}

// A reservation that was not confirmed is never used: the next one comes after it.
func TestUnconfirmedReservationIsSkipped(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key, 100, 100, 100)
		l, _ := c.must(key, ttl, 1) // 101
		synctest.Wait()
		r.mem[1].Down(true)
		r.mem[2].Stall(true)
		_, f := c.refresh(l, ttl, 10)
		wantReason(t, f, Unreachable)
		r.mem[1].Down(false)
		r.mem[2].Stall(false)
		synctest.Wait()
		for i, want := range []int64{111, 101, 111} {
			if got := r.counter(i); got != want {
				t.Fatalf("counter %d is %d, want %d", i, got, want)
			}
		}
		g, f := c.reserve(l, ttl, 10)
		if f != nil || g.First <= 101 || g.Last-g.First != 9 {
			t.Errorf("block %d to %d, %s", g.First, g.Last, describe(f))
		}
	})
}

// reservedBlock is a rig on whose nodes c's lease, of token 101, has been refreshed, and 10 tokens
// were reserved from counters that differ. A round trip takes 8ms.
func reservedBlock(t *testing.T, f func(r *rig, c *client, l *Lease, g Grant)) {
	t.Helper()
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key, 100, 100, 100)
		l, _ := c.must(key, ttl, 1)
		synctest.Wait()
		r.setCounter(0, 500)
		r.setCounter(1, 600)
		r.setCounter(2, 550)
		r.delays(ms(4), ms(4), ms(5)) // the first two decide
		want := time.Now().Add(c.q.Validity(ttl))
		g, f2 := c.refresh(l, ttl, 10)
		synctest.Wait()
		if f2 != nil || !g.Until.Equal(want) || g.Last >= g.First || !g.Reserved {
			t.Fatalf("%+v, want none yet, until %v; %s", g, want, describe(f2))
		}
		f(r, c, l, g)
	})
}

// Where the counters differ after a refresh, what it confirmed counts at once; its tokens are the
// lease's when the next one has raised the counters of a majority to the end of the block, and that
// asks for no more.
func TestReservedTokensAreHadWhenConfirmed(t *testing.T) {
	reservedBlock(t, func(r *rig, c *client, l *Lease, _ Grant) {
		before := c.commands(nil)
		want := time.Now().Add(c.q.Validity(ttl))
		g, f := c.refresh(l, ttl, 1000)
		if f != nil || g.First != 601 || g.Last != 610 || g.Reserved || !g.Until.Equal(want) {
			r.t.Errorf("%+v, want 601 to 610 until %v; %s", g, want, describe(f))
		}
		synctest.Wait()
		for i := range r.mem {
			if got := r.counter(i); got != 610 {
				r.t.Errorf("counter %d is %d", i, got)
			}
		}
		if got := c.commands(before); !slices.Equal(got, []uint64{1, 1, 1}) {
			r.t.Errorf("commands per node: %v", got)
		}
		if g, f := c.refresh(l, ttl, 5); f != nil || g.First != 611 || g.Last != 615 {
			r.t.Errorf("%+v, %s", g, describe(f))
		}
	})
}

// If the next refresh fails, or is too late, what the previous one has confirmed stands, and its
// tokens are unused; the one after that brings tokens.
func TestReservedTokensOutliveAFailedRefresh(t *testing.T) {
	reservedBlock(t, func(r *rig, c *client, l *Lease, g Grant) {
		r.mem[0].Stall(true)
		r.mem[1].Stall(true)
		_, f := c.refresh(l, ttl, 10)
		wantReason(r.t, f, Unreachable)
		l.mu.Lock()
		until := l.until
		l.mu.Unlock()
		if !until.Equal(g.Until) {
			r.t.Errorf("until %v, want %v", until, g.Until)
		}
		r.mem[0].Stall(false)
		r.mem[1].Stall(false)
		time.Sleep(ms(100))
		if g, f := c.refresh(l, ttl, 10); f != nil || g.First != 601 || g.Last != 610 {
			r.t.Errorf("%+v, %s", g, describe(f))
		}
	})
}

// One of three nodes is enough to have seen the block reserved, but not to have it confirmed: the node
// that counts for it must have the key, and the counter.
func TestReservedTokensNeedAMajority(t *testing.T) {
	reservedBlock(t, func(r *rig, c *client, l *Lease, _ Grant) {
		r.mem[0].Down(true)
		g, f := c.refresh(l, ttl, 10)
		if f != nil || g.First != 601 || g.Last != 610 || r.counter(1) < 610 || r.counter(2) < 610 {
			r.t.Errorf("%+v, %s", g, describe(f))
		}
		r.mem[0].Down(false)
	})
	reservedBlock(t, func(r *rig, c *client, l *Lease, _ Grant) {
		r.mem[0].Down(true)
		r.give(key, "other", time.Second, 2)
		if g, f := c.refresh(l, ttl, 10); f == nil {
			r.t.Errorf("%+v by one node of three", g)
		}
		r.mem[0].Down(false)
	})
}

// A refresh for reserved tokens that finds the key lost on too many nodes is a loss, as any is.
func TestConfirmThatFindsTheKeyGoneIsALoss(t *testing.T) {
	reservedBlock(t, func(r *rig, c *client, l *Lease, _ Grant) {
		r.mem[0].Mini.Del(key)
		r.mem[1].Mini.Del(key)
		g, f := c.refresh(l, ttl, 10)
		wantReason(r.t, f, NotHeld)
		if g != (Grant{}) {
			r.t.Errorf("a lost lease brought %+v", g)
		}
	})
}

// Nodes that agree on a counter agree on nothing else: it is the largest of a majority, and
// confirmed, whatever it was counted from.
func TestAgreementByAccident(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key, 100, 100, 100)
		l, _ := c.must(key, ttl, 1) // 101
		synctest.Wait()
		r.setCounter(0, 111) // a reservation of 10 that nobody confirmed
		r.setCounter(1, 111) // other keys of the bucket
		r.mem[2].Down(true)
		g, f := c.refresh(l, ttl, 10)
		if f != nil || g.First != 112 || g.Last != 121 {
			t.Errorf("block %d to %d, %s", g.First, g.Last, describe(f))
		}
		r.mem[2].Down(false)
	})
}

// The largest counter is that of the votes alone: what another kind of reply carries
// does not count.
func TestCountersAreThoseOfTheVotes(t *testing.T) {
	for _, c := range []struct {
		replies []node.Reply
		top     int64
		agree   bool
	}{
		{[]node.Reply{{Kind: node.Granted, Counter: 5}, {Kind: node.Granted, Counter: 5}, {}}, 5, true},
		{[]node.Reply{
			{Kind: node.Granted, Counter: 5}, {Kind: node.Replayed, Counter: 9}, {Kind: node.Granted, Counter: 5},
		}, 5, true},
		{[]node.Reply{{Kind: node.Granted, Counter: 5}, {Kind: node.Granted, Counter: 6}, {}}, 6, false},
		{[]node.Reply{{Kind: node.Granted, Counter: 6}, {Kind: node.Granted, Counter: 5}, {}}, 6, false},
	} {
		r := &round{want: node.Granted, replies: c.replies}
		if top, agree := r.topCounterLocked(); top != c.top || agree != c.agree {
			t.Errorf("%s: %d, %v", fmt.Sprint(c.replies), top, agree)
		}
	}
}

// A node whose counter is out of reach, because a Cluster has it apart from the key for a while, renews
// and brings no tokens. With tokens from others, the block is theirs; without, there is none, and
// the tokens of before stay what they are. No raise is confirmed by it.
func TestARenewalWithoutACounterIsNoConfirmation(t *testing.T) {
	for name, counters := range map[string][]int64{
		"one node": {100}, "three nodes": {100, 100, 100}, "unequal": {100, 200, 300},
	} {
		t.Run(name, func(t *testing.T) {
			var apart [3]atomic.Bool
			var conns []redis.UniversalClient
			for i, c := range counters {
				f := redistest.StartFake(t, clusterOf(c, &apart[i]))
				client := redis.NewClient(&redis.Options{Addr: f.Addr(), DialerRetries: 1})
				t.Cleanup(func() { _ = client.Close() })
				conns = append(conns, client)
			}
			c := newPatientClient(t, "x", conns, patience)
			if name == "unequal" { // whose raise could be confirmed by two, if a counter that nobody saw counted
				apart[0].Store(true)
				apart[1].Store(true)
				if _, _, f := c.try(key, time.Minute, 3); f == nil {
					t.Error("a raise was confirmed without counters")
				}
				return
			}
			l, g := c.must(key, time.Minute, 3)
			last := g.Last
			for i := range apart[:max(1, len(conns)-1)] {
				apart[i].Store(true)
				g, f := c.refresh(l, time.Minute, 5)
				if f != nil {
					t.Fatal(describe(f))
				}
				if brought := g.Last >= g.First; brought && g.First <= last || brought && len(conns) == 1 {
					t.Errorf("%d apart: block %d to %d after %d", i+1, g.First, g.Last, last)
				}
				last = max(last, g.Last)
			}
			for i := range conns {
				apart[i].Store(false)
			}
			// The node that was never apart may have counted on alone, and be one of the votes.
			if g, f := c.reserve(l, time.Minute, 5); f != nil || g.First <= last || g.Last-g.First != 4 {
				t.Errorf("block %d to %d after %d, %s", g.First, g.Last, last, describe(f))
			}
		})
	}
}

// clusterOf answers as a node that grants everything, and counts on from c, unless it has the counter
// apart from the key.
func clusterOf(c int64, apart *atomic.Bool) func([]string) string {
	var mu sync.Mutex
	return func(cmd []string) string {
		mu.Lock()
		defer mu.Unlock()
		if !strings.EqualFold(cmd[0], "EVALSHA") {
			return "+OK\r\n"
		}
		switch args := cmd[3:]; {
		case cmd[1] == lua.Release.SHA, cmd[1] == lua.Done.SHA, cmd[1] == lua.Undo.SHA:
			return ":1\r\n"
		case cmd[1] == lua.Refresh.SHA && apart.Load():
			return "*2\r\n:0\r\n$0\r\n\r\n"
		case cmd[1] == lua.Refresh.SHA:
			top, _ := strconv.ParseInt(args[4], 10, 64)
			more, _ := strconv.ParseInt(args[5], 10, 64)
			c = max(c, top) + more
		default:
			keys, _ := strconv.Atoi(cmd[2])
			block, _ := strconv.ParseInt(args[keys+5], 10, 64)
			c += block
		}
		return fmt.Sprintf(":%d\r\n", c)
	}
}
