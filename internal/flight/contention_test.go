package flight

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/quorum"
)

func deaf(c *Config) { c.Nodes.(*fakeNodes).watch = nil }

// wantHistory checks the requests to the world since the last check.
func (w *world) wantHistory(want ...string) {
	w.t.Helper()
	if got := w.history(); fmt.Sprint(got) != fmt.Sprint(want) {
		w.t.Errorf("the nodes were asked %q, want %q", got, want)
	}
}

// pass has time pass.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// hears makes a caller whose first attempt finds the key taken, and confirms its subscription. Its
// second attempt is then in progress.
func (w *world) hears(change ...func(*wish)) *caller {
	w.t.Helper()
	c := w.start(change...)
	w.attempt().taken(time.Hour)
	w.news(quorum.Subscribed)
	return c
}

// listens makes a caller that waits with no attempt in progress.
func (w *world) listens(change ...func(*wish)) *caller {
	w.t.Helper()
	c := w.hears(change...)
	w.attempt().taken(time.Hour)
	synctest.Wait()
	w.history()
	return c
}

// The flight subscribes when its first attempt has failed, as that attempt's owner. When the
// subscription is confirmed, it makes another attempt, which registers it among those that wait.
func TestListensAfterTheFirstLoss(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.start()
		w.wantHistory("acquire")
		w.attempt().taken(time.Hour)
		w.wantHistory("watch owner-1")
		w.news(quorum.Subscribed)
		w.wantHistory("acquire as owner-1")
		w.attempt().taken(time.Hour)
		w.wantHistory()
		w.news(quorum.Subscribed) // again, after a subscription was broken and made again
		w.wantHistory("acquire as owner-1")
		w.attempt().grant()
		c.holds()
		c.releases()
		w.wantHistory("release", "stop owner-1")
	})
}

// A caller that does not wait leaves no trace: one attempt.
func TestWhoDoesNotWaitDoesNotListen(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.start(pace(limited{}))
		w.attempt().taken(time.Hour)
		c.failed(0, errTaken)
		w.wantHistory("acquire")
	})
}

// The flight whose turn it is makes an attempt at once, whatever its strategy says.
func TestOursIsTriedAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.listens(pace(limited{time.Hour, 1}))
		for range 5 { // and however often it was in vain
			pass(time.Millisecond)
			w.news(quorum.OurTurn)
			w.wantHistory("acquire as owner-1")
			w.attempt().taken(time.Hour)
		}
		w.wantHistory()
		w.news(quorum.OurTurn)
		w.attempt().grant()
		c.holds()
		c.releases()
	})
}

// A notice that arrives while an attempt is in progress may have been sent after the nodes answered
// the attempt: it is repeated, once, if it fails.
func TestNewsDuringAnAttempt(t *testing.T) {
	for _, n := range []quorum.Event{quorum.Subscribed, quorum.Unsubscribed, quorum.OurTurn} {
		inBubble(t, func(t *testing.T, w *world) {
			w.byHand()
			c := w.listens()
			w.news(quorum.OurTurn)
			w.news(n)
			w.news(n)
			w.wantHistory("acquire as owner-1")
			w.attempt().taken(time.Hour)
			w.wantHistory("acquire as owner-1")
			w.attempt().taken(time.Hour)
			w.wantHistory()
			w.news(n) // and it is no news for the attempt after that
			w.attempt().grant()
			c.holds()
			c.releases()
			w.wantHistory("acquire as owner-1", "release", "stop owner-1")
		})
	}
}

// A caller that leaves during the attempt after that gets the outcome of the previous one.
func TestOutcomeOfAnAttemptThatIsMadeAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.listens()
		w.news(quorum.OurTurn)
		w.news(quorum.OurTurn)
		w.attempt().unavailable()
		c.leaves()
		c.failed(0, context.Canceled, errDown)
	})
}

// An event during an attempt that wins has no effect.
func TestNewsDuringAnAttemptThatWins(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.listens()
		w.news(quorum.OurTurn)
		w.news(quorum.OurTurn)
		w.attempt().grantBlock(100)
		c.holds()
		w.news(quorum.OurTurn)
		w.news(quorum.OtherTurn)
		w.news(quorum.Unsubscribed)
		w.news(quorum.Subscribed)
		d := w.start()
		c.releases()
		d.holds()
		d.releases()
		w.wantHistory("acquire as owner-1", "release")
	}, func(c *Config) { c.Slice = time.Hour })
}

