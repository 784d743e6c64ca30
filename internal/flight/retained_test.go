package flight

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/flightlock/flightlock/internal/quorum"
)

func linger(d time.Duration) func(*wish) { return func(w *wish) { w.linger = d } }

const minute = time.Minute

// lingers makes a caller whose lease may be retained for a minute.
func (w *world) lingers(change ...func(*wish)) *caller {
	return w.start(append([]func(*wish){linger(minute), ttl(10 * minute)}, change...)...)
}

// retaining runs a test in a world whose inbox is confirmed, and where 10 leases may be retained.
func retaining(t *testing.T, test func(t *testing.T, w *world), change ...func(*Config)) {
	t.Helper()
	inBubble(t, func(t *testing.T, w *world) {
		w.g.InboxConfirmed(true)
		test(t, w)
	}, append([]func(*Config){func(c *Config) { c.MaxRetained = 10 }}, change...)...)
}

func (w *world) recall(owner, contender string) {
	w.t.Helper()
	w.g.Recall("k", owner, contender)
	synctest.Wait()
}

// wantRetained checks how many leases are retained, were used again, and were recalled.
func (w *world) wantRetained(n int64, reused, recalled uint64) {
	w.t.Helper()
	synctest.Wait()
	if c := w.g.Counts(Counts{}); c.Retained != n || c.Reused != reused || c.Recalled != recalled {
		w.t.Errorf("retained %d, reused %d, recalled %d; want %d, %d, %d",
			c.Retained, c.Reused, c.Recalled, n, reused, recalled)
	}
}

// After the last release the next caller has the lease without a command, with the next token, in
// every mode that queues.
func TestARetainedLeaseIsUsedAgain(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		w.rich()
		a := w.lingers()
		a.holds()
		fence, owner := a.h.Fence(), a.h.Owner()
		a.releases()
		w.wantRetained(1, 0, 0)
		for i, change := range [][]func(*wish){{}, {pace(limited{})}, {pace(limited{ms, 3})}} {
			pass(time.Second)
			b := w.lingers(change...)
			b.holds()
			is(t, "token", b.h.Fence(), fence+1+int64(i))
			is(t, "owner", b.h.Owner(), owner)
			is(t, "kind", b.h.kind, Handed)
			is(t, "held", w.g.Counts(Counts{}).Held, 1)
			b.releases()
		}
		w.wantRetained(1, 3, 0)
		w.wantHistory("acquire")
		pass(minute)
		w.wantRetained(0, 3, 0)
		w.wantHistory("release")
	})
}

// Callers that are there when it is released come first, as ever; the last of them determines how
// long it is retained.
func TestTheLastHolderSaysHowLong(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		a, b, c := w.lingers(), w.start(ttl(10*minute)), w.start(ttl(10*minute), linger(time.Second))
		a.releases()
		b.holds()
		b.releases()
		c.holds()
		c.releases()
		w.wantRetained(1, 0, 0)
		pass(time.Second - 1)
		w.wantRetained(1, 0, 0)
		pass(1)
		w.wantRetained(0, 0, 0)
		d := w.lingers()
		e := w.start(ttl(10 * minute))
		d.releases()
		e.holds()
		e.releases()
		w.wantRetained(0, 0, 0)
	})
}

// A lease whose holder hangs is not retained when its Ticket is over, though it would be valid for longer.
func TestTheLeaseOfAHungHolderIsNotRetained(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		first, hangs := w.lingers(), w.lingers(ttl(10*time.Second))
		first.releases()
		hangs.holds()
		pass(10 * time.Second)
		is(t, "held", w.g.Counts(Counts{}).Held, 0)
		w.wantRetained(0, 0, 0)
		w.wantHistory("acquire", "release")
	})
}

// Idle, it is never refreshed, and it is released when half of its ttl is gone, whatever Linger is.
func TestARetainedLeaseIsNotRefreshed(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		a := w.lingers(ttl(minute))
		pass(time.Second)
		a.releases()
		pass(minute/2 - time.Second - 1000*ms)
		w.wantRetained(1, 0, 0)
		pass(time.Second)
		w.wantRetained(0, 0, 0)
		w.wantHistory("acquire", "release")
	})
}

