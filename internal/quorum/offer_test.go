package quorum

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/node"
)

// span is how long the offers of these tests are granted for.
const span = 500 * time.Millisecond

// offer makes an offer of contender, for a block of tokens.
func (c *client) offer(contender string, tokens int64) *call {
	return c.offerFor(ttl, contender, tokens)
}

func (c *client) offerFor(ttl time.Duration, contender string, tokens int64) *call {
	l := new(Lease)
	a := c.newCall("offer", l)
	c.q.Offer(l, key, ttl, tokens, contender, a)
	return a
}

// poll makes an attempt that brings the offer, and waits for its failure.
func (c *client) poll(contender string, offer *call) (at time.Time, f *Failure) {
	c.t.Helper()
	return c.pollFor(span, contender, offer)
}

func (c *client) pollFor(span time.Duration, contender string, offer *call) (at time.Time, f *Failure) {
	c.t.Helper()
	l := new(Lease)
	c.q.Prepare(l, key, ttl, 1, contender)
	l.Carry(offer.l, span, true)
	a := c.newCall("acquire", l)
	at = time.Now()
	l.Acquire(false, a)
	_, f = a.wait()
	synctest.Wait()
	return at, f
}

// offers is a client that waits as contender w-1, subscribed on all nodes, with an offer that it has
// brought to them, for a key that is held by the lease of another client.
func (r *rig) offers(tokens int64) (holder *client, held *Lease, c *client, offer *call) {
	r.t.Helper()
	holder, c = r.client("h"), r.client("w")
	r.warm(holder, key)
	r.everywhere()
	held = holder.mustAs("h-100")
	c.listens("w-1")
	offer = c.offer("w-1", tokens)
	if _, f := c.poll("w-1", offer); f == nil || !f.Queued {
		r.t.Fatal(describe(f))
	}
	return holder, held, c, offer
}

// outcome is that of an offer, which has to come soon.
func (a *call) outcome(t *testing.T) (Grant, *Failure) {
	t.Helper()
	if time.Sleep(ms(100)); !a.answered() {
		t.Fatal("no outcome")
	}
	return a.wait()
}

// unwanted removes the want, as a grant would.
func (r *rig) unwanted() {
	for _, m := range r.mem {
		for _, k := range m.Mini.Keys() {
			if strings.Contains(k, ":wants:") {
				m.Mini.Del(k)
			}
		}
	}
}

// vote delivers the message of node i about a grant of the offer by its poll of that number.
func (c *client) vote(i int, offer *call, poll int, token int64) {
	c.voteFor(span, i, offer, poll, token)
}

func (c *client) voteFor(span time.Duration, i int, offer *call, poll int, token int64) {
	c.q.vote(i, fmt.Sprintf("1 grant %d - 0 0 %d %d %d %d %d %s%s",
		token, len(offer.l.Owner()), poll, i, span.Milliseconds(), offer.l.offer.Tokens, offer.l.Owner(), key))
}

// A release makes the lease the next contender's, without a request of that: on all nodes, with
// tokens above those of the earlier lease, for the span from the poll on.
func TestAGrantNeedsNoRequest(t *testing.T) {
	overSizes(t, func(t *testing.T, r *rig) {
		holder, held, c, offer := r.offers(4)
		before := c.commands(nil)
		top := held.top
		polled := offer.l.offer.polls[0].target.Begun()
		time.Sleep(ms(20))
		holder.release(held)
		g, f := offer.outcome(t)
		if f != nil {
			t.Fatal(describe(f))
		}
		if want := polled.Add(c.q.Validity(span)); !g.Until.Equal(want) {
			t.Errorf("valid until %v after the poll, want %v", g.Until.Sub(polled), want.Sub(polled))
		}
		if g.Span != span || g.First <= top || g.Last != g.First+3 {
			t.Errorf("%+v, after %d", g, top)
		}
		synctest.Wait()
		r.wantHolders(key, all(len(r.mem), offer.l.Owner())...)
		if sent := c.commands(before); slices.Max(sent) != 0 {
			t.Errorf("%d requests", sent)
		}
		g, f = c.refresh(offer.l, ttl, 0) // the full ttl
		if f != nil || !g.Until.Equal(time.Now().Add(-ms(2)).Add(c.q.Validity(ttl))) {
			t.Errorf("refreshed until %v, %s", time.Until(g.Until), describe(f))
		}
		if f := c.release(offer.l); f != nil {
			t.Error(describe(f))
		}
		time.Sleep(ms(20))
		r.wantNoKey(key)
	})
}

