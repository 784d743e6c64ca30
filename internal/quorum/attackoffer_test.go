package quorum

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/node"
)

// waiterOf is a contender that waits with an offer: it has a subscription and has made one poll.
type waiterOf struct {
	c         *client
	contender string
	offer     *Lease
	outcome   *call
	stop      func()
}

func (c *client) offersAs(contender string) *waiterOf {
	w := &waiterOf{c: c, contender: contender, offer: new(Lease)}
	w.stop = c.q.Watch(key, contender, func(Event, string) {})
	synctest.Wait()
	w.outcome = c.newCall("offer", w.offer)
	c.q.Offer(w.offer, key, ttl, 1, contender, w.outcome)
	return w
}

func (w *waiterOf) poll(span time.Duration, waits bool) (*Lease, *Failure) {
	l := new(Lease)
	w.c.q.Prepare(l, key, ttl, 1, w.contender)
	l.Carry(w.offer, span, waits)
	a := w.c.newCall("acquire", l)
	l.Acquire(false, a)
	_, f := a.wait()
	synctest.Wait()
	return l, f
}

// ends releases the lease that the offer has won, and waits until nothing is under way.
func (w *waiterOf) ends(r *rig) {
	r.t.Helper()
	if f := w.c.release(w.offer); f != nil {
		r.t.Error(describe(f))
	}
	w.stop()
	r.settle()
}

// holdOn makes a client of some servers only the holder of the key there, in a way that its release grants.
func (r *rig) holdOn(name string, servers ...int) (*client, *Lease) {
	c := r.withDuplicates(name, servers...)
	l := new(Lease)
	c.q.Prepare(l, key, ttl, 1, Self)
	a := c.newCall("acquire", l)
	l.Acquire(false, a)
	if _, f := a.wait(); f != nil {
		r.t.Fatal(describe(f))
	}
	return c, l
}

// S14: two nodes that are the same server have one vote, also for an offer. Servers 1 and 2 are another's: a
// majority of the right set. The waiter has server 0 twice. One release, on server 0, must not make a majority.
func TestTheSameServerTwiceGrantsAnOfferOnce(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		r.give(key, "other-1", ttl, 1, 2)
		h, held := r.holdOn("h", 0)
		x := r.withDuplicates("x", 0, 0, 1)
		w := x.offersAs("x-77")
		if _, f := w.poll(ms(500), true); f == nil {
			t.Fatal("won")
		}
		if f := h.release(held); f != nil {
			t.Fatal(describe(f))
		}
		time.Sleep(ms(100))
		synctest.Wait()
		if w.outcome.answered() {
			if g, f := w.outcome.wait(); f == nil {
				t.Errorf("VIOLATION of S14: one server has voted twice for the offer: %+v; the servers have %q", g, r.holders(key))
			} else {
				t.Log("the offer failed:", describe(f))
			}
		}
		w.offer.Cancel()
		w.outcome.wait()
		_ = x.release(w.offer)
		w.stop()
		r.settle()
	})
}

// The timer of awaitOthers fires in the instant in which the offer is decided, and its function comes to run
// when the raise is under way: it asks by acquires, whose answers go to the round of the raise.
func TestNoNodeIsAskedDuringTheRaise(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		h, held := r.holdOn("h", 0, 1, 2)
		r.settleShort()
		r.setCounter(0, 5_000_000_000_000_000)
		x := r.client("x")
		w := x.offersAs("x-77")
		if _, f := w.poll(ms(500), true); f == nil {
			t.Fatal("won")
		}
		r.mem[0].SetDelay(ms(1)) // the raise takes a while
		r.mem[1].SetDelay(ms(1))
		r.mem[2].SetDelay(ms(1))
		a := h.beginRelease(held)
		for raising := false; !raising; {
			time.Sleep(10 * time.Microsecond)
			w.offer.mu.Lock()
			raising = w.offer.attempt != nil && w.offer.attempt.want == node.Renewed
			w.offer.mu.Unlock()
			if w.outcome.answered() {
				t.Skip("no raise")
			}
		}
		w.offer.askOthers() // as by the timer, that endLocked has not stopped any more
		a.wait()
		_, f := w.outcome.wait()
		if f != nil {
			t.Errorf("the raise has failed by the answers to acquires: %s", describe(f))
		}
		w.offer.mu.Lock()
		if w.offer.offer.asked != 0 {
			t.Error("askOthers has asked in the round of the raise")
		}
		w.offer.mu.Unlock()
		_ = x.release(w.offer)
		w.stop()
		r.settle()
	})
}

