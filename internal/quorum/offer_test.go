package quorum

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/jitter"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
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

// A node that was asked and says that it has granted the key already has a vote only if its message has said
// so too: else it may be a second name of another node. If the message was lost, that is undone.
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

// A node that was asked before its message came seems to be a second name of another one. When the message
// has come it is none, also if the offer was decided in between: the release counts it.
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

// A node whose message was lost has the key as well, for the full ttl after a refresh. If it cannot be
// reached when the lease is released, it is when it is back.
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

// Where the first vote decides there is nothing to wait for, and no timer, which would wake the process when
// it has nothing to do, even if it was stopped.
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

// Who may publish to an inbox, and hears what others publish there, cannot say that a node has granted what
// it has not: the number of a poll is another one at each node.
func TestAForgedMessageGrantsNothing(t *testing.T) {
	before := firstPoll
	firstPoll = func() uint32 { return uint32(jitter.N(1 << 32)) }
	defer func() { firstPoll = before }()
	inBubble(t, 3, func(t *testing.T, r *rig) {
		_, _, c, offer := r.offers(1)
		for i := range 3 {
			for poll := range 100 {
				c.vote(i, offer, poll, 1<<40)
			}
		}
		true0 := int(offer.l.offer.NumberAt(0, 1))
		c.vote(1, offer, true0, 1<<40)
		c.vote(2, offer, true0, 1<<40)
		synctest.Wait()
		if offer.answered() || offer.l.offer.voted && !offer.l.offer.votes[0].until.IsZero() {
			t.Error("a forged message counts")
		}
		r.setCounter(0, 1<<40)
		r.setCounter(1, 1<<40)
		c.vote(0, offer, true0, 1<<40)
		c.vote(1, offer, int(offer.l.offer.NumberAt(1, 1)), 1<<40)
		if _, f := offer.outcome(t); f != nil {
			t.Error(describe(f))
		}
	})
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

// Between two votes the machine sleeps, or the wall clock is set forward. The lease has the least validity of
// its votes by either clock: also if that of a later poll, with a shorter span, ends first by the monotonic
// one.
func TestAGrantIsValidForTheLeastOfItsVotesByEitherClock(t *testing.T) {
	for slept, want := range map[time.Duration]time.Duration{40 * time.Second: 0,
		15 * time.Second: 5 * time.Second} {
		t.Run(slept.String(), func(t *testing.T) {
			r := slowRig(t, 3)
			c := newPatientClient(t, "x", r.conns(), time.Minute)
			defer clocks.Reset()
			offer := c.offerFor(time.Hour, "w-1", 1)
			c.q.rtt.Store(int64(time.Hour)) // nobody is asked
			polled := func(span time.Duration) {
				offer.l.mu.Lock()
				defer offer.l.mu.Unlock()
				offer.l.pollLocked(poll{begun: clock.Now(), span: span})
			}
			polled(20 * time.Second)
			c.voteFor(20*time.Second, 0, offer, 1, 1<<40)
			clocks.Sleep(slept)
			polled(10 * time.Second)
			c.voteFor(10*time.Second, 1, offer, 2, 1<<40)
			switch g, f := offer.wait(); {
			case f == nil && clock.Left(clock.Now(), g.Until) > want:
				t.Errorf("valid for %v, but a vote is for %v at most", clock.Left(clock.Now(), g.Until), want)
			case f == nil:
				c.release(offer.l)
			case want > 0:
				t.Error(describe(f))
			}
		})
	}
}

// A contender polls several times in a second, and tens of thousands of keys may be waited for: an offer
// remembers when its polls were sent, and not the attempts that they were.
func TestAnOfferKeepsNoAttemptButTheLast(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		h, held, c, offer := r.offers(4)
		c.pollsAreForgotten(offer, maxPolls-1)
		offer.l.Withdraw()
		h.release(held)
		time.Sleep(ms(50)) // until all is answered, in the bubble's time
	})
}

// While too few nodes have a vote, polls are not sent, for minutes maybe, and the subscriptions continue: an
// offer does not keep those attempts either.
func TestAnOfferKeepsNoAttemptThatWasNotSent(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("c")
		c.guard(time.Minute)
		c.tryAndRelease(key, ttl)
		offer := c.offerFor(ttl, "w-1", 4)
		r.mostForget(c)
		if c.q.withoutVotes() == nil {
			t.Fatal("attempts are sent")
		}
		c.pollsAreForgotten(offer, maxPolls)
		offer.l.Withdraw()
		time.Sleep(ms(50)) // until all is answered, in the bubble's time
	})
}

// pollsAreForgotten polls for the offer maxPolls times, and checks that nobody keeps the first attempts.
func (c *client) pollsAreForgotten(offer *call, first int) {
	c.t.Helper()
	var polled []weak.Pointer[Lease]
	for range maxPolls {
		c.pollFor(span, "w-1", offer)
		c.mu.Lock()
		last := len(c.calls) - 1
		polled = append(polled, weak.Make(c.calls[last].l))
		c.calls[last] = nil // the test itself has kept it
		c.calls = c.calls[:last]
		c.mu.Unlock()
	}
	runtime.GC()
	for i, p := range polled[:first] {
		if p.Value() != nil {
			c.t.Errorf("the attempt of poll %d is still there", i)
		}
	}
	runtime.KeepAlive(offer)
}