// Recalls may never arrive: the process that wants the key may be denied PUBLISH. A lease that is used again
// and again is renewed again and again, and would never end. So each such renewal checks who waits elsewhere.
func TestALeaseThatIsUsedAgainEndsWithoutARecall(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		w.rich()
		a := w.lingers(ttl(10 * time.Second))
		a.holds()
		owner := a.h.Owner()
		a.releases()
		w.rivals("b")
		for range 100 { // ten seconds, a ttl
			pass(100 * ms)
			b := w.lingers(ttl(10 * time.Second))
			b.holds()
			if b.h.Owner() != owner {
				b.releases()
				w.rivals("")
				pass(2 * minute)
				return
			}
			b.releases()
		}
		t.Error("the lease is used for longer than its ttl, although another process waits")
	}, func(c *Config) { c.Slice = 20 * ms })
}

// The check may be answered when the lease is retained already: whoever waits elsewhere does not wait for its
// end.
func TestARetainedLeaseEndsByACheckThatFindsARival(t *testing.T) {
	for _, rival := range []string{"", "b"} {
		retaining(t, func(t *testing.T, w *world) {
			w.rich().refresh = nil
			w.lingers(ttl(10 * time.Second)).releases()
			pass(3 * time.Second) // more than a quarter of it
			b := w.lingers(ttl(10 * time.Second))
			b.holds()
			b.releases()
			w.wantRetained(1, 1, 0)
			w.rivals(rival)
			w.renewal(1).confirm()
			if rival == "" {
				w.wantRetained(1, 1, 0)
				w.wantHistory("acquire", "look")
			} else {
				w.wantRetained(0, 1, 0)
				w.wantHistory("acquire", "look", "watch owner-1R", "release", "stop owner-1R")
			}
			pass(minute)
		})
	}
}

// A lease of which half is gone when its last holder releases it is not retained.
func TestAnOldLeaseIsNotRetained(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		a := w.lingers(ttl(10 * time.Second))
		pass(5 * time.Second)
		a.releases()
		w.wantRetained(0, 0, 0)
	})
}

// A refresh that is in progress when the last holder releases ends without another one, whatever
// its outcome; if the lease is lost, or others were seen to wait, it is released.
func TestARefreshThatEndsWhileRetained(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(w *world, r *fakeRefresh)
		kept int64
	}{
		"confirmed": {func(_ *world, r *fakeRefresh) { r.confirm() }, 1},
		"reserved":  {func(_ *world, r *fakeRefresh) { r.reserve() }, 1},
		"failed":    {func(_ *world, r *fakeRefresh) { r.fail(quorum.Failure{Err: errDown}) }, 1},
		"lost": {func(_ *world, r *fakeRefresh) {
			r.fail(quorum.Failure{Err: errLost, Reason: quorum.NotHeld})
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			retaining(t, func(t *testing.T, w *world) {
				w.rich()
				w.refresh = nil
				a := w.lingers()
				a.h.Refresh(time.Second, func(error) {})
				a.releases()
				w.wantRetained(1, 0, 0)
				c.end(w, w.renewal(1))
				w.wantRetained(c.kept, 0, 0)
				is(t, "refreshes", w.renewals(), 1)
				pass(2 * minute)
			})
		})
	}
}

// A caller that comes while such a refresh is under way gets the lease at once.
func TestReuseDuringARefresh(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		w.rich()
		w.refresh = nil
		a := w.lingers()
		a.h.Refresh(time.Second, func(error) {})
		a.releases()
		b := w.lingers()
		b.holds()
		w.renewal(1).confirm()
		b.holds()
		b.releases()
		w.wantRetained(1, 1, 0)
		pass(minute)
	})
}

// confirmed says that recalls are received, or that some may have been missed.
func (g *Group) confirmed(yes bool) {
	g.InboxConfirmed(yes)
	if !yes {
		g.InboxLost()
	}
}