// Where a hundred others wait, one node's vote is enough to know.
func TestAGrantTellsOfACrowd(t *testing.T) {
	for crowd := range 2 {
		inBubble(t, 3, func(t *testing.T, r *rig) {
			_, _, c, offer := r.offers(1)
			for i, says := range []int{0, crowd} {
				r.setCounter(i, 1<<40)
				c.q.vote(i, fmt.Sprintf("1 grant %d - %d 0 %d 1 %d 500 1 %s%s", 1<<40, says, len(offer.l.Owner()), i,
					offer.l.Owner(), key))
			}
			if g, f := offer.outcome(t); f != nil || g.Crowd != (crowd > 0) {
				t.Errorf("crowd %d: %+v, %s", crowd, g, describe(f))
			}
			c.release(offer.l)
			time.Sleep(ms(20)) // until the third node has answered, in the bubble's time
		})
	}
}

// The answers to a poll tell of a crowd, too.
func TestAPollIsToldOfACrowd(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		_, _, c, offer := r.offers(1)
		for i := range 100 {
			if _, f := c.poll("w-1", offer); f.Crowd {
				t.Fatalf("%d others are a crowd", i)
			}
			for node := range r.mem {
				r.want(node, fmt.Sprintf("y-%d", i), 1e16+float64(i))
			}
		}
		if _, f := c.poll("w-1", offer); !f.Crowd {
			t.Error("100 others are none")
		}
		offer.l.Withdraw()
		offer.wait()
	})
}

// The lease is valid for the least of its votes: here one of the first poll, and one of the second.
func TestAGrantIsValidForTheLeastOfItsVotes(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		_, _, c, offer := r.offers(1)
		first := offer.l.offer.polls[0].target.Begun()
		time.Sleep(ms(200))
		c.poll("w-1", offer)
		c.vote(0, offer, 2, 1<<40)
		c.vote(1, offer, 1, 1<<40)
		g, f := offer.outcome(t)
		if f != nil || !g.Until.Equal(first.Add(c.q.Validity(span))) {
			t.Errorf("valid until %v after the first poll, %s", g.Until.Sub(first), describe(f))
		}
		c.release(offer.l)
		time.Sleep(ms(20))
	})
}

// Votes that differ are raised to the largest, by a majority that has the key.
func TestUnequalGrantsAreRaised(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		holder, held, c, offer := r.offers(4)
		top := held.top
		r.setCounter(1, top+100)
		holder.release(held)
		g, f := offer.outcome(t)
		if f != nil || g.Last != top+104 && g.Last != top+4 || g.Span != span {
			t.Errorf("%+v after %d, %s", g, top, describe(f))
		}
		n := 0
		for i := range 3 {
			if r.counter(i) >= g.Last {
				n++
			}
		}
		if n < 2 {
			t.Errorf("%d nodes have a counter of %d", n, g.Last)
		}
		c.release(offer.l)
		time.Sleep(ms(20))
	})
}

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

// A node that was asked and says that it has granted the key already has a vote only if its message has said so
// too: else it may be a second name of another node. If the message was lost, that is undone.
func TestAGrantWithoutAMessageIsNoVote(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		_, _, c, offer := r.offers(1)
		r.unwanted()
		r.loses(key)
		r.give(key, offer.l.Owner(), span, 0, 1)
		r.give(key, "other-1", time.Minute, 2)
		c.vote(0, offer, 1, 1<<40)
		if g, f := offer.outcome(t); f == nil {
			t.Errorf("%+v", g)
		}
		time.Sleep(ms(20))
		r.wantHolders(key, "", "", "other-1")
	})
}

