package quorum

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/node"
)

// The rival is the one that most nodes name; all clients must find the same one, so of those named
// equally often it is the first by name. Only votes count.
func TestRivalIsWhomMostNodesName(t *testing.T) {
	for _, c := range []struct{ named, want string }{
		{"-", ""}, {"x", "x"}, {"xx-", "x"}, {"x--", "x"}, {"-yx", "x"}, {"xy-", "x"}, {"yxy", "y"}, {"zyx", "x"},
		{"xyyzz", "y"}, {"zzyyx", "y"}, {"XXy", "y"}, {"XX-", ""}, {"Zyz", "y"}, {"..x", "x"}, {"...", ""},
	} {
		l := muteLease(t, len(c.named))
		r := &round{l: l, want: node.Renewed, replies: make([]node.Reply, len(c.named))}
		for i, name := range c.named {
			switch rival := string(name); {
			case name == '.':
			case name == '-':
				r.replies[i] = node.Reply{Kind: node.Renewed}
			case strings.ToUpper(rival) == rival: // no vote
				r.replies[i] = node.Reply{Kind: node.Failed, Rival: strings.ToLower(rival)}
			default:
				r.replies[i] = node.Reply{Kind: node.Renewed, Rival: rival}
			}
		}
		if got := r.rivalLocked(); got != c.want {
			t.Errorf("%q: %q, want %q", c.named, got, c.want)
		}
	}
}

// A key is owned if a majority of nodes says that one and the same has it, by what had been
// answered when the round was decided.
func TestOwnedByMajority(t *testing.T) {
	for _, c := range []struct {
		answers     string // x, y, z: held by that one; g: granted; e: error
		owned, take bool
	}{
		{"x", true, true}, {"e", false, false},
		{"xx", false, true}, {"gx", false, true}, {"xg", false, true}, {"ex", false, true},
		{"xx", false, true},
		{"xxe", true, true}, {"xex", true, true}, {"gxx", true, true}, {"xyz", false, true}, {"xyg", false, true},
		{"eex", false, false}, {"xge", false, true},
		{"xxx", true, true}, {"xxxyy", true, true}, {"xxyyx", false, true}, {"ggxxx", true, true},
		{"xyxyx", false, true}, {"eexxx", true, true}, {"eexxy", false, true},
	} {
		l := muteLease(t, len(c.answers))
		var f *Failure
		r := l.newRound("acquire", node.Granted, 0, func(r *round) {
			r.l.mu.Lock()
			defer r.l.mu.Unlock()
			f = r.failureLocked()
		})
		for i, a := range c.answers {
			rep := node.Reply{Kind: node.Held, Holder: string(a), TTL: time.Second}
			switch a {
			case 'g':
				rep = node.Reply{Kind: node.Granted, Counter: 1}
			case 'e':
				rep = replyOf('e', node.Granted)
			}
			r.Answer(i, rep)
		}
		if f == nil || f.Owned != c.owned || (f.Reason == Taken) != c.take {
			t.Errorf("%q: %s, owned %v", c.answers, describe(f), f != nil && f.Owned)
		}
	}
}

// Turns, on nodes.

// as begins an attempt of a contender.
func (c *client) as(contender string) *call {
	l := new(Lease)
	c.q.Prepare(l, key, ttl, 1, contender)
	a := c.newCall("acquire", l)
	l.Acquire(false, a)
	return a
}

// mustAs makes an attempt of a contender that has to succeed.
func (c *client) mustAs(contender string) *Lease {
	c.t.Helper()
	a := c.as(contender)
	if _, f := a.wait(); f != nil {
		c.t.Fatal(describe(f))
	}
	return a.l
}

// waits has a contender lose an attempt, and gives the failure.
func (c *client) waits(contender string) *Failure {
	c.t.Helper()
	_, f := c.as(contender).wait()
	if f == nil {
		c.t.Fatal(contender, "got it")
	}
	time.Sleep(ms(5)) // the order is by the servers' clocks
	synctest.Wait()
	return f
}

func (c *client) yield(l *Lease, rival string) *call {
	a := c.newCall("release", l)
	l.Release(false, rival, NoNews, a)
	return a
}

func (c *client) look(l *Lease) (Grant, *Failure) {
	a := c.newCall("refresh", l)
	l.Refresh(ttl, 0, nodeTimeout, true, a.done)
	return a.wait()
}