// A lease that has expired, while the process did not notice, belongs to nobody: the next caller
// contends, in every mode, and gets a later token.
func TestARetainedLeaseIsNotUsedAfterItsValidity(t *testing.T) {
	for _, p := range []Pace{patient, limited{}} {
		retaining(t, func(t *testing.T, w *world) {
			a := w.lingers(ttl(minute))
			fence := a.h.Fence()
			a.releases()
			a.h.f.silence() // as in a process that is paused
			pass(minute)
			b := w.lingers(pace(p))
			b.holds()
			is(t, "later", b.h.Fence() > fence+3, true)
			is(t, "owner", b.h.Owner(), "owner-2R")
			w.wantHistory("acquire", "release", "acquire")
			b.h.f.shard().arm(b.h.f, b.h.f.g.at(time.Now())) // it goes on
			synctest.Wait()
			b.releases()
			pass(minute)
		})
	}
}

// Less than half of the next caller's ttl is renewed first, and so is a block that is used up.
func TestAShortRetainedLeaseIsRenewedFirst(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		w.refresh = nil
		a := w.lingers(ttl(minute))
		a.releases()
		b := w.lingers(ttl(10 * minute))
		b.waits()
		w.renewal(1).confirm()
		b.holds()
		is(t, "until", time.Until(b.h.Until()) > 9*minute, true)
		b.releases()
		w.wantRetained(1, 0, 0)
		pass(minute)
	})
	retaining(t, func(t *testing.T, w *world) {
		w.poor().refresh = nil
		a := w.lingers()
		a.releases()
		b := w.lingers()
		b.waits()
		w.renewal(1).confirm()
		b.holds()
		b.releases()
		pass(minute)
	})
}

// One that leaves while it waits for that renewal leaves no other caller: the lease is released.
func TestNobodyIsLeftWhenItIsRenewed(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		w.refresh = nil
		a := w.lingers(ttl(minute))
		a.releases()
		b := w.lingers(ttl(10 * minute))
		b.waits()
		b.leaves()
		w.renewal(1).confirm()
		synctest.Wait()
		w.wantHistory("acquire", "look", "release")
	})
}

// A retained lease begins a slice with its next caller: nobody waits elsewhere, or there would have been a
// recall. So those behind that caller get it without a check.
func TestARetainedLeaseBeginsASlice(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		w.rich()
		w.lingers().releases()
		pass(time.Second)
		a, b := w.lingers(), w.lingers()
		a.releases()
		b.releases()
		w.wantHistory("acquire")
		pass(minute)
	}, func(c *Config) { c.Slice = 20 * ms })
}

// A lease that is used again and again gets tokens while it has some: no caller waits for them.
func TestARetainedLeaseGetsTokensAhead(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		w.refresh = nil
		w.lingers().releases()
		for range loneBlock - 1 {
			w.lingers().releases()
		}
		w.renewal(1).confirm()
		w.lingers().releases()
		w.wantRetained(1, loneBlock, 0)
		is(t, "refreshes", w.renewals(), 1)
		pass(minute)
	})
}

// A renewal that fails sends the caller to contend.
func TestReuseWhoseRenewalFails(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Err: errDown}) }
		w.poor()
		a := w.lingers()
		a.releases()
		b := w.lingers()
		b.holds()
		is(t, "owner", b.h.Owner(), "owner-2R")
		b.releases()
		pass(minute)
	})
}

// Recalls.

// A recall releases a retained lease at once; a later caller contends, and is not given that lease.
func TestARecallReleasesARetainedLease(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		w.release = nil
		a := w.lingers()
		owner := a.h.Owner()
		a.releases()
		w.recall(owner, "x")
		w.wantRetained(0, 0, 1)
		w.wantHistory("acquire", "release to others")
		b := w.lingers()
		b.holds()
		is(t, "owner", b.h.Owner(), "owner-2R")
		w.recall(owner, "x") // from another node
		w.recall(owner, "y")
		b.holds()
		b.releases()
		w.wantRetained(1, 0, 1)
		pass(minute)
		for _, l := range w.leases {
			l.released(nil)
		}
	})
}

// A recall that arrives while the lease is used makes its next release a plain one; so does one
// that arrives while the attempt is in progress: a node may have granted it long before all have
// answered. For another owner, or a key that nobody wants here, it means nothing.
func TestARecallOfALeaseInUse(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		a := w.lingers()
		w.recall("owner-0R", "x")
		w.g.Recall("other", a.h.Owner(), "x")
		a.releases()
		w.wantRetained(1, 0, 0)
		b := w.lingers()
		w.recall(b.h.Owner(), "x")
		b.holds()
		b.releases()
		w.wantRetained(0, 1, 0)
		is(t, "watches", len(w.watches), 0)

		w.byHand()
		c := w.lingers()
		w.recall(w.attempt().owner, "")
		w.attempt().grant()
		c.holds()
		c.releases()
		w.wantRetained(0, 1, 0)
	})
}

