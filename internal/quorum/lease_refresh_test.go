package quorum

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// heldLease is a rig of three nodes on which c holds key, everywhere.
func heldLease(t *testing.T, f func(r *rig, c *client, l *Lease, g Grant)) {
	t.Helper()
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key)
		l, g := c.must(key, ttl, 1)
		synctest.Wait()
		f(r, c, l, g)
	})
}

// A refresh gives the full ttl again, from before it was sent.
func TestRefreshGivesTheFullTTL(t *testing.T) {
	overSizes(t, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key)
		l, _ := c.must(key, ttl, 1)
		for range 5 {
			time.Sleep(ttl / 2)
			for _, m := range r.mem {
				m.SetDelay(ms(10))
			}
			want := time.Now().Add(c.q.Validity(ttl))
			g, f := c.refresh(l, ttl, 0)
			if f != nil || !g.Until.Equal(want) || g.Last >= g.First {
				t.Fatalf("%+v, want until %v; %s", g, want, describe(f))
			}
			for i, m := range r.mem {
				if left := m.Mini.TTL(key); left < ttl-ms(20) {
					t.Errorf("node %d: ttl %v", i, left)
				}
			}
		}
	})
}

// The deadline of the lease moves only when a majority has confirmed, not when the refresh is sent:
// in a partition nobody may consider a lease valid for longer.
func TestDeadlineMovesOnlyWhenConfirmed(t *testing.T) {
	heldLease(t, func(r *rig, c *client, l *Lease, g Grant) {
		deadline := func() time.Time {
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.until
		}
		time.Sleep(ttl / 2)
		r.delays(ms(10), ms(10), ms(10))
		a := c.beginRefresh(l, ttl, 0)
		time.Sleep(ms(15))
		if !deadline().Equal(g.Until) {
			t := r.t
			t.Error("moved before the answers")
		}
		a.wait()
		if !deadline().After(g.Until) {
			r.t.Error("not moved by the answers")
		}
		moved := deadline()
		r.mem[0].Stall(true)
		r.mem[1].Stall(true)
		_, f := c.refresh(l, ttl, 0)
		wantReason(r.t, f, Unreachable)
		if !deadline().Equal(moved) {
			r.t.Error("moved by one answer of three")
		}
		r.mem[0].Stall(false)
		r.mem[1].Stall(false)
	})
}

// A refresh for a shorter ttl shortens nothing.
func TestRefreshNeverShortens(t *testing.T) {
	heldLease(t, func(r *rig, c *client, l *Lease, g Grant) {
		short, f := c.refresh(l, ms(100), 0)
		if f != nil || !short.Until.Before(g.Until) {
			r.t.Fatalf("%+v, %s", short, describe(f))
		}
		time.Sleep(ms(500))
		if _, f := c.refresh(l, ttl, 0); f != nil {
			r.t.Error(describe(f))
		}
	})
}

// A confirmation that arrives after the old deadline is a loss, although the nodes have the key:
// the holder already knows that the lease is over.
func TestLateConfirmationIsALoss(t *testing.T) {
	heldLease(t, func(r *rig, c *client, l *Lease, g Grant) {
		time.Sleep(time.Until(g.Until) - ms(5))
		r.delays(ms(3), ms(3), ms(3))
		_, f := c.refresh(l, ttl, 0)
		wantReason(r.t, f, NotHeld)
		if !errors.Is(f.Err, errLateAnswer) {
			r.t.Error(describe(f))
		}
		lostForGood(r, c, l)
	})
}

// lostForGood checks that a lost lease can neither be refreshed nor restored by a repair, and that
// Release still removes it from the nodes.
func lostForGood(r *rig, c *client, l *Lease) {
	r.t.Helper()
	before := c.commands(nil)
	_, f := c.refresh(l, ttl, 0)
	wantReason(r.t, f, NotHeld)
	l.repair(0)
	synctest.Wait()
	if got := c.commands(before); slices.Max(got) != 0 {
		r.t.Errorf("a lost lease sent %v commands", got)
	}
	c.release(l)
	r.wantNoKey(key)
}

// After the deadline, by either clock, a refresh sends nothing.
func TestRefreshAfterTheDeadlineAsksNobody(t *testing.T) {
	heldLease(t, func(r *rig, c *client, l *Lease, g Grant) {
		time.Sleep(time.Until(g.Until)) // the nodes have it for 12ms more
		before := c.commands(nil)
		_, f := c.refresh(l, ttl, 0)
		wantReason(r.t, f, NotHeld)
		if got := c.commands(before); slices.Max(got) != 0 {
			r.t.Errorf("sent %v", got)
		}
		lostForGood(r, c, l)
	})
}