// loses removes key from its holder.
func (r *rig) loses(key string) {
	for _, m := range r.mem {
		m.Mini.Del(key)
	}
}

// everywhere makes requests take so long that all are written before the first is answered:
// what a decided attempt has not written yet is dropped, and leaves no want.
func (r *rig) everywhere() {
	for _, m := range r.mem {
		m.SetDelay(ms(1))
	}
}

// wanted is a client that holds the key on all nodes, as that contender or as nobody, and its
// lease; others wait for it, in that order.
func (r *rig) wanted(holder string, others ...string) (*client, *Lease) {
	r.t.Helper()
	c := r.client("c")
	r.warm(c, key)
	r.everywhere()
	l := c.mustAs(holder)
	for _, name := range others {
		if f := c.waits(name); f.Reason != Taken {
			r.t.Fatal(describe(f))
		}
	}
	return c, l
}

// waiting is who waits on node i.
func (r *rig) waiting(i int) string {
	r.t.Helper()
	synctest.Wait()
	for _, k := range r.mem[i].Mini.Keys() {
		if strings.Contains(k, ":wants:") {
			all, err := r.mem[i].Mini.ZMembers(k)
			if err != nil {
				r.t.Fatal(err)
			}
			return strings.Join(all, " ")
		}
	}
	return ""
}

// want adds a want of contender on node i, without the others.
func (r *rig) want(i int, contender string, score float64) {
	r.t.Helper()
	for _, k := range r.mem[i].Mini.Keys() {
		if strings.Contains(k, ":wants:") {
			if _, err := r.mem[i].Mini.ZAdd(k, score, contender); err != nil {
				r.t.Fatal(err)
			}
			return
		}
	}
	r.t.Fatal("nobody wants anything")
}

func all(n int, s string) []string { return slices.Repeat([]string{s}, n) }

// The waiting contenders have the key in turn, whoever arrives meanwhile, on any number of nodes.
func TestContendersTakeTurns(t *testing.T) {
	overSizes(t, func(t *testing.T, r *rig) {
		n := len(r.mem)
		c, l := r.wanted("", "x-1", "y-1", "z-1")
		for _, name := range []string{"x-1", "y-1", "z-1"} {
			if f := c.release(l); f != nil {
				t.Fatal(describe(f))
			}
			time.Sleep(ms(5))
			r.wantHolders(key, all(n, node.TurnOf+name)...)
			if _, _, f := c.try(key, ttl, 1); f == nil {
				t.Fatal("somebody stole the turn")
			}
			l = c.mustAs(name)
		}
		if f := c.release(l); f != nil {
			t.Fatal(describe(f))
		}
		time.Sleep(ms(5))
		r.wantHolders(key, all(n, "")...)
	})
}

// A contender that has lost by the answers of some nodes is registered on the others too, although
// they were still busy and its request was not written yet: otherwise contenders that happen to be
// known to more nodes would get more turns.
func TestLoserIsKnownOnAllNodes(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("c")
		r.warm(c, key)
		l, _ := c.must(key, ttl, 1)
		synctest.Wait()
		r.delays(ms(1), ms(1), ms(15))
		c.try(key, ttl, 1) // goes on at node 2
		if _, f := c.as("x-1").wait(); f == nil {
			t.Fatal("it won")
		}
		time.Sleep(ms(100))
		for i := range 3 {
			if got := r.waiting(i); got != "x-1" {
				t.Errorf("node %d knows %q", i, got)
			}
		}
		r.wantHolders(key, all(3, l.Owner())...)
		c.q.Leave(key, "x-1")
		c.release(l)
		time.Sleep(ms(100))

		// Not so one that was cancelled.
		l, _ = c.must(key, ttl, 1)
		c.try(key, ttl, 1)
		a := c.as("y-1")
		before := c.commands(nil)
		a.l.Cancel()
		time.Sleep(ms(100))
		if sent := c.commands(before)[2]; sent > 1 { // its want is taken back
			t.Errorf("%d commands", sent)
		}
		if got := r.waiting(2); got != "" {
			t.Errorf("node 2 knows %q", got)
		}
		c.release(l)
		time.Sleep(ms(100))
	})
}

