package quorum

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// With every number of nodes a free key is granted on all of them, with the ttl asked for,
// and a release leaves nothing but the fence.
func TestAcquireAndRelease(t *testing.T) {
	overSizes(t, func(t *testing.T, r *rig) {
		c := r.client("x")
		l, g := c.must(key, ttl, 3)
		if g.Last-g.First != 2 || g.First <= 0 {
			t.Errorf("the block is %d to %d, want 3 tokens", g.First, g.Last)
		}
		synctest.Wait()
		for i, m := range r.mem {
			owner, _ := m.Mini.Get(key)
			if left := m.Mini.TTL(key); owner != l.Owner() || left != ttl {
				t.Errorf("node %d: %q with ttl %v", i, owner, left)
			}
		}
		if f := c.release(l); f != nil {
			t.Error(describe(f))
		}
		r.wantNoKey(key)
	})
}

// A node that is slow does not delay: the first majority of grants decides, and the first majority
// of refusals does.
func TestSlowMinorityCostsNothing(t *testing.T) {
	overSizes(t, func(t *testing.T, r *rig) {
		x, y := r.client("x"), r.client("y")
		r.warm(x, key)
		r.warm(y, key)
		for _, m := range r.mem[x.q.Need():] {
			m.SetDelay(ms(20))
		}
		start := time.Now()
		l, _ := x.must(key, ttl, 1)
		_, _, f := y.try(key, ttl, 1)
		wantReason(t, f, Taken)
		if f := x.release(l); f != nil {
			t.Error(describe(f))
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("waited %v for the slow nodes", took)
		}
		r.wantNoKey(key)
	})
}

// A majority that is down or silent makes the key unreachable, whatever the others answer; the
// failure names the nodes that did not answer and the holder on the others.
func TestUnreachableIsNotCalledHeld(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key)
		r.give(key, "other", ttl, 2)
		r.mem[0].Down(true)
		r.mem[1].Stall(true)
		start := time.Now()
		_, _, f := c.try(key, ttl, 1)
		wantReason(t, f, Unreachable)
		if took := time.Since(start); took < nodeTimeout || took > nodeTimeout+ms(10) {
			t.Errorf("took %v, want the NodeTimeout", took)
		}
		if f.Final || f.Nodes[0].Reply.Err == nil || f.Nodes[1].Reply.Err == nil ||
			f.Nodes[2].Reply.Holder != "other" {
			t.Error(describe(f))
		}
		r.mem[0].Down(false)
		r.mem[1].Stall(false)
		r.settle()
		r.wantHolders(key, "", "", "") // the other's ran out
	})
}

// A key that others hold is not called unreachable because an error arrived first.
func TestHeldIsNotCalledUnreachable(t *testing.T) {
	for n := 2; n <= 5; n++ {
		t.Run(fmt.Sprintf("nodes=%d", n), func(t *testing.T) {
			inBubble(t, n, func(t *testing.T, r *rig) {
				c := r.client("x")
				r.warm(c, key)
				down := (n + 1) / 2 // leaves just enough to put a majority out of reach
				if n%2 == 1 {
					down = n / 2
				}
				for i, m := range r.mem {
					if i < down {
						m.Mini.SetError("OOM command not allowed")
					} else {
						r.give(key, "other", ttl, i)
						m.SetDelay(ms(5))
					}
				}
				_, _, f := c.try(key, ttl, 1)
				wantReason(t, f, Taken)
			})
		})
	}
}

// Errors that a retry cannot change, on so many nodes that a majority is out of reach, make
// the failure final at once.
func TestFinalErrors(t *testing.T) {
	for n := 1; n <= 5; n++ {
		inBubble(t, n, func(t *testing.T, r *rig) {
			c := r.client("x")
			r.warm(c, key)
			for _, m := range r.mem[:n-c.q.Need()+1] {
				if _, err := m.Mini.Push(key, "a list"); err != nil {
					t.Fatal(err)
				}
			}
			for _, m := range r.mem[n-c.q.Need()+1:] {
				m.SetDelay(ms(5))
			}
			start := time.Now()
			_, _, f := c.try(key, ttl, 1)
			wantReason(t, f, Unreachable)
			if !f.Final || time.Since(start) != 0 {
				t.Errorf("%d nodes, after %v: %s", n, time.Since(start), describe(f))
			}
		})
	}
}