// A machine that slept since the last refresh has lost the lease, although the monotonic clock does
// not show it. A wall clock that is set back later does not restore it.
func TestLeaseOutlivedByTheWallClockIsLost(t *testing.T) {
	r := slowRig(t, 3)
	c := newPatientClient(t, "x", r.conns(), 10*time.Second)
	l, _ := c.must(key, time.Hour, 1)
	a := c.beginRefresh(l, time.Hour, 0)
	jumpLease(t, l, 2*time.Hour)
	_, f := a.wait() // confirmed before the deadline that was noted when it began
	if f != nil {
		t.Fatal(describe(f))
	}
	jumpLease(t, l, 2*time.Hour)
	_, f = c.refresh(l, time.Hour, 0)
	wantReason(t, f, NotHeld)
	jumpLease(t, l, -2*time.Hour)
	_, f = c.refresh(l, time.Hour, 0)
	wantReason(t, f, NotHeld)
	c.release(l)
	r.eventuallyHolders(key, "", "", "")
}

// A repair is not sent for a lease that is over by the wall clock alone.
func TestNoRepairAfterTheWallClockPassedTheDeadline(t *testing.T) {
	r := slowRig(t, 3)
	c := newPatientClient(t, "x", r.conns(), 10*time.Second)
	l, _ := c.must(key, time.Hour, 1)
	r.eventuallyHolders(key, l.Owner(), l.Owner(), l.Owner())
	c.quiet()
	c.quiet() // nor does a late answer cause another request
	r.mem[0].Mini.Del(key)
	jumpLease(t, l, 2*time.Hour)
	before := c.commands(nil)
	l.repair(0)
	c.quiet()
	if got := c.commands(before); !slices.Equal(got, []uint64{1, 1, 1}) {
		t.Errorf("sent %v", got)
	}
	jumpLease(t, l, -2*time.Hour)
	l.repair(0)
	r.eventuallyHolders(key, l.Owner(), l.Owner(), l.Owner())
}

// Missing or another's on so many nodes that a majority is out of reach is a loss at
// once: nobody waits for the rest. One such node is not.
func TestMissingOnTooManyNodesIsALoss(t *testing.T) {
	for _, other := range []string{"", "other"} {
		heldLease(t, func(r *rig, c *client, l *Lease, _ Grant) {
			lose := func(i int) {
				r.mem[i].Mini.Del(key)
				if other != "" {
					r.give(key, other, time.Second, i)
				}
			}
			lose(0)
			if _, f := c.refresh(l, ttl, 0); f != nil {
				r.t.Fatal(describe(f))
			}
			synctest.Wait()
			lose(0)
			lose(1)
			r.mem[2].Stall(true)
			start := time.Now()
			_, f := c.refresh(l, ttl, 5)
			wantReason(r.t, f, NotHeld)
			if took := time.Since(start); took != 0 {
				r.t.Errorf("took %v", took)
			}
			r.mem[2].Stall(false)
			synctest.Wait()
			r.wantHolders(key, other, other, l.Owner()) // nothing was repaired
			lostForGood(r, c, l)
		})
	}
}

// Transport errors are not a loss: the lease is what it was, and a later refresh can succeed.
func TestTransportErrorsAreNoLoss(t *testing.T) {
	for n := 1; n <= 5; n++ {
		inBubble(t, n, func(t *testing.T, r *rig) {
			c := r.client("x")
			r.warm(c, key)
			l, _ := c.must(key, ttl, 1)
			synctest.Wait()
			for i, m := range r.mem {
				if i%2 == 0 {
					m.Down(true)
				} else {
					m.Stall(true)
				}
			}
			_, f := c.refresh(l, ttl, 5)
			wantReason(t, f, Unreachable)
			for _, m := range r.mem {
				m.Stall(false)
				m.Down(false)
			}
			time.Sleep(ms(600)) // a server that is suspended is dialled every 250 ms
			if _, f := c.refresh(l, ttl, 5); f != nil {
				t.Error(describe(f))
			}
		})
	}
}

// A node that lost the key, or all its data, gets the key and the fence back after a confirmed
// refresh, for as long as the lease is valid and no longer.
func TestRefreshRepairsNodesThatForgot(t *testing.T) {
	for _, late := range []bool{false, true} {
		heldLease(t, func(r *rig, c *client, l *Lease, g Grant) {
			for i := range 3 {
				r.setCounter(i, 1<<52) // beyond any clock, so that a new bucket is behind
			}
			g, f := c.refresh(l, ttl, 10)
			if f != nil {
				r.t.Fatal(describe(f))
			}
			if err := r.mem[2].Restart(); err != nil {
				r.t.Fatal(err)
			}
			time.Sleep(redial)
			if late { // its answer comes behind the decision
				r.mem[2].SetDelay(ms(5))
			}
			g2, f := c.refresh(l, ttl, 0)
			if f != nil {
				r.t.Fatal(describe(f))
			}
			time.Sleep(ms(100))
			r.wantHolders(key, l.Owner(), l.Owner(), l.Owner())
			if got := r.counter(2); got < g.Last {
				r.t.Errorf("the counter is %d, want %d at least", got, g.Last)
			}
			left := r.mem[2].Mini.TTL(key)
			if valid := time.Until(g2.Until); left <= 0 || left > valid+ms(11) {
				r.t.Errorf("repaired for %v, valid for %v", left, valid)
			}
			if f := c.release(l); f != nil {
				r.t.Error(describe(f))
			}
			r.wantNoKey(key)
		})
	}
}