// When another's turn is notified, the next attempt is made when that must be over.
func TestTheirsIsWaitedFor(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.listens()
		pass(30 * time.Millisecond)
		w.news(quorum.OtherTurn)
		pass(turn + minDelay - 1)
		w.wantHistory()
		pass(1)
		w.wantHistory("acquire as owner-1")
		w.attempt().grant()
		c.holds()
		c.releases()
	})
}

// The same if the notice arrives while an attempt is in progress, which may have found the key with
// the previous holder. If that turn is not taken, no other notice will come.
func TestTheirsDuringAnAttempt(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.listens()
		w.news(quorum.OurTurn)
		w.news(quorum.OtherTurn)
		w.wantHistory("acquire as owner-1")
		w.attempt().taken(time.Hour)
		pass(turn + minDelay - 1)
		w.wantHistory()
		pass(1)
		w.wantHistory("acquire as owner-1")
		w.attempt().taken(time.Hour)
		pass(2 * turn) // that was then
		w.wantHistory()
		c.leaves()
	})
}

// A flight that is not subscribed makes an attempt at once, and then often enough not to miss its
// turn, whatever its strategy says.
func TestDeafPolls(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.listens()
		w.news(quorum.Unsubscribed)
		w.wantHistory("acquire as owner-1")
		for range 3 {
			w.attempt().taken(time.Hour)
			pass(maxPoll - 1)
			w.wantHistory()
			pass(1)
			w.wantHistory("acquire as owner-1")
		}
		w.attempt().taken(time.Hour)
		w.news(quorum.Subscribed)
		w.wantHistory("acquire as owner-1")
		w.attempt().taken(time.Hour)
		pass(safetyPoll - 1)
		w.wantHistory()
		c.leaves()
	})
}

// So does one whose subscription is not confirmed yet, and one that never gets a notice.
func TestWithoutNoticesItPolls(t *testing.T) {
	for name, change := range map[string]func(*Config){"not yet": func(*Config) {}, "never": deaf} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.byHand()
				c := w.start()
				w.attempt().taken(time.Hour)
				w.history()
				for range 3 {
					pass(maxPoll - 1)
					w.wantHistory()
					pass(1)
					w.wantHistory("acquire as owner-1")
					w.attempt().taken(time.Hour)
				}
				c.leaves()
			}, change)
			inBubble(t, func(t *testing.T, w *world) { // a strategy that polls more often does
				w.byHand()
				c := w.start(pace(never(7 * time.Millisecond)))
				w.attempt().taken(time.Hour)
				w.history()
				for range 3 {
					pass(7 * time.Millisecond)
					w.wantHistory("acquire as owner-1")
					w.attempt().taken(time.Hour)
				}
				c.leaves()
			}, change)
		})
	}
}

// A subscribed flight makes no attempt by its strategy, but one per safetyPoll.
func TestWhoHearsPollsSlowly(t *testing.T) {
	for _, p := range []Pace{never(5 * time.Millisecond), limited{5 * time.Millisecond, 1 << 20},
		custom(func(int) (time.Duration, bool) { return 0, true })} {
		inBubble(t, func(t *testing.T, w *world) {
			w.byHand()
			c := w.listens(pace(p))
			for range 3 {
				pass(safetyPoll - 1)
				w.wantHistory()
				pass(1)
				w.wantHistory("acquire as owner-1")
				w.attempt().taken(time.Hour)
			}
			c.leaves()
		})
	}
}

// But when the holder's ttl ends, it makes one.
func TestWhoHearsPollsAtTheEndOfTheTTL(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.hears(pace(never(time.Millisecond)))
		w.attempt().taken(300 * time.Millisecond)
		w.history()
		pass(300*time.Millisecond - 1)
		w.wantHistory()
		pass(1)
		w.wantHistory("acquire as owner-1")
		w.attempt().grant()
		c.holds()
		c.releases()
	})
}