// If others wait here for a lease that is recalled, its slice ends for the one that has recalled
// it, as if a check had found it.
func TestARecallEndsTheSlice(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		a, b := w.rich().lingers(), w.lingers()
		w.recall(a.h.Owner(), "x")
		a.releases() // within the slice
		b.holds()
		c := w.lingers()
		pass(slice)
		w.byHand()
		b.releases()
		c.waits()
		w.wantHistory("acquire", "watch owner-1R", "release to x")
		w.news(quorum.OurTurn)
		w.attempt().grant()
		c.holds()
		c.releases() // it has met a rival
		w.wantRetained(0, 0, 0)
	}, sliced)
}

// A recall wins over a caller that waits for the lease to be renewed: one that is registered has
// the next turn, one that is not finds the key released.
func TestARecallWinsOverAWaiterForARenewal(t *testing.T) {
	for _, rival := range []string{"x", ""} {
		retaining(t, func(t *testing.T, w *world) {
			w.poor().refresh = nil
			a := w.lingers()
			owner := a.h.Owner()
			a.releases()
			b := w.lingers()
			b.waits()
			w.byHand()
			w.recall(owner, rival)
			b.waits()
			w.renewal(1).confirm() // too late
			b.waits()
			if rival == "" {
				w.wantHistory("acquire", "look", "release to others", "acquire")
			} else {
				w.wantHistory("acquire", "look", "watch owner-1R", "release to x")
				w.news(quorum.OurTurn)
			}
			w.attempt().grant()
			b.holds()
			b.releases()
			w.wantRetained(0, 0, 0)
		})
	}
}

// What is not retained: without a confirmed inbox, as long as it is not, and what was acquired
// before it was; with MaxRetained or handoff off; of callers that do not want it; after a loss;
// after rivals were met.
func TestWhatIsNotRetained(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		w.g.confirmed(false)
		a := w.lingers()
		is(t, "owner", a.h.Owner(), "owner-1")
		w.g.InboxConfirmed(true)
		a.releases()
		w.wantRetained(0, 0, 0)

		b := w.lingers()
		w.g.confirmed(false) // a recall may be missed now
		w.g.InboxConfirmed(true)
		b.releases()
		w.wantRetained(0, 0, 0)

		c := w.lingers()
		c.releases()
		w.wantRetained(1, 0, 0)
		w.g.confirmed(false)
		w.wantRetained(0, 0, 0)
		w.g.InboxConfirmed(true)

		w.start().releases()
		d := w.lingers(ttl(time.Second))
		pass(time.Second)
		is(t, "lost", d.ends, 1)
		w.wantRetained(0, 0, 0)

		w.byHand()
		e := w.lingers()
		w.attempt().taken(time.Hour)
		w.news(quorum.Subscribed)
		w.attempt().grant()
		e.holds()
		e.releases()
		w.wantRetained(0, 0, 0)
	})
	for _, off := range []func(*Config){func(c *Config) {
		c.MaxRetained = 0
	}, func(c *Config) { c.Slice = -1 }} {
		retaining(t, func(t *testing.T, w *world) {
			a := w.lingers()
			is(t, "owner", a.h.Owner(), "owner-1")
			a.releases()
			w.wantRetained(0, 0, 0)
		}, off)
	}
}

// A caller whose ctx ends in the instant in which it gets a retained lease leaves it as a release
// would.
func TestLeaveWithARetainedLease(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		w.lingers().releases()
		h := new(Ticket)
		h.SetLinger(minute)
		f, err := w.enter("k", h, 10*minute)
		if err != nil || h.state != holding {
			t.Fatalf("%v, state %d", err, h.state)
		}
		err = f.quit(h, context.Canceled)
		is(t, "error", fmt.Sprint(err), fmt.Sprint(fmt.Errorf("%w: %w", context.Canceled, errBusy)))
		w.wantRetained(1, 1, 0)
		pass(minute)
	})
}