// Node 0 grants b's offer, b's key expires there, and a's attempt gets the node's vote. Then the node is set
// back to before the grant (an append-only file that lacks the last second, or a replica that lagged): it has
// b's offer again, and the release of somebody else grants it a second time. b's client knows nothing of
// that. b's lease must not last by this node's word while a's attempt is under way.
func TestAnOfferIsNotGrantedByANodeThatWasSetBack(t *testing.T) {
	t.Parallel()
	// the machine was so busy that b's offer or lease was over before that
	for !grantedByANodeThatWasSetBack(t) {
	}
}

func grantedByANodeThatWasSetBack(t *testing.T) (inTime bool) {
	const span, long = 3 * time.Second, 8 * time.Second
	var servers []*redistest.Server
	conns, proxies := map[string][]redis.UniversalClient{}, map[string][]*redistest.Proxy{}
	for range 3 {
		s := redistest.StartServer(t, "--appendonly", "yes", "--appendfsync", "always")
		servers = append(servers, s)
		for _, name := range []string{"a", "b", "c", "x"} {
			p := redistest.StartProxy(t, s.Addr())
			conns[name] = append(conns[name], s.Client(t, func(o *redis.Options) { o.Addr = p.Addr() }))
			proxies[name] = append(proxies[name], p)
		}
	}
	client := func(name string) *client {
		c := newPatientClient(t, name, conns[name], patience)
		c.guard(time.Minute)
		c.nodeTimeout(patience)
		l, _ := c.must("lock:other", time.Minute, 1)
		c.release(l)
		return c
	}
	a, b, c, x := client("a"), client("b"), client("c"), client("x")
	has := func(i int, owner string) func() bool {
		return func() bool { return servers[i].Do(t, "GET", key) == owner }
	}
	free := func(i int) func() bool { return func() bool { return servers[i].Do(t, "EXISTS", key) == int64(0) } }
	listens := func(i int) func() bool {
		return func() bool { return len(servers[i].Do(t, "PUBSUB", "CHANNELS", "flightlock:inbox:*").([]any)) > 0 }
	}

	// x holds the key, and b waits for it with an offer.
	first := new(Lease)
	x.q.Prepare(first, key, time.Minute, 1, "x-7")
	acquire := x.newCall("acquire", first)
	first.Acquire(false, acquire)
	if _, f := acquire.wait(); f != nil {
		t.Fatal(describe(f))
	}
	t.Cleanup(b.q.Watch(key, "b-77", func(Event) {}))
	for i := range servers {
		redistest.Eventually(t, patience, "x has the key everywhere", has(i, first.Owner()))
		redistest.Eventually(t, patience, "b is subscribed", listens(i))
	}
	offer := b.newCall("offer", new(Lease))
	b.q.Offer(offer.l, key, long, 1, "b-77", offer)
	poll := new(Lease)
	b.q.Prepare(poll, key, long, 1, "b-77")
	poll.Carry(offer.l, span, true)
	asked := b.newCall("acquire", poll)
	poll.Acquire(false, asked)
	if _, f := asked.wait(); f == nil {
		t.Fatal("won")
	}
	redistest.Eventually(t, patience, "node 0 has b's offer", func() bool {
		for _, k := range servers[0].Keys(t) {
			if strings.Contains(k, ":offers:") {
				return servers[0].Do(t, "HEXISTS", k, "b-77") == int64(1)
			}
		}
		return false
	})
	saved, err := servers[0].SaveAppendOnly()
	if err != nil {
		t.Fatal(err)
	}

	// x's release grants b's offer on nodes 0 and 1. However far apart their messages are on a busy machine, b
	// waits for both: if it asked node 1, that would look like a second name of node 0.
	b.q.rtt.Store(int64(patience))
	servers[2].Do(t, "SET", key, "other", "PX", 60000)
	x.release(first)
	for began := time.Now(); !offer.answered(); time.Sleep(ms(2)) {
		if time.Since(began) > 2*span {
			offer.l.Cancel()
			offer.wait()
			return false
		}
	}
	granted := time.Now()
	if _, f := offer.wait(); f != nil {
		t.Fatal(describe(f))
	}
	lease := offer.l
	servers[2].Do(t, "DEL", key)
	if _, f := b.refresh(lease, long, 0); f != nil {
		if time.Since(granted) > span/2 {
			b.release(lease)
			return false
		}
		t.Fatal(describe(f))
	}
	redistest.Eventually(t, patience, "node 2 has b's key", has(2, lease.Owner()))
	redistest.Eventually(t, patience, "node 0 has refreshed it", func() bool {
		return servers[0].Do(t, "PTTL", key).(int64) > span.Milliseconds()
	})
	servers[0].Do(t, "DEL", key) // as if the refresh had not come there, and the grant had ended
	proxies["a"][1].HoldRequests()
	attempt := a.begin(key, time.Minute, 1)
	redistest.Eventually(t, patience, "node 0 has granted it to a", has(0, attempt.l.Owner()))

	if err := servers[0].RestartFrom(saved); err != nil {
		t.Fatal(err)
	}
	servers[0].Do(t, "DEL", key) // x's, as if its ttl had ended
	redistest.Eventually(t, patience, "b is subscribed again", listens(0))
	redistest.Eventually(t, patience, "b may ask node 0 again",
		func() bool { return !b.nodes[0].Server().Suspended() })
	known := b.nodes[0].Epoch()

	// c gets that node's vote, gives up, and passes the key on.
	proxies["c"][1].HoldRequests()
	proxies["c"][2].HoldRequests()
	other := new(Lease)
	c.q.Prepare(other, key, time.Minute, 1, "c-9")
	given := c.newCall("acquire", other)
	other.Acquire(false, given)
	redistest.Eventually(t, patience, "node 0 has granted it to c", has(0, other.Owner()))
	other.Cancel()
	given.wait()
	redistest.Eventually(t, patience, "c's key is gone from node 0",
		func() bool { return !has(0, other.Owner())() })
	proxies["c"][1].ReleaseRequests()
	proxies["c"][2].ReleaseRequests()

	if e := b.nodes[0].Epoch(); e.Name != known.Name || e.State != known.State { // it may have booted again
		t.Errorf("b knows of epoch %+v, after %+v", e, known)
	}
	inTime = time.Since(granted) < long/2
	proxies["b"][1].HoldRequests()
	if has(0, lease.Owner())() { // else it has no answer but node 2's
		if _, f := b.refresh(lease, long, 0); f == nil {
			t.Error("the node that was set back has confirmed a refresh")
		}
	}
	redistest.Eventually(t, patience, "b's key is gone from node 1", free(1))
	proxies["a"][1].ReleaseRequests()
	g, f := attempt.wait()
	lease.mu.Lock()
	if now := time.Now(); f == nil && lease.phase == held && now.Before(lease.until) {
		t.Errorf("a holds the key until %v, and b does until %v", g.Until, lease.until)
	}
	lease.mu.Unlock()
	proxies["b"][1].ReleaseRequests()
	b.release(lease)
	if f == nil {
		a.release(attempt.l)
	}
	return inTime
}