// A refresh returns who waits longest, and the release yields to it on all nodes, also on those
// that know others before it. Its next turn comes after theirs.
func TestYieldGivesTheTurnOnAllNodes(t *testing.T) {
	overSizes(t, func(t *testing.T, r *rig) {
		n := len(r.mem)
		c, l := r.wanted("me-1", "x-1", "y-1")
		r.want(0, "z-1", 1) // known to one only
		g, f := c.look(l)
		if f != nil || n > 2 && g.Rival != "x-1" {
			t.Fatalf("%q %s", g.Rival, describe(f))
		}
		if _, f := c.yield(l, "x-1").wait(); f != nil {
			t.Fatal(describe(f))
		}
		time.Sleep(ms(5))
		r.wantHolders(key, all(n, node.TurnOf+"x-1")...)
		c.mustAs("x-1")
		time.Sleep(ms(5))
		for i := 1; i < n; i++ {
			if got := r.waiting(i); got != "me-1 y-1" && got != "y-1 me-1" {
				t.Error("waiting:", got)
			}
		}
	})
}

// One that has not contended before yields under its owner, which does not count as its own
// rival from then on.
func TestFirstYield(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("c")
		r.warm(c, key)
		r.everywhere()
		l, _ := c.must(key, ttl, 1)
		if g, f := c.look(l); f != nil || g.Rival != "" {
			t.Fatal(g.Rival, describe(f))
		}
		c.waits("x-1")
		if g, f := c.look(l); f != nil || g.Rival != "x-1" {
			t.Fatal(g.Rival, describe(f))
		}
		if g, f := c.refresh(l, ttl, 0); f != nil || g.Rival != "" {
			t.Fatal("a refresh that did not ask has a rival", g.Rival, describe(f))
		}
		c.yield(l, "x-1").wait()
		x := c.mustAs("x-1")
		time.Sleep(ms(5))
		if got := r.waiting(0); got != l.Owner() {
			t.Error("waiting:", got)
		}
		c.release(x)
		time.Sleep(ms(5))
		r.wantHolders(key, all(3, node.TurnOf+l.Owner())...)
		me := c.mustAs(l.Owner())
		if g, f := c.look(me); f != nil || g.Rival != "" {
			t.Error("its own rival:", g.Rival, describe(f))
		}
		c.release(me)
	})
}

// An attempt that never had a majority is undone, and makes no turn; its votes may be split
// with those who would get it. One that had its majority, but too late, or was cancelled,
// kept others waiting: it passes the turn on.
func TestUndoPassesTheTurnOn(t *testing.T) {
	for _, c := range []struct {
		name      string
		contender string
		end       func(r *rig, l *Lease)
		want      []string
	}{
		{"split", "me-1", func(r *rig, _ *Lease) {}, []string{"other", "other", ""}},
		{"cancelled", "me-1", func(_ *rig, l *Lease) {
			l.Cancel()
		}, []string{"other", "other", node.TurnOf + "x-1"}},
		{"cancelled at first", "", func(_ *rig, l *Lease) {
			l.Cancel()
		}, []string{"other", "other", node.TurnOf + "x-1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, 3, func(t *testing.T, r *rig) {
				x := r.client("x")
				r.warm(x, key)
				r.everywhere()
				x.must(key, ttl, 1)
				x.waits("x-1")
				x.waits("me-1")
				r.loses(key)
				r.give(key, "other", ttl, 0, 1)
				r.delays(ms(20), ms(20), ms(2))
				a := x.as(c.contender)
				time.Sleep(ms(10))
				c.end(r, a.l)
				if _, f := a.wait(); f == nil {
					t.Fatal("it won")
				}
				time.Sleep(ms(90))
				r.wantHolders(key, c.want...)
				if got, has := r.waiting(0), "me-1"; strings.Contains(got, has) != (c.name != "cancelled") {
					t.Error("waiting:", got)
				}
			})
		})
	}
	t.Run("too late", func(t *testing.T) {
		inBubble(t, 3, func(t *testing.T, r *rig) {
			x := r.client("x")
			r.warm(x, key)
			r.everywhere()
			x.must(key, ttl, 1)
			x.waits("x-1")
			r.loses(key)
			r.delays(ms(9), ms(9), ms(9))
			late := new(Lease)
			x.q.Prepare(late, key, ms(11), 1, "") // valid for 8.89ms
			a := x.newCall("acquire", late)
			late.Acquire(false, a)
			time.Sleep(ms(5))
			r.delays(ms(1), ms(1), ms(1))
			if _, f := a.wait(); f == nil || f.Got < f.Need {
				t.Fatal(describe(f))
			}
			time.Sleep(ms(5)) // the first release finds that somebody waits, the second passes the key on
			r.wantHolders(key, all(3, node.TurnOf+"x-1")...)
		})
	})
}