// Limits.

// Above MaxRetained the one that was used least recently is released; one in use is none of them.
func TestTooManyRetained(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		for i := range 4 {
			w.lingers(key(fmt.Sprint(i))).releases()
		}
		w.wantRetained(3, 0, 0) // not 0
		for i := 1; i < 4; i += 2 {
			w.lingers(key(fmt.Sprint(i))).releases()
		}
		w.lingers(key("4")).releases() // instead of 2
		w.wantRetained(3, 2, 0)
		for _, i := range []int{1, 3, 4} {
			w.lingers(key(fmt.Sprint(i))).releases()
		}
		w.wantRetained(3, 5, 0)
		a := w.lingers(key("1"))
		for i := range 3 {
			w.lingers(key(fmt.Sprint("new", i))).releases()
		}
		a.holds()
		a.releases()
		w.wantRetained(3, 6, 0)
		pass(minute)
		w.wantRetained(0, 6, 0)
		is(t, "listed", w.g.retained.n, 0)
		is(t, "list", w.g.retained.all.Front() == nil, true)
	}, func(c *Config) { c.MaxRetained = 3 })
}

// Close releases what is retained, at once and not when holders have let go, and nothing is
// retained after it began.
func TestCloseReleasesRetained(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		for i := range 9 {
			w.lingers(key(fmt.Sprint(i))).releases()
		}
		a := w.lingers()
		var wg sync.WaitGroup
		wg.Go(func() { w.g.Close(t.Context()) })
		w.wantRetained(0, 0, 0)
		w.start(key("1")).failed(0, errClosed)
		a.holds()
		a.releases()
		w.wantRetained(0, 0, 0)
		wg.Wait()
	})
}

// A key that is recalled twice in a row without a local use is not retained for a second, then two,
// and so on; a local use resets that.
func TestAKeyThatIsRetainedForNothing(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		wasted := func() {
			t.Helper()
			a := w.lingers()
			a.releases()
			w.recall(a.h.Owner(), "x")
		}
		retains := func(want int64) {
			t.Helper()
			a := w.lingers()
			a.releases()
			w.wantRetained(want, w.g.Counts(Counts{}).Reused, w.g.Counts(Counts{}).Recalled)
		}
		wasted()
		wasted()
		retains(0)
		pass(time.Second)
		wasted()
		pass(time.Second)
		retains(0)
		pass(time.Second)
		retains(1)
		b := w.lingers()
		b.releases()
		w.recall(b.h.Owner(), "x") // it was used in between
		wasted()
		retains(1)
		pass(minute)
	})
}

// The memory for such keys is bounded.
func TestFewFruitlessKeysAreRemembered(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := &flight{g: w.g, retention: &retention{}}
		for i := range 3 * maxFruitless {
			f.key = fmt.Sprint(i)
			f.noteRecallLocked()
			if i == 2*maxFruitless {
				pass(time.Second)
			}
		}
		is(t, "some", len(f.shard().fruitless) <= maxFruitless, true)
	})
}

// Whatever happens in whatever order: no two hold, tokens rise, no recall is followed by a caller
// that gets the recalled lease, nothing is refreshed while nobody holds or waits, and nothing is
// left.
func TestRetainedAtRandom(t *testing.T) {
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 18))
		retaining(t, func(t *testing.T, w *world) {
			w.exclusive = true
			recalled := map[string]bool{}
			var holds, waits []*caller
			last := int64(0)
			for range 60 {
				switch rnd.IntN(8) {
				case 0, 1:
					retain := linger(time.Duration(rnd.IntN(300)) * ms)
					waits = append(waits, w.lingers(retain, ttl(time.Duration(1+rnd.IntN(4))*time.Second)))
				case 2, 3:
					if len(holds) > 0 {
						_ = holds[0].h.Release()
						holds = holds[1:]
					}
				case 4:
					w.mu.Lock()
					owner := fmt.Sprint("owner-", w.prepared, "R")
					w.mu.Unlock()
					if len(holds)+len(waits) == 0 {
						recalled[owner] = true
					}
					w.recall(owner, "")
				case 5:
					w.g.confirmed(rnd.IntN(3) > 0)
				case 6:
					if len(waits) > 0 && rnd.IntN(3) == 0 {
						waits[0].leaves()
					}
				default:
					pass(time.Duration(rnd.IntN(200)) * ms)
				}
				synctest.Wait()
				still := waits[:0]
				for _, c := range waits {
					switch {
					case !c.returned():
						still = append(still, c)
					case c.err == nil:
						holds = append(holds, c)
						if c.h.Fence() <= last {
							t.Errorf("seed %d: token %d after %d", seed, c.h.Fence(), last)
						}
						if last = c.h.Fence(); recalled[c.h.Owner()] {
							t.Errorf("seed %d: %s was given after its recall", seed, c.h.Owner())
						}
					}
				}
				waits = still
				held := holds[:0]
				for _, c := range holds {
					if c.h.Err() == nil {
						held = append(held, c)
					}
				}
				if holds = held; len(holds) > 1 {
					t.Errorf("seed %d: %d hold", seed, len(holds))
				}
			}
			for len(holds)+len(waits) > 0 {
				for _, c := range waits {
					c.leaves()
				}
				for _, c := range holds {
					_ = c.h.Release()
				}
				holds, waits = nil, nil
				synctest.Wait()
			}
			pass(minute)
		})
	}
}