// A node that was asked before its message came seems to be a second name of another one. When the message has come
// it is none, also if the offer was decided in between: the release counts it.
func TestTheReleaseCountsANodeWhoseMessageCameLate(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		_, _, c, offer := r.offers(1)
		r.unwanted()
		r.loses(key)
		r.give(key, offer.l.Owner(), span, 0, 1, 2)
		r.mem[2].SetDelay(ms(20))
		c.vote(1, offer, 1, 1<<40)
		time.Sleep(ms(10)) // nodes 0 and 2 were asked, and 0 has answered
		c.vote(2, offer, 1, 1<<40)
		if _, f := offer.outcome(t); f != nil {
			t.Fatal(describe(f))
		}
		if offer.l.offer.asked&1 == 0 {
			t.Error("node 0 was not asked")
		}
		c.vote(0, offer, 1, 1<<40)
		r.mem[1].Down(true)
		if f := c.release(offer.l); f != nil {
			t.Error(describe(f))
		}
		r.mem[1].Down(false)
		r.settle()
		r.wantNoKey(key)
	})
}

// A node that was asked because its message about a grant is lost, and that says so late, or just before the vote
// that decides, is no second name of another one: it confirms the refreshes of the lease, as any node does.
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

// A node whose message was lost has the key as well, for the full ttl after a refresh. If it cannot be reached when the
// lease is released, it is when it is back.
func TestAGrantWithoutAMessageIsReleasedAfterARefresh(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		_, _, c, offer := r.offers(1)
		r.unwanted()
		r.loses(key)
		r.give(key, offer.l.Owner(), span, 0, 1, 2)
		c.vote(0, offer, 1, 1<<40)
		c.vote(1, offer, 1, 1<<40)
		if _, f := offer.outcome(t); f != nil {
			t.Fatal(describe(f))
		}
		if _, f := c.refresh(offer.l, time.Minute, 0); f != nil {
			t.Fatal(describe(f))
		}
		synctest.Wait()
		r.mem[2].Down(true)
		if f := c.release(offer.l); f != nil {
			t.Error(describe(f))
		}
		time.Sleep(ms(500))
		r.mem[2].Down(false)
		r.wantNoKey(key)
	})
}