// Whatever happens to the nodes while a release grants the key to an offer, and while that lease is refreshed
// and released: when all nodes are back, the key is soon gone from all of them, long before its ttl has
// ended.
func TestGrantsLeaveNothing(t *testing.T) {
	t.Parallel()
	for seed := range uint64(100) {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 0))
			inBubble(t, 3+2*rng.IntN(2), func(t *testing.T, r *rig) { grantAndFail(t, r, rng) })
		})
	}
}

func grantAndFail(t *testing.T, r *rig, rng *rand.Rand) {
	upTo := func(most int) time.Duration { return time.Duration(rng.Int64N(int64(ms(most)) + 1)) }
	holder, held, c, offer := r.offers(1)
	for _, m := range r.mem {
		m.SetDelay(upTo(10))
	}
	for range 1 + rng.IntN(4) {
		m, what, at, lasts := r.mem[rng.IntN(len(r.mem))], rng.IntN(3), upTo(150), upTo(400)
		go func() {
			time.Sleep(at)
			switch what {
			case 0:
				m.Cut()
			case 1:
				m.Down(true)
				time.Sleep(lasts)
				m.Down(false)
			case 2:
				m.Stall(true)
				time.Sleep(lasts)
				m.Stall(false)
			}
		}()
	}
	time.Sleep(upTo(50))
	if rng.IntN(2) == 0 {
		holder.release(held)
	} else { // messages are lost, or late
		r.unwanted()
		r.loses(key)
		spread := rng.IntN(4) // if it is larger than what messages are waited for, the other nodes are asked
		for i := range r.mem {
			r.give(key, offer.l.Owner(), span, i)
			if rng.IntN(3) != 0 {
				at := upTo(spread)
				go func() {
					time.Sleep(at)
					c.vote(i, offer, 1, 1<<40)
				}()
			}
		}
		holder.release(held)
	}
	time.Sleep(upTo(50))
	synctest.Wait()
	if offer.answered() {
		if _, f := offer.wait(); f == nil {
			for range rng.IntN(3) {
				c.refresh(offer.l, time.Minute, 0)
				time.Sleep(upTo(30))
			}
			c.release(offer.l)
		}
	} else {
		offer.l.Cancel()
		if _, f := offer.wait(); f == nil {
			c.release(offer.l)
		}
	}
	time.Sleep(time.Second)
	r.delays(make([]time.Duration, len(r.mem))...)
	r.wantNoKey(key)
	for i, n := range append(append([]*node.Node(nil), c.nodes...), holder.nodes...) {
		if d := n.Debts(); d != 0 {
			t.Errorf("node %d: %d debts", i, d)
		}
	}
}