// The memory of every lock and every waiter does not grow for leases that are not retained.
func TestSizesAreAsWithoutRetention(t *testing.T) {
	if unsafe.Sizeof(uintptr(0)) != 8 {
		t.Skip("sizes are those of 64 bits")
	}
	is(t, "flight", unsafe.Sizeof(flight{}), 296)
	is(t, "Ticket", unsafe.Sizeof(Ticket{}), 104)
	is(t, "waiter", unsafe.Sizeof(waiter{}), 192)
}

// Nor does a lock make more allocations: these are counted with and without what retains.
func TestAllocationsAreAsWithoutRetention(t *testing.T) {
	allocs := func(maxRetained int, confirmed bool) float64 {
		w := newWorld(t, func(c *Config) { c.MaxRetained = maxRetained })
		w.g.confirmed(confirmed)
		quiet := &freeLease{}
		w.nodes.prepare = func(string, time.Duration, int64, string) Lease { return quiet }
		return testing.AllocsPerRun(200, func() {
			h := &Ticket{}
			if err := w.g.Acquire(context.Background(), "k", h, time.Second, patient); err != nil {
				t.Fatal(err)
			}
			if err := h.Release(); err != nil {
				t.Fatal(err)
			}
		})
	}
	is(t, "allocations", allocs(10, true), allocs(0, false))
}

// freeLease is a Lease that allocates nothing, and whatever is asked succeeds at once.
type freeLease struct{ n int64 }

func (l *freeLease) Owner() string { return "o" }
func (l *freeLease) Acquire(_ bool, by quorum.Acquirer) {
	l.n += 4
	by.Acquired(quorum.Grant{Until: time.Now().Add(time.Minute), First: l.n - 3, Last: l.n}, nil)
}
func (l *freeLease) Cancel()                {}
func (l *freeLease) Peek() *quorum.Failure  { return nil }
func (l *freeLease) Settle()                {}
func (l *freeLease) Abandon() (int64, bool) { return l.n, true }
func (l *freeLease) Rejoined() bool         { return false }
func (l *freeLease) Forget()                {}
func (l *freeLease) Withdraw() bool         { return true }
func (l *freeLease) Refresh(time.Duration, int64, time.Duration, bool, func(quorum.Grant, *quorum.Failure)) {
}
func (l *freeLease) Release(_ bool, _ string, _ quorum.News, by quorum.Releaser) {
	by.Released(nil)
}

// A caller whose strategy gives up at the first failure, and for which a retained lease has to be renewed,
// gets it.
func TestARetainedLeaseIsRenewedForAnImpatientCaller(t *testing.T) {
	retaining(t, func(t *testing.T, w *world) {
		w.rich()
		w.refresh = nil
		first := w.lingers()
		first.releases()
		w.wantRetained(1, 0, 0)
		next := w.lingers(pace(limited{}), ttl(30*minute))
		pass(ms)
		w.renewal(1).confirm()
		next.holds()
		w.wantHistory("acquire", "look")
		next.releases()
		pass(2 * minute)
	})
}