// Two clients that have two of four nodes each both lose, undo what they have and, when
// their pauses differ, one of them wins.
func TestTieOfAnEvenNumberResolves(t *testing.T) {
	inBubble(t, 4, func(t *testing.T, r *rig) {
		x, y := r.client("x"), r.client("y")
		r.warm(x, key)
		r.warm(y, key)
		r.delays(0, 0, ms(2), ms(2))
		a := x.begin(key, ttl, 1) // reaches nodes 2 and 3 after 2ms
		synctest.Wait()
		r.delays(ms(2), ms(2), 0, 0)
		b := y.begin(key, ttl, 1) // reaches nodes 0 and 1 after 2ms
		_, f := a.wait()
		wantReason(t, f, Taken)
		_, f = b.wait()
		wantReason(t, f, Taken)
		r.delays(0, 0, 0, 0)
		r.settle()
		r.wantHolders(key, "", "", "", "")
		rng := rand.New(rand.NewPCG(3, 4))
		for range 100 {
			a, b := x.begin(key, ttl, 1), y.begin(key, ttl, 1)
			_, fx := a.wait()
			_, fy := b.wait()
			if fx == nil && fy == nil {
				t.Fatal("both won")
			}
			if fx == nil || fy == nil {
				return
			}
			time.Sleep(time.Duration(rng.Int64N(int64(ms(10)))))
		}
		t.Error("nobody ever won")
	})
}

// Validity starts before the first request (S3): however long the answers take, the deadline is the
// same.
func TestValidityStartsBeforeTheFirstRequest(t *testing.T) {
	overSizes(t, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key)
		for _, m := range r.mem {
			m.SetDelay(ms(20))
		}
		want := time.Now().Add(c.q.Validity(ttl))
		l, g := c.must(key, ttl, 1)
		if !g.Until.Equal(want) {
			t.Errorf("valid until %v after the first byte, want %v", time.Until(g.Until), time.Until(want))
		}
		time.Sleep(time.Until(g.Until))
		r.wantHolders(key, slices.Repeat([]string{l.Owner()}, len(r.mem))...) // outlives the validity everywhere
	})
}

// An attempt that finds its majority only after its validity is over has failed, and is undone (S3,
// S4): also in the raise.
func TestAttemptWhoseValidityIsGoneFails(t *testing.T) {
	for _, raise := range []bool{false, true} {
		inBubble(t, 3, func(t *testing.T, r *rig) {
			const ttl = 20 * time.Millisecond // valid for 17.8ms
			c := r.client("x")
			r.warm(c, key, 10, 10, 10)
			oneWay := 9500 * time.Microsecond
			if raise {
				r.setCounter(0, 20)
				r.setCounter(1, 30)
				oneWay /= 2
			}
			for _, m := range r.mem {
				m.SetDelay(oneWay)
			}
			_, _, f := c.try(key, ttl, 1)
			wantReason(t, f, Unreachable)
			if !errors.Is(f.Err, errTooLate) {
				t.Error(describe(f))
			}
			time.Sleep(oneWay + ms(1)) // the key would live on until 8.5ms after this
			synctest.Wait()
			r.wantHolders(key, "", "", "")
		})
	}
}

// jump makes a deadline look as if the wall clock had been moved on by d since it was set,
// while the monotonic clock went as before. (A Time with a monotonic reading has the wall
// clock's seconds above 30 bits of nanoseconds. There is no such reading in a bubble.)
func jump(t *testing.T, deadline *time.Time, d time.Duration) {
	before := *deadline
	*(*uint64)(unsafe.Pointer(deadline)) -= uint64(d/time.Second) << 30
	if wall := before.Round(0).Sub(deadline.Round(0)); wall != d || !deadline.Equal(before) {
		t.Fatalf("a Time is not what it was: moved its wall clock by %v", wall)
	}
}