// A strategy gives up when it would have given up against Redis, though nothing is sent but its
// last attempt: the holder may be a client that does not notify.
func TestWhoHearsGivesUpInTime(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.listens(pace(limited{10 * time.Millisecond, 5}))
		pass(50*time.Millisecond - 1)
		w.wantHistory()
		c.waits()
		pass(1)
		w.wantHistory("acquire as owner-1")
		w.attempt().taken(0)
		c.failed(50*time.Millisecond, errTaken)
		w.wantHistory("stop owner-1", "leave owner-1")
	})
	inBubble(t, func(t *testing.T, w *world) { // that attempt may succeed
		w.byHand()
		c := w.listens(pace(limited{10 * time.Millisecond, 5}))
		pass(50 * time.Millisecond)
		w.attempt().grant()
		c.holds()
		c.releases()
	})
	inBubble(t, func(t *testing.T, w *world) { // and the next one has its own
		w.byHand()
		a := w.listens(pace(limited{10 * time.Millisecond, 2}))
		b, c := w.start(pace(limited{15 * time.Millisecond, 2})), w.start(pace(never(time.Millisecond)))
		pass(20 * time.Millisecond)
		w.attempt().taken(0)
		a.failed(20*time.Millisecond, errTaken)
		pass(10 * time.Millisecond)
		w.attempt().taken(0)
		b.failed(30*time.Millisecond, errTaken)
		c.waits()
		w.history()
		pass(safetyPoll - 1)
		w.wantHistory()
		pass(1)
		w.wantHistory("acquire as owner-1")
		w.attempt().grant()
		c.holds()
		c.releases()
	})
}

// The front waiter leaves, and the others keep what its subscription has received.
func TestNextInFrontHearsToo(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		a := w.listens()
		b := w.start(pace(never(time.Millisecond)))
		a.leaves()
		pass(safetyPoll / 2)
		w.wantHistory()
		w.news(quorum.OurTurn)
		w.wantHistory("acquire as owner-1")
		w.attempt().grant()
		b.holds()
		b.releases()
	})
}

// When no other is known to have the key, nobody will notify of its end: the strategy polls,
// subscribed or not. If a notice says that somebody has it after all, it polls no longer than until
// that ends.
func TestNotOwnedIsPolled(t *testing.T) {
	for name, fails := range map[string]func(*fakeAttempt){
		"split": func(a *fakeAttempt) { a.split(0) }, "unavailable": (*fakeAttempt).unavailable,
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.byHand()
				c := w.listens(pace(never(300 * time.Millisecond)))
				w.news(quorum.OurTurn)
				w.history()
				for range 3 {
					fails(w.attempt())
					pass(300*time.Millisecond - 1)
					w.wantHistory()
					pass(1)
					w.wantHistory("acquire as owner-1")
				}
				fails(w.attempt())
				w.news(quorum.OtherTurn)
				pass(turn + minDelay - 1)
				w.wantHistory()
				pass(1)
				w.wantHistory("acquire as owner-1")
				w.attempt().grant()
				c.holds()
				c.releases()
			})
		})
	}
}

// Where nothing is known of the key, because too few nodes answer, only the strategy polls, also
// for a flight that is not subscribed.
func TestUnavailableIsPolledByStrategy(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.start(pace(never(300 * time.Millisecond)))
		w.attempt().taken(0)
		pass(maxPoll)
		w.history()
		w.attempt().unavailable()
		pass(250*time.Millisecond - 1)
		w.wantHistory()
		pass(1)
		w.wantHistory("acquire as owner-1")
		c.leaves()
	})
}

// Even where votes are split the flight is registered among those that wait: with an even number of
// nodes an attempt is lost before anybody can be known to have a majority.
func TestSplitVotesContendToo(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.start()
		w.attempt().split(0)
		w.wantHistory("acquire", "watch owner-1")
		pass(maxPoll)
		w.wantHistory("acquire as owner-1")
		w.attempt().split(0)
		w.news(quorum.OurTurn)
		w.wantHistory("acquire as owner-1")
		w.attempt().grant()
		c.holds()
		c.releases()
	})
	inBubble(t, func(t *testing.T, w *world) { // not so where nobody is known to want the key
		w.byHand()
		c := w.start()
		w.attempt().unavailable()
		pass(time.Minute)
		w.wantHistory("acquire")
		c.leaves()
	})
}