// A node that was asked, and has voted by message meanwhile, answers later: that is no answer to the release, which may
// have begun by then.
func TestAnAnswerAfterTheVoteIsNoneToTheRelease(t *testing.T) {
	inBubble(t, 5, func(t *testing.T, r *rig) {
		holder, held, c, offer := r.offers(1)
		r.delays(0, 0, ms(20), ms(10), ms(10))
		done := holder.beginRelease(held)
		time.Sleep(ms(5)) // two have granted, and the others are asked
		offer.l.mu.Lock()
		asked := offer.l.offer.asked
		offer.l.mu.Unlock()
		if asked != 0b11100 {
			t.Fatalf("asked %b", asked)
		}
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

// A vote whose validity is over, or whose poll nobody knows any more, is none; the node is asked, and its
// answer is a vote from then on.
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

// A vote whose message comes more than a second after its poll is asked for again, even if it is valid: its node may
// have been replaced, and be back, since.
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

// Where the first vote decides there is nothing to wait for, and no timer, which would wake the process when it has
// nothing to do, even if it was stopped.
func TestOneVoteThatDecidesSetsNoTimer(t *testing.T) {
	for _, nodes := range []int{1, 3} {
		inBubble(t, nodes, func(t *testing.T, r *rig) {
			_, _, c, offer := r.offers(1)
			c.vote(0, offer, 1, 1<<40)
			if has := offer.l.offer.timer != nil; has != (nodes > 1) {
				t.Errorf("%d nodes: a timer after the first vote: %v", nodes, has)
			}
			offer.l.Cancel()
			time.Sleep(ms(50))
		})
	}
}

// A message counts for the node that it says, and only when it comes from there: else there may be one server
// under two names, or one that is another's replica.
func TestAGrantCountsForItsOwnNodeOnly(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		_, _, c, offer := r.offers(1)
		text := fmt.Sprintf("1 grant 5 - 0 0 %d 1 2 500 1 %s%s", len(offer.l.Owner()), offer.l.Owner(), key)
		c.q.vote(0, text)
		c.q.vote(1, text)
		synctest.Wait()
		if offer.answered() || offer.l.offer.voted {
			t.Error("a message of another node counts")
		}
		c.vote(1, offer, 1, 1<<40)
		c.vote(1, offer, 1, 1<<40) // it came twice
		synctest.Wait()
		if offer.answered() {
			t.Error("a message that comes twice counts twice")
		}
		offer.l.Cancel()
		time.Sleep(ms(50))
	})
}

// A grant of a node counts if its release knew the node in the epoch that this client knows as kept.
func TestAGrantOfAnotherEpochIsNoVote(t *testing.T) {
	for epoch, counts := range map[string]bool{"of the node": true, "another": false, "-": false} {
		t.Run(epoch, func(t *testing.T) {
			inBubble(t, 3, func(t *testing.T, r *rig) {
				c := r.client("w")
				c.guard(time.Minute)
				r.warm(c, key)
				for i := range 3 { // others have it: nobody who is asked grants it
					r.give(key, "other-1", time.Minute, i)
				}
				offer := c.offer("w-1", 1)
				c.poll("w-1", offer)
				for i := range 3 {
					name := epoch
					if name == "of the node" {
						name = c.nodes[i].Epoch().Name
					}
					owner := offer.l.Owner()
					c.q.vote(i, fmt.Sprintf("1 grant 5 %s 0 0 %d 1 %d 500 1 %s%s", name, len(owner), i, owner, key))
				}
				if _, f := offer.outcome(t); (f == nil) != counts {
					t.Errorf("%s", describe(f))
				}
				if counts {
					c.release(offer.l)
				}
				time.Sleep(ms(50))
			})
		})
	}
}

// An offer whose votes are split is over on all nodes: it is undone, and its contender waits on without it.
func TestSplitGrantsAreUndone(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		_, _, c, offer := r.offers(1)
		r.loses(key)
		r.give(key, offer.l.Owner(), span, 0)
		r.give(key, "rival-1", time.Minute, 1, 2)
		c.vote(0, offer, 1, 5)
		_, f := offer.outcome(t)
		wantReason(t, f, Taken)
		time.Sleep(ms(20))
		r.wantHolders(key, "", "rival-1", "rival-1")
		for i := range 3 {
			if got := r.waiting(i); got != "w-1" {
				t.Errorf("%q wait on node %d", got, i)
			}
		}
		c.vote(1, offer, 1, 5) // late: it is nobody's
		c.vote(2, offer, 1, 5)
		time.Sleep(ms(20))
		r.wantHolders(key, "", "rival-1", "rival-1")
	})
}

// A grant whose message comes when the lease is over is released, and passed on; not one whose release has
// deleted it already.
func TestALateGrantIsReleased(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		_, _, c, offer := r.offers(1)
		r.loses(key)
		r.give(key, offer.l.Owner(), span, 0, 1)
		c.vote(0, offer, 1, 1<<40)
		c.vote(1, offer, 1, 1<<40)
		if _, f := offer.outcome(t); f != nil {
			t.Fatal(describe(f))
		}
		if f := c.release(offer.l); f != nil {
			t.Error(describe(f))
		}
		time.Sleep(ms(20))
		r.wantNoKey(key)
		before := c.commands(nil)
		r.give(key, offer.l.Owner(), span, 2) // a release of somebody was late there
		c.vote(2, offer, 1, 1<<40)
		time.Sleep(ms(20))
		r.wantNoKey(key)
		if sent := c.commands(before); !slices.Equal(sent, []uint64{0, 0, 1}) {
			t.Errorf("%d requests", sent)
		}
	})
}