func jumpLease(t *testing.T, l *Lease, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	jump(t, &l.until, d)
}

// slowRig is a rig in real time, whose nodes take 10ms to answer.
func slowRig(t *testing.T, n int) *rig {
	r := &rig{t: t, mem: newMemNodes(t, n)}
	for _, m := range r.mem {
		m.SetDelay(ms(5))
	}
	return r
}

func (r *rig) eventuallyHolders(key string, want ...string) {
	r.t.Helper()
	redistest.Eventually(r.t, 10*time.Second, fmt.Sprintf("the nodes have %q", want), func() bool {
		return slices.Equal(r.holders(key), want)
	})
}

// A machine that slept during the attempt shows it on its wall clock alone: the attempt has failed
// and is undone. A wall clock that was set back does not make it any longer.
func TestAttemptOutlivedByTheWallClockFails(t *testing.T) {
	r := slowRig(t, 3)
	c := newPatientClient(t, "x", r.conns(), 10*time.Second)
	defer clocks.Reset()
	l, _ := c.must(key, time.Hour, 1) // the scripts are known from here on
	if f := c.release(l); f != nil {
		t.Fatal(describe(f))
	}
	r.eventuallyHolders(key, "", "", "")
	begin := func() *call { // an attempt that is on its way for long enough, even on a busy machine
		r.delays(ms(250), ms(250), ms(250))
		defer r.delays(ms(5), ms(5), ms(5))
		var before []uint64
		for _, n := range c.nodes {
			before = append(before, n.Commands())
		}
		a := c.begin(key, time.Hour, 1)
		for i, n := range c.nodes {
			redistest.Eventually(t, 10*time.Second, "it is written", func() bool {
				return n.Commands() > before[i] && !a.l.target.Begun().IsZero()
			})
		}
		return a
	}
	a := begin()
	clocks.Sleep(2 * time.Hour)
	_, f := a.wait()
	wantReason(t, f, Unreachable)
	if !errors.Is(f.Err, errTooLate) {
		t.Error(describe(f))
	}
	r.eventuallyHolders(key, "", "", "")

	a = begin()
	clocks.Sleep(-2 * time.Hour)
	if _, f = a.wait(); f != nil {
		t.Error(describe(f))
	}
}

// An attempt may fail although it had its majority. The failure is delivered all the same, also
// when a node answered that another holds the key.
func TestFailureOfARoundThatWasWon(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		const ttl = 20 * time.Millisecond // valid for 17.8ms
		c := r.client("x")
		r.warm(c, key)
		r.give(key, "other", time.Hour, 0)
		r.delays(0, ms(9), ms(9))
		_, _, f := c.try(key, ttl, 1)
		wantReason(t, f, Unreachable)
		if f.Got != 2 || f.Nodes[0].Reply.Holder != "other" {
			t.Fatal(describe(f))
		}
	})
}

// A failed attempt is undone on every node that granted it, also where the grant arrives after the
// failure (S4), and a losing attempt sends every other node just one request.
func TestFailedAttemptIsUndoneWhereverItWasGranted(t *testing.T) {
	inBubble(t, 5, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key)
		r.give(key, "other", time.Hour, 0, 1, 2)
		r.delays(ms(1), ms(1), ms(1), 0, ms(30)) // 3 grants before the decision, 4 after it
		before := c.commands(nil)
		_, _, f := c.try(key, ttl, 1)
		wantReason(t, f, Taken)
		time.Sleep(ms(100))
		synctest.Wait()
		r.wantHolders(key, "other", "other", "other", "", "")
		if got := c.commands(before); !slices.Equal(got, []uint64{1, 1, 1, 2, 2}) {
			t.Errorf("commands per node: %v", got)
		}
	})
}