// A repair is never a vote: while one node of three has the key, no refresh succeeds, however many
// there are, and nobody gets the key back.
func TestRepairIsNoVote(t *testing.T) {
	heldLease(t, func(r *rig, c *client, l *Lease, _ Grant) {
		r.mem[0].Mini.Del(key)
		r.mem[1].Mini.Del(key)
		for i := range 5 {
			if _, f := c.refresh(l, ttl, int64(i)); f == nil {
				r.t.Fatal("a lease on one node of three was refreshed")
			}
			time.Sleep(ms(10))
			r.wantHolders(key, "", "", l.Owner())
		}
	})
}

// Nor does it make one when answers are lost: the nodes that answer say Missing, so
// nothing is confirmed and nothing repaired.
func TestNoRepairWithoutAConfirmedRefresh(t *testing.T) {
	heldLease(t, func(r *rig, c *client, l *Lease, _ Grant) {
		r.mem[0].Mini.Del(key)
		r.mem[1].Stall(true)
		_, f := c.refresh(l, ttl, 0)
		wantReason(r.t, f, Unreachable)
		r.mem[1].Stall(false)
		time.Sleep(ms(10))
		r.wantHolders(key, "", l.Owner(), l.Owner())
	})
}

// A repair never overwrites another holder, nor does one come after the release.
func TestRepairNeverOverwrites(t *testing.T) {
	heldLease(t, func(r *rig, c *client, l *Lease, _ Grant) {
		r.mem[0].Mini.Del(key)
		r.mem[0].SetDelay(ms(10))
		a := c.beginRefresh(l, ttl, 0)
		time.Sleep(ms(15)) // Missing is on its way back, ahead of the repair
		r.give(key, "other", time.Hour, 0)
		a.wait()
		time.Sleep(ms(100))
		r.wantHolders(key, "other", l.Owner(), l.Owner())

		r.mem[1].Mini.Del(key)
		r.mem[0].Mini.Del(key)
		r.mem[0].SetDelay(0)
		r.mem[2].SetDelay(ms(10))
	})
	heldLease(t, func(r *rig, c *client, l *Lease, _ Grant) {
		r.mem[0].Mini.Del(key)
		r.mem[0].SetDelay(ms(10))
		if _, f := c.refresh(l, ttl, 0); f != nil {
			r.t.Fatal(describe(f))
		}
		c.release(l) // before Missing has come back
		time.Sleep(ms(100))
		r.wantHolders(key, "", "", "")
	})
}

// A node that granted nothing in the attempt is brought in by the first refresh.
func TestRefreshBringsInANodeThatWasAway(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key)
		r.mem[2].Down(true)
		l, _ := c.must(key, ttl, 1)
		r.mem[2].Down(false)
		time.Sleep(redial)
		if _, f := c.refresh(l, ttl, 0); f != nil {
			t.Fatal(describe(f))
		}
		time.Sleep(ms(100))
		r.wantHolders(key, l.Owner(), l.Owner(), l.Owner())
	})
}

// A refresh of a lease that was released, or never won, is NotHeld.
func TestRefreshOfNoLease(t *testing.T) {
	heldLease(t, func(r *rig, c *client, l *Lease, _ Grant) {
		c.release(l)
		_, f := c.refresh(l, ttl, 1)
		wantReason(r.t, f, NotHeld)
		_, f = c.refresh(prepare(c.q, key, ttl, 1), ttl, 1)
		wantReason(r.t, f, NotHeld)
	})
}

// A refresh whose lease runs out in the very moment in which it begins ends, once, and without a race.
func TestARefreshThatBeginsAtTheEndOfItsLease(t *testing.T) {
	conn := redis.NewClient(&redis.Options{Addr: redistest.RefusedAddr(t), DialerRetries: 1})
	t.Cleanup(func() { _ = conn.Close() })
	c := newClient(t, "x", []redis.UniversalClient{conn})
	for range 500 {
		l := &Lease{}
		c.q.Prepare(l, key, ttl, 1, "")
		ended := make(chan bool, 2)
		r := l.newRound("refresh", node.Renewed, 0, func(r *round) { ended <- r.won })
		r.endAt(time.Now())
		if <-ended {
			t.Fatal("it was won")
		}
	}
}
