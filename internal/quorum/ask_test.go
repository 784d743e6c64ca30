package quorum

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/node"
)

// Where no message arrives, the node gets an acquire by the same owner, and grants what is free
// there.
func TestANodeWhoseMessageDoesNotComeIsAsked(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		_, _, c, offer := r.offers(1)
		r.setCounter(0, 1<<40)
		r.setCounter(1, 1<<40-1)
		r.unwanted()
		r.mem[1].Mini.Del(key)
		r.give(key, offer.l.Owner(), span, 0)
		polled := offer.l.offer.polls[0].target.Begun()
		c.vote(0, offer, 1, 1<<40)
		time.Sleep(ms(20))
		if !offer.answered() {
			t.Error("no outcome after 20ms")
		}
		g, f := offer.outcome(t)
		if f != nil || !g.Until.Equal(polled.Add(c.q.Validity(span))) {
			t.Errorf("valid until %v after the poll, %s", g.Until.Sub(polled), describe(f))
		}
		c.release(offer.l)
		time.Sleep(ms(20))
		if h := r.holders(key); h[0] != "" || h[1] != "" {
			t.Errorf("%q", h)
		}
	})
}

// A node that was asked because its message about a grant is lost, and that says so late, or just before the
// vote that decides, is no second name of another one: it confirms the refreshes of the lease, as any node
// does.
func TestANodeThatWasAskedInVainConfirmsRefreshes(t *testing.T) {
	for _, late := range []bool{false, true} {
		t.Run(fmt.Sprint("late=", late), func(t *testing.T) {
			inBubble(t, 3, func(t *testing.T, r *rig) {
				_, _, c, offer := r.offers(1)
				r.unwanted()
				r.loses(key)
				for i := range r.mem {
					r.give(key, offer.l.Owner(), span, i)
				}
				r.mem[1].SetDelay(ms(10))
				if late {
					r.mem[2].SetDelay(ms(5))
				}
				c.vote(0, offer, 1, 1<<40)
				time.Sleep(ms(6)) // the others are asked; the message of node 2 is lost
				synctest.Wait()
				c.vote(1, offer, 1, 1<<40)
				if _, f := offer.outcome(t); f != nil {
					t.Fatal(describe(f))
				}
				r.delays(0, 0, 0)
				time.Sleep(ms(100))
				r.mem[1].Down(true)
				if _, f := c.refresh(offer.l, ttl, 0); f != nil {
					t.Errorf("two of three nodes have the key: %s", describe(f))
				}
				r.mem[1].Down(false)
				c.release(offer.l)
				r.settle()
			})
		})
	}
}

// A node that was asked, and has voted by message meanwhile, answers later: that is no answer to the release,
// which may have begun by then.
func TestAnAnswerAfterTheVoteIsNoneToTheRelease(t *testing.T) {
	inBubble(t, 5, func(t *testing.T, r *rig) {
		holder, held, c, offer := r.offers(1)
		r.delays(0, 0, ms(20), ms(10), ms(10))
		done := holder.beginRelease(held)
		time.Sleep(ms(5))             // two have granted, and the others are asked
		for _, m := range r.mem[3:] { // they answer nothing any more
			m.Down(true)
		}
		_, f := offer.wait() // the message of the third has come, and its answer has not
		if f != nil {
			t.Fatal(describe(f))
		}
		if f := c.release(offer.l); f != nil {
			t.Error(describe(f))
		}
		for _, m := range r.mem[3:] {
			m.Down(false)
		}
		done.wait()
		r.settle()
		r.wantNoKey(key)
	})
}

// A vote that comes by message at the moment when the node's answer is taken stays one, and the node has
// answered once.
func TestAVoteThatComesWithTheAnswer(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		_, _, c, offer := r.offers(1)
		attempt := offer.l.attempt
		var both sync.WaitGroup
		c.q.mu.Lock() // a report of a duplicate waits for it
		for _, comes := range []func(){
			func() { attempt.Answer(1, node.Reply{Kind: node.Replayed}) }, func() { c.vote(1, offer, 1, 1<<40) },
		} {
			both.Go(comes)
			for range 1000 {
				runtime.Gosched()
			}
		}
		c.q.mu.Unlock()
		both.Wait()
		offer.l.mu.Lock()
		if got := attempt.replies[1].Kind; got != node.Granted || attempt.pending != 2 {
			t.Errorf("the vote is %v, and %d nodes are to answer", got, attempt.pending)
		}
		offer.l.mu.Unlock()
		offer.l.Cancel()
		r.settle()
	})
}