// A loser's failure says when a majority could be free: a poll then finds it so (S7).
func TestPollAtFreeFindsTheKeyFree(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key)
		for i := range r.mem {
			r.give(key, "other", ms(100+100*i), i)
		}
		var polls []time.Duration
		for start := time.Now(); ; {
			_, _, f := c.try(key, ttl, 1)
			polls = append(polls, time.Since(start))
			if f == nil {
				break
			}
			wantReason(t, f, Taken)
			time.Sleep(f.Free)
		}
		// With two refusals the third node may be free, so the first poll comes when the
		// first node is; the second one finds two free.
		if last := polls[len(polls)-1]; last != ms(201) || len(polls) > 3 {
			t.Errorf("polled at %v, want the last at 201ms", polls)
		}
	})
}

// With a holder that has no ttl, it is unknown when the key will be free.
func TestUnknownTTLIsNotNow(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, r *rig) {
		r.give(key, "other", 0, 0)
		_, _, f := r.client("x").try(key, ttl, 1)
		wantReason(t, f, Taken)
		if f.Free != 0 || f.Nodes[0].Reply.TTL >= 0 {
			t.Error(describe(f))
		}
	})
}

// The same owner is never used twice (S2).
func TestOwnersAreNeverReused(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		for i := range 20 {
			a := c.begin(key, ttl, 1)
			if i%2 == 0 {
				a.l.Cancel()
			}
			if _, f := a.wait(); f == nil {
				c.release(a.l)
			}
		}
		slices.Sort(c.owners)
		if len(slices.Compact(slices.Clone(c.owners))) != 20 {
			t.Errorf("owners: %q", c.owners)
		}
	})
}

// Cancel at any moment, before the attempt, between its requests and its answers, in the raise or
// after the grant, leads to one outcome: a grant that stands, or a failure of which nothing is left
// on the nodes.
func TestCancelAtEveryMoment(t *testing.T) {
	t.Parallel()
	for half := 0; half <= 44; half++ {
		at := time.Duration(half) * 500 * time.Microsecond
		inBubble(t, 3, func(t *testing.T, r *rig) {
			c := r.client("x")
			r.warm(c, key, 10, 20, 30)
			r.delays(ms(3), ms(5), ms(9)) // grants by 10ms, raised by 20ms
			a := c.begin(key, time.Hour, 1)
			time.Sleep(at)
			a.l.Cancel()
			asked := time.Now()
			_, f := a.wait()
			if time.Since(asked) > 0 && f != nil {
				t.Errorf("cancelled after %v: the failure took %v", at, time.Since(asked))
			}
			if granted := f == nil; granted != (at > ms(20)) && at != ms(20) {
				t.Errorf("cancelled after %v: %s", at, describe(f))
			}
			a.l.Cancel() // again: nothing happens
			r.settle()
			if f == nil {
				r.wantHolders(key, a.l.Owner(), a.l.Owner(), a.l.Owner())
				if f := c.release(a.l); f != nil {
					t.Error(describe(f))
				}
			}
			r.wantNoKey(key)
		})
	}
}

// An attempt that was cancelled before it began sends nothing.
func TestCancelBeforeTheAttemptAsksNobody(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		l := prepare(c.q, key, ttl, 1)
		l.Cancel()
		a := c.newCall("acquire", l)
		l.Acquire(false, a)
		if !a.answered() {
			t.Error("the failure is not there at once")
		}
		_, f := a.wait()
		wantReason(t, f, Unreachable)
		r.settle()
		if sent := c.commands(nil); !slices.Equal(sent, []uint64{0, 0, 0}) {
			t.Errorf("commands per node: %v", sent)
		}
	})
}

// Cancelled between the grants and the raise, an attempt does not wait for the raise.
func TestCancelJustBeforeTheRaise(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key)
		a := c.newCall("acquire", prepare(c.q, key, ttl, 1))
		l := a.l
		l.scratch.onAcquired, l.until = a, time.Now().Add(ttl)
		first := l.newRound("acquire", node.Granted, 0, func(r *round) {
			l.Cancel()
			l.raise(r.replies, 30)
		})
		for i := range 2 {
			first.Answer(i, node.Reply{Kind: node.Granted, Counter: int64(10 * i)})
		}
		if !a.answered() {
			t.Error("the failure is not there at once")
		}
		_, f := a.wait()
		wantReason(t, f, Unreachable)
	})
}