// A grant to an owner that nobody here knows is released at once, and the key goes to the next.
func TestAGrantToNobodyIsPassedOn(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		_, _, c, offer := r.offers(1)
		r.loses(key)
		r.give(key, "w-99", span, 0, 1, 2)
		for i := range 3 {
			c.q.vote(i, fmt.Sprintf("9 grant 5 - 0 0 4 1 %d 500 1 w-99%s", i, key))
		}
		if _, f := offer.outcome(t); f != nil {
			t.Fatal(describe(f))
		}
		synctest.Wait()
		r.wantHolders(key, all(3, offer.l.Owner())...)
		c.release(offer.l)
		time.Sleep(ms(20))
	})
}

// If the node cannot be reached just then, it is asked for as long as the key may be there.
func TestAGrantToNobodyIsReturnedWhenTheNodeIsBack(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, r *rig) {
		c := r.client("w")
		r.warm(c, key)
		r.give(key, "w-99", time.Minute, 0)
		r.mem[0].Down(true)
		c.q.vote(0, fmt.Sprintf("9 grant 5 - 0 0 4 1 0 %d 1 w-99%s", time.Minute.Milliseconds(), key))
		time.Sleep(time.Second)
		r.mem[0].Down(false)
		r.wantNoKey(key)
	})
}

// An offer that is withdrawn takes its contender's wants with it, and passes on what was granted already.
func TestAnOfferThatIsWithdrawn(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		holder, held, c, offer := r.offers(1)
		offer.l.Cancel()
		if _, f := offer.outcome(t); f == nil {
			t.Fatal("won")
		}
		time.Sleep(ms(20))
		for i := range 3 {
			if got := r.waiting(i); got != "" {
				t.Errorf("%q wait on node %d", got, i)
			}
		}
		holder.release(held)
		time.Sleep(ms(20))
		r.wantNoKey(key)
		_ = c
	})
}

// An offer that is dropped, because an attempt has won, sends nothing, and what is granted to it
// later is passed on.
func TestAnOfferThatIsForgotten(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("w")
		r.warm(c, key)
		l := new(Lease)
		c.q.Offer(l, key, ttl, 1, "w-1", unanswered{t})
		before := c.commands(nil)
		l.Forget()
		l.Forget()
		r.give(key, l.Owner(), span, 1)
		c.q.vote(1, fmt.Sprintf("1 grant 5 - 0 0 %d 1 1 500 1 %s%s", len(l.Owner()), l.Owner(), key))
		time.Sleep(ms(20))
		r.wantNoKey(key)
		if sent := c.commands(before); !slices.Equal(sent, []uint64{0, 1, 0}) {
			t.Errorf("%d requests", sent)
		}
	})
}

// unanswered is an Acquirer that gets nothing.
type unanswered struct{ t *testing.T }

func (u unanswered) Acquired(Grant, *Failure) {
	u.t.Error("an offer that was forgotten has an outcome")
}

// Messages that are no votes change nothing.
func TestMessagesThatAreNoVotes(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, r *rig) {
		c := r.client("w")
		for _, text := range []string{
			"", "1", "1 grant", "1 grant ", "1 grant 5 - 0 0 4 1 0 500 1", "1 grant x - 0 0 4 1 0 500 1 w-99" + key,
			"1 grant 5 - 0 99 4 1 0 500 1 w-99" + key, "1 grant 5 - 0 0 99 1 0 500 1 w-99" + key,
			"1 grant -5 - 0 0 4 1 0 500 1 w-99" + key, "1 grant 5 - 0 0 0 1 0 500 1 w-99" + key,
			"1 grant 5 - 0 9223372036854775807 9223372036854775807 1 0 500 1 w-99" + key,
			"1 grant 5 - 0 0 4 1 0 9223372036854775807 1 w-99" + key, "1 grant 5 - 0 0 4 1 0 500 1 w-99",
		} {
			if v, ok := node.ParseVote(text); ok {
				t.Errorf("%q is a vote: %+v", text, v)
			}
			c.q.vote(0, text)
		}
		synctest.Wait()
		if sent := c.commands(nil); sent[0] != 0 {
			t.Errorf("%d requests", sent)
		}
	})
}