// A vote whose validity is over is none; the node is asked, and its answer is a vote from then on. One whose
// poll nobody knows is none either, and nor is that answer: anybody may have published it.
func TestAVoteThatIsOverIsAskedForAgain(t *testing.T) {
	for name, poll := range map[string]int{"over": 1, "unknown": 7} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, 3, func(t *testing.T, r *rig) {
				_, _, c, offer := r.offers(1)
				if name == "over" {
					time.Sleep(span)
				}
				for i := range 2 {
					r.setCounter(i, 1<<40)
				}
				r.give(key, offer.l.Owner(), ms(800), 0, 1)
				c.vote(0, offer, poll, 1<<40)
				c.vote(1, offer, poll, 1<<40)
				if offer.answered() {
					t.Fatal("won by votes that are over")
				}
				if name == "unknown" {
					if _, f := offer.wait(); f == nil {
						t.Error("won by votes that nobody knows")
					}
					time.Sleep(ms(20))
					return
				}
				g, f := offer.outcome(t)
				begun := offer.l.target.Begun()
				if f != nil || g.Span != 0 || !g.Until.Equal(begun.Add(c.q.Validity(ttl))) {
					t.Errorf("%+v, %s", g, describe(f))
				}
				c.release(offer.l)
				time.Sleep(ms(20))
			})
		})
	}
}

// A vote whose message comes more than a second after its poll is asked for again, even if it is valid: its
// node may have been replaced, and be back, since.
func TestAnOldVoteIsAskedForAgain(t *testing.T) {
	const ttl, span = 3 * time.Second, 2 * time.Second
	for _, late := range []bool{false, true} {
		inBubble(t, 3, func(t *testing.T, r *rig) {
			holder, c := r.client("h"), r.client("w")
			r.warm(holder, key)
			r.everywhere()
			holder.mustAs("h-100")
			c.listens("w-1")
			offer := c.offerFor(ttl, "w-1", 1)
			c.poll("w-1", offer)
			polled, _ := c.pollFor(span, "w-1", offer)
			old := polled.Add(MaxVoteAge)
			if !late {
				old = old.Add(-1)
			}
			time.Sleep(time.Until(old)) // the bubble's time
			for i := range 2 {
				r.setCounter(i, 1<<40)
			}
			r.give(key, offer.l.Owner(), time.Until(polled.Add(span)), 0, 1)
			c.voteFor(span, 0, offer, 2, 1<<40)
			c.voteFor(span, 1, offer, 2, 1<<40)
			if offer.answered() == late {
				t.Fatalf("late: %v, answered: %v", late, offer.answered())
			}
			g, f := offer.outcome(t)
			until := polled.Add(c.q.Validity(span))
			if late {
				until = offer.l.target.Begun().Add(c.q.Validity(ttl))
			}
			if f != nil || !g.Until.Equal(until) {
				t.Errorf("late: %v: %+v, want until %v; %s", late, g, until, describe(f))
			}
			c.release(offer.l)
			time.Sleep(ms(20)) // until the third node has answered, in the bubble's time
		})
	}
}

// One release grants wherever its owner has the key: nobody is asked before its messages had time to come.
func TestNodesAreNotAskedAtOnce(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		h, held := r.holdOn("h", 0, 1)
		x := r.client("x")
		w := x.offersAs("x-77")
		if _, f := w.poll(span, true); f == nil {
			t.Fatal("won")
		}
		r.settleShort()
		before := x.commands(nil)
		r.mem[1].SetDelay(minAwait / 4)
		if f := h.release(held); f != nil {
			t.Fatal(describe(f))
		}
		if _, f := w.outcome.wait(); f != nil {
			t.Fatal(describe(f))
		}
		if sent := x.commands(before); slices.Max(sent) != 0 {
			t.Errorf("commands: %d", sent)
		}
		r.mem[1].SetDelay(0)
		w.ends(r)
	})
}

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
	w.stop = c.q.Watch(key, contender, func(Event) {})
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
	c.q.Prepare(l, key, ttl, 1, name+"-7")
	a := c.newCall("acquire", l)
	l.Acquire(false, a)
	if _, f := a.wait(); f != nil {
		r.t.Fatal(describe(f))
	}
	return c, l
}

// S14: two nodes that are the same server have one vote, also for an offer. Servers 1 and 2 are another's: a
// majority of the right set. The waiter has server 0 twice. One release, on server 0, must not make a
// majority.
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
				t.Errorf("VIOLATION of S14: one server has voted twice for the offer: %+v; the servers have %q", g,
					r.holders(key))
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
		before := x.commands(nil)
		w.offer.askOthers() // as by the timer, that endLocked has not stopped any more
		if sent := x.commands(before); slices.Max(sent) != 0 {
			t.Errorf("askOthers has asked in the round of the raise: %d", sent)
		}
		a.wait()
		_, f := w.outcome.wait()
		if f != nil {
			t.Errorf("the raise has failed by the answers to acquires: %s", describe(f))
		}
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
		text := r.offerOn(1, "x-77")
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