// Cancelled in the instant in which a majority has granted, the attempt has failed and is
// undone: its caller does not expect a lease.
func TestCancelInTheInstantOfTheGrant(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key, 10, 10, 10)
		l := prepare(c.q, key, time.Hour, 1)
		a := c.newCall("acquire", l)
		l.scratch.onAcquired = a
		first := l.newRound("acquire", node.Granted, 0, func(r *round) {
			l.Cancel()
			l.acquired(r)
		})
		for i := range l.entries {
			l.entries[i].Acquire(&l.scratch.places[i], first, time.Hour, 1, false)
		}
		if _, f := a.wait(); f == nil {
			t.Error("granted although it was cancelled")
		}
		r.wantNoKey(key)
	})
}

// An attempt that was canceled says nothing about how long the nodes take.
func TestACanceledAttemptIsNoRoundTrip(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key)
		r.delays(ms(10), ms(10), ms(10))
		l, _ := c.must(key, ttl, 1)
		c.release(l)
		r.settle()
		before := c.q.halfRTT()
		a := c.begin(key, ttl, 1)
		time.Sleep(ms(1))
		a.l.Cancel()
		a.wait()
		if got := c.q.halfRTT(); got != before {
			t.Errorf("half a round trip is %v after %v", got, before)
		}
		r.settle()
	})
}

// An attempt that was canceled was decided by nobody, and does not say that the nodes without an answer were
// late.
func TestACanceledAttemptNamesNoOthers(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key)
		r.delays(ms(10), ms(10), ms(10))
		a := c.begin(key, ttl, 1)
		time.Sleep(ms(1))
		for _, f := range []*Failure{a.l.Peek(), func() *Failure { a.l.Cancel(); _, f := a.wait(); return f }()} {
			if text := describe(f); !strings.Contains(text, "given up") || strings.Contains(text, "others decided") {
				t.Error(text)
			}
		}
		r.settle()
	})
}

// Peek returns how an attempt under way would fail now, and nil once there is an outcome.
func TestPeek(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key)
		r.give(key, "other", ttl, 0)
		r.delays(ms(1), ms(10), ms(20))
		a := c.begin(key, ttl, 1)
		time.Sleep(ms(5))
		f := a.l.Peek()
		wantReason(t, f, Unreachable)
		if f.Nodes[0].Reply.Holder != "other" {
			t.Error(describe(f))
		}
		a.wait()
		if f := a.l.Peek(); f != nil {
			t.Error(describe(f))
		}
	})
}

// In the raise too, an attempt is not called a lease that was lost.
func TestFailedRaiseIsAFailedAttempt(t *testing.T) {
	l := muteLease(t, 3)
	r := l.newRound("acquire", node.Renewed, 10, func(*round) {})
	r.Answer(0, node.Reply{Kind: node.Missing})
	r.Answer(1, node.Reply{Kind: node.Missing})
	wantReason(t, l.Peek(), Unreachable)
}

// A node may answer while the requests are still being sent, as one that is closed does. The
// attempt fails once, on the caller's goroutine, and no further node gets a request.
func TestAnswersDuringSending(t *testing.T) {
	overSizes(t, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key)
		for _, n := range c.nodes[:len(c.nodes)-c.q.Need()+1] {
			if err := n.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		_, _, f := c.try(key, ttl, 1)
		wantReason(t, f, Unreachable)
		if !errors.Is(f.Nodes[0].Reply.Err, node.ErrClosed) {
			t.Error(describe(f))
		}
		r.wantNoKey(key)
	})
}

// acquirerFunc makes a func an Acquirer.
type acquirerFunc func(Grant, *Failure)

func (h acquirerFunc) Acquired(g Grant, f *Failure) { h(g, f) }