// The last waiter ends the flight, in any state; its registrations on the nodes are removed, and
// nothing else.
func TestLastWaiterLeaves(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) { // before it contended
		w.byHand()
		c := w.start()
		c.leaves()
		w.wantHistory("acquire")
	})
	inBubble(t, func(t *testing.T, w *world) { // before its attempt as a contender
		w.byHand()
		c := w.start()
		w.attempt().taken(time.Hour)
		c.waits()
		c.leaves()
		w.wantHistory("acquire", "watch owner-1", "stop owner-1")
	})
	inBubble(t, func(t *testing.T, w *world) { // during its attempt as a contender
		w.byHand()
		c := w.hears()
		w.history()
		c.leaves()
		w.wantHistory("stop owner-1", "leave owner-1")
	})
	inBubble(t, func(t *testing.T, w *world) { // the same, and it has just won
		w.byHand()
		w.cancel = nil
		c := w.hears()
		w.history()
		c.leaves()
		w.attempt().grant()
		w.wantHistory("release", "stop owner-1")
	})
	inBubble(t, func(t *testing.T, w *world) { // between attempts
		w.byHand()
		c := w.listens()
		c.leaves()
		w.wantHistory("stop owner-1", "leave owner-1")
	})
	inBubble(t, func(t *testing.T, w *world) { // when it has the lease
		w.byHand()
		c := w.hears()
		w.attempt().grant()
		w.history()
		c.releases()
		w.wantHistory("release", "stop owner-1")
	})
	inBubble(t, func(t *testing.T, w *world) { // an outcome that ends all waiting
		w.byHand()
		c := w.hears()
		w.history()
		w.attempt().final()
		c.failed(0, errFinal)
		w.wantHistory("stop owner-1", "leave owner-1")
	})
}

// One that comes while the last one's attempt is being cancelled contends on.
func TestComesWhileTheLastLeaves(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		w.cancel = nil
		a := w.hears()
		a.leaves()
		b := w.start()
		w.history()
		w.attempt().fail(quorum.Failure{Err: errTaken})
		w.wantHistory("acquire as owner-1")
		w.attempt().grant()
		b.holds()
		b.releases()
		w.wantHistory("release", "stop owner-1")
	})
}

// An event that arrives when the flight has died does nothing.
func TestNewsAfterDeath(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		w.listens().leaves()
		w.history()
		for _, n := range []quorum.Event{quorum.Subscribed, quorum.Unsubscribed, quorum.OurTurn, quorum.OtherTurn} {
			w.news(n)
		}
		pass(time.Minute)
		w.wantHistory()
	})
}

// The next flight for the key is a contender of its own.
func TestNextFlightContendsAnew(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		w.listens().leaves()
		c := w.hears()
		is(t, "contender", w.attempt().contender, "owner-3")
		w.watches[0].hear(quorum.OurTurn) // lingers
		w.attempt().grant()
		c.holds()
		c.releases()
		is(t, "attempts", w.asked(), 4)
	})
}

// Where others wait for the key when nobody does here any more, the flight stays subscribed for a moment, and
// wants nothing: the first attempt of its next caller registers it again. Not so after a flight that has met
// one rival alone, nor for a caller that may give up at once.
func TestAFlightStaysSubscribedAmongOthers(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.start()
		w.attempt().taken(time.Hour)
		w.news(quorum.Subscribed)
		w.attempt().taken(time.Hour)
		c.leaves()
		w.wantHistory("acquire", "watch owner-1", "acquire as owner-1", "stop owner-1", "leave owner-1")

		c = w.start()
		w.attempt().taken(time.Hour)
		w.news(quorum.Subscribed)
		w.attempt().taken(time.Hour)
		w.news(quorum.OtherTurn)
		c.leaves()
		w.wantHistory("acquire", "watch owner-3", "acquire as owner-3", "leave owner-3")
		w.news(quorum.OtherTurn) // late
		is(t, "known", w.g.Known("k"), nil)

		c = w.start()
		w.wantHistory("acquire as owner-3")
		w.attempt().taken(time.Hour)
		pass(safetyPoll / 2)
		w.wantHistory()
		w.news(quorum.OtherTurn)
		w.news(quorum.OurTurn)
		w.wantHistory("acquire as owner-3")
		w.attempt().grant()
		c.holds()
		c.releases()
		w.wantHistory("release")

		bounded := w.start(pace(limited{time.Second, 1}))
		w.wantHistory("stop owner-3", "acquire")
		w.attempt().taken(time.Hour)
		bounded.leaves()
	})
	inBubble(t, func(t *testing.T, w *world) { // until its time is over, or the Group is closed
		w.byHand()
		c := w.listens()
		w.news(quorum.OtherTurn)
		c.leaves()
		w.history()
		pass(time.Duration(subscribedFor) - 1)
		w.wantHistory()
		pass(1)
		w.wantHistory("stop owner-1")
		w.wantNoFlight()

		c = w.hears()
		w.news(quorum.OtherTurn)
		c.leaves()
		is(t, "forced", w.g.Close(t.Context()), false)
	})
}