// An attempt that had its majority, and then failed to make its tokens safe, kept others waiting
// too.
func TestFailedRaisePassesTheTurnOn(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		x := r.client("x")
		r.warm(x, key, 100, 200, 300)
		r.everywhere()
		x.must(key, ttl, 1)
		x.waits("x-1")
		r.loses(key)
		for i := range r.mem {
			r.setCounter(i, int64(1000*(i+1)))
		}
		r.delays(ms(4), ms(4), ms(4))
		a := x.begin(key, ttl, 10)
		time.Sleep(ms(10)) // the raise is half way there
		r.mem[1].Stall(true)
		r.mem[2].Stall(true)
		if _, f := a.wait(); f == nil {
			t.Fatal("it won")
		}
		time.Sleep(ms(20))
		r.mem[1].Stall(false)
		r.mem[2].Stall(false)
		time.Sleep(ms(20))
		r.wantHolders(key, all(3, node.TurnOf+"x-1")...)
	})
}

// Contenders that come at the same moment wait in another order on each node. The release of a lease that was
// won by an attempt makes the next turn the same contender's all the same: otherwise their votes would be
// split.
func TestTheReleaseOfAnAttemptNamesWhoIsNext(t *testing.T) {
	for _, n := range []int{3, 5} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			inBubble(t, n, func(t *testing.T, r *rig) {
				names := []string{"x-1", "y-1", "z-1"}
				c, l := r.wanted("h-1", append(names, "m-1")...)
				c.release(l) // a turn of x-1, which does not take it
				r.loses(key)
				for i := range n {
					for j := range names {
						r.want(i, names[(i+j)%len(names)], float64(j+1))
					}
				}
				m := c.mustAs("m-1")
				c.wantReleased(m)
				turn := r.holders(key)[0]
				if !strings.HasPrefix(turn, node.TurnOf) {
					t.Errorf("the first node has %q", turn)
				}
				r.wantHolders(key, all(n, turn)...)
			})
		})
	}
}

func (c *client) wantReleased(l *Lease) {
	c.t.Helper()
	if f := c.release(l); f != nil {
		c.t.Error(describe(f))
	}
	time.Sleep(ms(20)) // until all nodes have answered, in the bubble's time
	synctest.Wait()
}

// A contender that leaves removes its want on every node, and passes on a turn that is kept for it;
// of another's key nothing changes.
func TestLeave(t *testing.T) {
	overSizes(t, func(t *testing.T, r *rig) {
		n := len(r.mem)
		c, l := r.wanted("", "x-1", "y-1", "z-1")
		c.q.Leave(key, "x-1")
		time.Sleep(ms(5))
		r.wantHolders(key, all(n, l.Owner())...)
		for i := range n {
			if got := r.waiting(i); got != "y-1 z-1" {
				t.Error("waiting:", got)
			}
		}
		c.release(l)
		time.Sleep(ms(5))
		c.q.Leave(key, "y-1")
		time.Sleep(ms(5))
		r.wantHolders(key, all(n, node.TurnOf+"z-1")...)
		c.q.Leave(key, "z-1")
		time.Sleep(ms(5))
		r.wantHolders(key, all(n, "")...)
		for i := range n {
			if got := r.waiting(i); got != "" {
				t.Error("waiting:", got)
			}
		}
	})
}

// A node on which the turn was made ours after our attempt had reached it keeps the key for us.
// That is not a vote; a refresh repairs it.
func TestTurnKeptForTheHolderIsRepaired(t *testing.T) {
	for _, late := range []bool{false, true} {
		inBubble(t, 3, func(t *testing.T, r *rig) {
			c := r.client("c")
			r.warm(c, key)
			l := c.mustAs("me-1")
			synctest.Wait()
			r.give(key, node.TurnOf+"me-1", ms(100), 2)
			if late {
				r.mem[2].SetDelay(ms(5))
			}
			if _, f := c.refresh(l, ttl, 0); f != nil {
				t.Fatal(describe(f))
			}
			time.Sleep(ms(30))
			r.wantHolders(key, all(3, l.Owner())...)
			r.mem[2].SetDelay(0)

			// A turn of a contender whose name is a prefix or a suffix of ours, or the other way round, is
			// not ours.
			for _, other := range []string{"me-10", "-1", "me-", "you-1"} {
				r.give(key, node.TurnOf+other, ms(100), 2)
				if _, f := c.refresh(l, ttl, 0); f != nil {
					t.Fatal(describe(f))
				}
				time.Sleep(ms(5))
				r.wantHolders(key, l.Owner(), l.Owner(), node.TurnOf+other)
			}

			// On a majority it is a loss, whoever the turn is for.
			r.give(key, node.TurnOf+"me-1", ms(100), 1, 2)
			_, f := c.refresh(l, ttl, 0)
			wantReason(t, f, NotHeld)
			c.release(l)
			time.Sleep(ms(10))
			r.wantHolders(key, "", "", "")
		})
	}
}