// A want of the contender may be on a node that has granted it the key: it was asked meanwhile. The release
// removes it, or the key would go to a contender that is gone.
func TestTheReleaseOfAGrantLeavesNoWant(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		_, _, c, offer := r.offers(1)
		r.loses(key)
		r.give(key, offer.l.Owner(), span, 0, 1)
		c.vote(0, offer, 1, 1<<40)
		c.vote(1, offer, 1, 1<<40)
		if _, f := offer.outcome(t); f != nil {
			t.Fatal(describe(f))
		}
		c.release(offer.l)
		time.Sleep(ms(20))
		r.wantNoKey(key)
		for i := range 3 {
			if got := r.waiting(i); got != "" {
				t.Errorf("%q wait on node %d", got, i)
			}
		}
	})
}

// Nodes of which no message will come are asked without waiting for one: here node 1, where the waiter's own attempt
// has had the key. Node 2 is asked only if that is not enough: there another has it. If the poll was a while ago,
// others may have had the key since, and the time for messages is awaited.
func TestANodeThatGrantsNothingIsAskedAtOnce(t *testing.T) {
	for _, ago := range []time.Duration{0, 2 * minAwait} {
		inBubble(t, 3, func(t *testing.T, r *rig) {
			x := r.client("x")
			r.warm(x, key)
			h, held := r.holdOn("h", 0)
			r.give(key, "other-1", ttl, 2)
			w := x.offersAs("x-77")
			l, f := w.poll(span, true)
			if f == nil {
				t.Fatal("won")
			}
			time.Sleep(ago)
			synctest.Wait()
			before, began := x.commands(nil), time.Now()
			if f := h.release(held); f != nil {
				t.Fatal(describe(f))
			}
			g, f := w.outcome.wait()
			if took := time.Since(began); f != nil || (took < minAwait) != (ago == 0) {
				t.Errorf("%v ago: after %v: %s", ago, took, describe(f))
			}
			if want := l.target.Begun().Add(x.q.Validity(span)); !g.Until.Equal(want) {
				t.Errorf("valid until %v after the poll, want %v", g.Until.Sub(l.target.Begun()), x.q.Validity(span))
			}
			r.wantHolders(key, w.offer.Owner(), w.offer.Owner(), "other-1")
			// Later it is asked with node 1, unless that has answered before the request to node 2 was written.
			if sent := x.commands(before); ago == 0 && sent[2] != 0 {
				t.Errorf("%v ago: commands: %d", ago, sent)
			}
			w.ends(r)
		})
	}
}

// One release grants wherever its owner has the key: while it may make a majority, nobody is asked.
func TestNodesThatMayGrantAreNotAskedAtOnce(t *testing.T) {
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

// While an attempt is in progress nobody is asked: its votes would stand in the way. It is when that has failed.
func TestNobodyIsAskedDuringAnAttempt(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		x := r.client("x")
		r.warm(x, key)
		h, held := r.holdOn("h", 0)
		r.give(key, "other-1", ttl, 2)
		w := x.offersAs("x-77")
		r.mem[2].SetDelay(minAwait / 4)
		l := new(Lease)
		x.q.Prepare(l, key, ttl, 1, w.contender)
		l.Carry(w.offer, span, true)
		a := x.newCall("acquire", l)
		l.Acquire(false, a)
		synctest.Wait()
		before, began := x.commands(nil), time.Now()
		if f := h.release(held); f != nil {
			t.Fatal(describe(f))
		}
		synctest.Wait()
		if sent := x.commands(before); slices.Max(sent) != 0 || a.answered() {
			t.Errorf("commands: %d", sent)
		}
		if _, f := a.wait(); f == nil { // and is undone
			t.Fatal("won")
		}
		if _, f := w.outcome.wait(); f != nil || time.Since(began) >= minAwait {
			t.Errorf("after %v: %s", time.Since(began), describe(f))
		}
		r.mem[2].SetDelay(0)
		w.ends(r)
	})
}