// A flight that dies while it is about to subscribe stops the subscription, once, whichever comes
// first.
func TestDiesWhileItBeginsToListen(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		begun, goOn := make(chan struct{}), make(chan struct{})
		watch := w.nodes.watch
		w.nodes.watch = func(key, contender string, hear func(quorum.Event)) func() {
			stop := watch(key, contender, hear)
			close(begun)
			<-goOn
			return stop
		}
		c := w.start()
		go w.attempt().taken(time.Hour)
		<-begun
		c.leaves()
		w.wantHistory("acquire", "watch owner-1")
		close(goOn)
		w.wantHistory("stop owner-1")
	})
	inBubble(t, func(t *testing.T, w *world) { // it hears at once
		w.byHand()
		watch := w.nodes.watch
		w.nodes.watch = func(key, contender string, hear func(quorum.Event)) func() {
			stop := watch(key, contender, hear)
			hear(quorum.Subscribed)
			return stop
		}
		c := w.start()
		w.attempt().taken(time.Hour)
		w.wantHistory("acquire", "watch owner-1", "acquire as owner-1")
		c.leaves()
	})
}

// Cancellation in the instant in which the turn is notified, or taken.
func TestLeavesInTheInstantOfNews(t *testing.T) {
	for _, first := range []bool{true, false} {
		inBubble(t, func(t *testing.T, w *world) {
			w.byHand()
			a := w.listens()
			b := w.start()
			if first {
				a.cancel()
				w.watches[0].hear(quorum.OurTurn)
			} else {
				w.watches[0].hear(quorum.OurTurn)
				a.cancel()
			}
			synctest.Wait()
			w.attempt().grant()
			b.holds() // or a was, and passed it on
			b.releases()
		})
	}
}

// The front waiter makes its attempts on its own goroutine, the first and all others, so each may
// block it.
func TestTheFrontWaiterMakesTheAttempts(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		a, b := w.start(), w.start()
		w.attempt().taken(time.Hour)
		w.news(quorum.Subscribed)
		w.attempt().taken(time.Hour)
		w.news(quorum.OurTurn)
		is(t, "attempts", w.asked(), 3)
		w.attempt().grantBlock(1)
		a.holds()
		a.releases()
		w.attempt().grant()
		b.holds()
		b.releases()
		for i, at := range w.attempts {
			is(t, fmt.Sprint("inline ", i), at.inline, true)
		}
	}, func(c *Config) { c.Slice = -1 })
}

// A front waiter that is notified of its turn and leaves in the same instant does not lose the turn
// for others: the next one makes the attempt.
func TestAWaiterThatLeavesWhenItIsToldToGo(t *testing.T) {
	for i := range 100 { // for each order in which it notices
		inBubble(t, func(t *testing.T, w *world) {
			w.byHand()
			a, b := w.start(), w.start()
			w.attempt().taken(time.Hour)
			w.news(quorum.Subscribed)
			w.attempt().taken(time.Hour)
			n := w.asked()
			if i%2 == 0 {
				w.newsNow(quorum.OurTurn)
				a.cancel()
			} else {
				a.cancel()
				w.newsNow(quorum.OurTurn)
			}
			synctest.Wait()
			a.failed(0, context.Canceled)
			is(t, "attempts", w.asked(), n+1)
			w.attempt().grant()
			b.holds()
			c := w.start()
			c.waits()
			b.releases()
			c.holds()
			c.releases()
		})
	}
}

// A caller that comes before the want of the last one was taken back is registered all the same.
func TestAWantIsTakenBackBeforeTheNextIsRegistered(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.acquire = func(a *fakeAttempt) { a.taken(0) }
		w.nodes.leave = func(key, contender string) {
			w.nodes.leave = w.leave
			time.Sleep(ms) // it is not sent yet
			w.leave(key, contender)
		}
		first := w.start()
		w.news(quorum.Subscribed) // an attempt registers it
		w.news(quorum.OtherTurn)
		first.leaves()
		second := w.start()
		time.Sleep(2 * ms)
		synctest.Wait()
		w.mu.Lock()
		again := len(w.watches) > 1
		w.mu.Unlock()
		if again { // as the nodes do, once for each
			w.news(quorum.Subscribed)
		}
		w.mu.Lock()
		is(t, "registered", len(w.wants), 1)
		w.mu.Unlock()
		second.leaves()
	})
}