// A lease without a contender repairs no turn: none can be its own.
func TestTurnOfNobody(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("c")
		r.warm(c, key)
		r.everywhere()
		l, _ := c.must(key, ttl, 1)
		synctest.Wait()
		r.give(key, node.TurnOf, ms(100), 2)
		if _, f := c.refresh(l, ttl, 0); f != nil {
			t.Fatal(describe(f))
		}
		time.Sleep(ms(5))
		r.wantHolders(key, l.Owner(), l.Owner(), node.TurnOf)
		c.release(l)
	})
}

// A release that a node gets late, because the first was lost, passes the turn on to the contender
// that waits longest there, and does not affect a holder that got the key meanwhile.
func TestYieldThatANodeMissed(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c, l := r.wanted("me-1", "x-1", "y-1")
		synctest.Wait()
		r.mem[2].Down(true)
		if _, f := c.yield(l, "x-1").wait(); f != nil {
			t.Fatal(describe(f))
		}
		time.Sleep(ms(5))
		r.wantHolders(key, node.TurnOf+"x-1", node.TurnOf+"x-1", l.Owner())
		x := c.mustAs("x-1")
		r.mem[2].Down(false)
		for r.holders(key)[2] == l.Owner() {
			if _, f := c.refresh(x, ttl, 0); f != nil {
				t.Fatal(describe(f))
			}
			time.Sleep(ms(50))
		}
		r.wantHolders(key, x.Owner(), x.Owner(), node.TurnOf+"x-1")
		if _, f := c.refresh(x, ttl, 0); f != nil {
			t.Fatal(describe(f))
		}
		time.Sleep(ms(5))
		r.wantHolders(key, all(3, x.Owner())...)
		c.release(x)
		time.Sleep(ms(5))
		if got := r.holders(key); got[0] != node.TurnOf+"y-1" || got[1] != node.TurnOf+"y-1" {
			t.Errorf("%q", got)
		}
	})
}

// An attempt that is cancelled before it begins passes on the turn that was kept for it.
func TestCancelBeforeTheBeginningPassesTheTurnOn(t *testing.T) {
	overSizes(t, func(t *testing.T, r *rig) {
		n := len(r.mem)
		c, l := r.wanted("", "x-1", "y-1")
		if f := c.release(l); f != nil {
			t.Fatal(describe(f))
		}
		time.Sleep(ms(5))
		r.wantHolders(key, all(n, node.TurnOf+"x-1")...)

		x := new(Lease)
		c.q.Prepare(x, key, ttl, 1, "x-1")
		a := c.newCall("acquire", x)
		x.Cancel()
		x.Acquire(false, a)
		if _, f := a.wait(); f == nil {
			t.Fatal("it won")
		}
		time.Sleep(ms(5))
		r.wantHolders(key, all(n, node.TurnOf+"y-1")...)
	})
}

// An attempt that is cancelled while its requests go out has one answer of each node, and its
// requests and those that undo it do not share their memory (with -race).
func TestCancelWhileRequestsGoOut(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("c")
		r.warm(c, key)
		for range 300 {
			x := new(Lease)
			c.q.Prepare(x, key, ttl, 1, "x-1")
			a := c.newCall("acquire", x)
			var wg sync.WaitGroup
			wg.Go(x.Cancel)
			x.Acquire(false, a)
			wg.Wait()
			if _, f := a.wait(); f == nil {
				if f := c.release(x); f != nil {
					t.Fatal(describe(f))
				}
			}
			synctest.Wait()
			x.mu.Lock()
			pending := x.scratch.round.pending
			x.mu.Unlock()
			if pending > 3 {
				t.Fatalf("%d answers are missing: a node answered twice", pending)
			}
		}
	})
}