func (r *rig) settleShort() { time.Sleep(ms(10)); synctest.Wait() }

// A vote comes while the flight forgets the offer: Quorum.vote has found the lease, then Forget runs, then
// Lease.vote. The node's key is nobody's then, and is to be released.
func TestAVoteForAnOfferThatIsBeingForgotten(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		x := r.client("x")
		w := x.offersAs("x-77")
		r.give(key, "other-1", ttl, 0, 1, 2)
		if _, f := w.poll(ms(500), true); f == nil {
			t.Fatal("won")
		}
		r.give(key, w.offer.Owner(), ms(500), 0) // what a release has done
		l := x.q.offers.find(w.offer.Owner())    // Quorum.vote, on the goroutine that reads
		w.offer.Forget()                         // the flight's attempt has won
		l.vote(0, node.Vote{Owner: l.Owner(), Key: key, Token: 7, Poll: 1, Node: 0, Span: ms(500)})
		time.Sleep(ms(100))
		synctest.Wait()
		if got := r.holders(key)[0]; got == l.Owner() {
			t.Errorf("node 0 keeps %q, an offer that was forgotten", got)
		}
		w.outcome.done(Grant{}, nil) // none is promised
		w.stop()
		r.settle()
	})
}

// When the nodes are asked, each that is held gets the offer again: with the full ttl for its span. Nobody
// polls with that; a waiter that stands still then costs the others the ttl, not the span.
func TestAskingChangesNoOffer(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		h, held := r.holdOn("h", 0)
		h2, held2 := r.holdOn("g", 1, 2)
		x := r.client("x")
		w := x.offersAs("x-77")
		if _, f := w.poll(ms(100), true); f == nil {
			t.Fatal("won")
		}
		r.mem[2].SetDelay(ms(30)) // so that the offer is not decided yet
		if f := h.release(held); f != nil {
			t.Fatal(describe(f))
		}
		time.Sleep(ms(10))
		synctest.Wait()
		text, _ := r.mem[1].Mini.Get("flightlock:{offer}:x-77")
		t.Logf("node 1 has the offer %q", text)
		if text != "" && text[:2] == "0 " {
			t.Errorf("node 1 has poll 0's offer, which never counts and keeps the key for the ttl: %q", text)
		}
		_, _ = w.outcome.wait()
		w.stop()
		_ = h2.release(held2)
		r.settle()
	})
}

// A node that was asked has granted the offer by that acquire; no message came, and none will, about that
// grant. The lease is released there. Then the offer comes back by a late copy of a poll (its connection had
// died; a server that was stopped reads it), and a release grants it: this message is about an orphan.
func TestAnOrphanOnANodeThatWasAsked(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		r.give(key, "other-1", ttl, 1, 2)
		h, held := r.holdOn("h", 0)
		x := r.client("x")
		w := x.offersAs("x-77")
		if _, f := w.poll(ms(500), true); f == nil {
			t.Fatal("won")
		}
		r.mem[1].Mini.Del(key) // expired: no message
		r.mem[2].Mini.Del(key)
		if f := h.release(held); f != nil {
			t.Fatal(describe(f))
		}
		if _, f := w.outcome.wait(); f != nil {
			t.Fatal(describe(f))
		}
		if f := x.release(w.offer); f != nil {
			t.Fatal(describe(f))
		}
		r.settleShort()
		r.wantHolders(key, "", "", "")
		for i := range 3 {
			r.give(key, w.offer.Owner(), ms(900), i) // what a release has done with the late offer
			w.offer.vote(i, node.Vote{Owner: w.offer.Owner(), Key: key, Token: 7, Poll: 1, Node: i, Span: ms(500)})
		}
		time.Sleep(ms(100))
		synctest.Wait()
		for i, owner := range r.holders(key) {
			if owner != "" {
				t.Errorf("node %d keeps the orphan %q", i, owner)
			}
		}
		w.stop()
		r.settle()
	})
}