// The undo of a failed attempt is sent before its failure is delivered: an immediate retry is
// executed after the undo, on every node.
func TestNextAttemptComesAfterTheUndo(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key)
		r.delays(ms(5), ms(7), ms(9))
		for range 10 {
			a, next := c.newCall("acquire", prepare(c.q, key, time.Hour, 1)), make(chan *call, 1)
			a.l.Acquire(false, acquirerFunc(func(g Grant, f *Failure) {
				next <- c.begin(key, time.Hour, 1)
				a.done(g, f)
			}))
			time.Sleep(ms(6))
			a.l.Cancel()
			b := <-next
			if _, f := b.wait(); f != nil {
				t.Fatal(describe(f))
			}
			l := b.l
			if f := c.release(l); f != nil {
				t.Fatal(describe(f))
			}
		}
		r.wantNoKey(key)
	})
}

// Uncontended, a lease costs one command per node to acquire when the counters agree, two
// when they do not, as on a bucket's first use, and one to release; a losing attempt costs
// at most one, and none on a node that it had not reached when a majority had refused it.
func TestCommandsPerNode(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 3, 5} {
		t.Run(fmt.Sprintf("nodes=%d", n), func(t *testing.T) {
			t.Parallel()
			var servers []*redistest.Server
			var conns, others []redis.UniversalClient
			for range n {
				s := redistest.StartServer(t)
				servers = append(servers, s)
				conns = append(conns, s.Client(t))
				others = append(others, s.Client(t))
			}
			x, y := newPatientClient(t, "x", conns, patience), newPatientClient(t, "y", others, patience)

			first := int64(2)
			if n == 1 { // agrees with itself
				first = 1
			}
			ran := func(s *redistest.Server) int64 {
				return s.CommandCalls(t)["evalsha"] - noScript(s.Do(t, "INFO", "errorstats").(string))
			}
			scripts := func(what string, want int64) {
				t.Helper()
				for i, s := range servers {
					var got int64
					state := fmt.Sprintf("node %d has run %d scripts for %s", i, want, what)
					redistest.Eventually(t, patience, state, func() bool {
						got = ran(s)
						return got >= want
					})
					if got != want {
						t.Errorf("node %d ran %d scripts for %s, want %d", i, got, what, want)
					}
					s.Do(t, "CONFIG", "RESETSTAT")
				}
			}
			l, _ := x.must(key, time.Minute, 1)
			scripts("the first acquire", first)
			_, _, f := y.try(key, time.Minute, 1)
			wantReason(t, f, Taken)
			y.quiet() // what was sent has been executed
			refused := 0
			for i, s := range servers {
				got := ran(s) - 1 // quiet's own
				refused += int(got)
				if got > 2 {
					t.Errorf("node %d ran %d scripts for a losing attempt, want its acquire and an undo at most", i, got)
				}
				s.Do(t, "CONFIG", "RESETSTAT")
			}
			if refused < n/2+1 {
				t.Errorf("a losing attempt met %d nodes, want a majority of %d", refused, n)
			}
			x.release(l)
			scripts("a release", 1)
			x.quiet()
			for _, s := range servers {
				for _, bucket := range s.Keys(t) {
					s.Do(t, "SET", bucket, int64(1<<50)) // as they are when every node saw every grant
				}
				s.Do(t, "CONFIG", "RESETSTAT")
			}
			l, _ = x.must(key, time.Minute, 1)
			scripts("an acquire", 1)
			x.release(l)
			scripts("another release", 1)
		})
	}
}

// noScript is how many calls failed because the server did not know the script yet.
func noScript(errorstats string) (n int64) {
	if _, rest, ok := strings.Cut(errorstats, "errorstat_NOSCRIPT:count="); ok {
		_, _ = fmt.Sscan(rest, &n)
	}
	return n
}

// quiet waits until every node has answered all requests so far: all requests for one key go in
// order.
func (c *client) quiet() {
	l := prepare(c.q, key, time.Minute, 1)
	answers := make(sink, len(c.nodes))
	for i := range l.entries {
		l.entries[i].Refresh(answers, time.Minute, 0, 0, time.Now().Add(time.Minute), "")
	}
	for range l.entries {
		<-answers
	}
}

type sink chan node.Reply

func (s sink) Answer(_ int, rep node.Reply) { s <- rep }

func (c *client) nodeTimeout(d time.Duration) { c.q.NodeTimeout = d }
