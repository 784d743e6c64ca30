package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/link"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A grant that arrives late is released when it arrives: the server stops, the caller sends an
// acquire and gives up, the server continues.
func TestALateGrantIsReleasedWhenItArrives(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	warm := newAttempt(t, n, "k")
	warm.acquire().want(t, Granted)
	warm.release().want(t, Deleted)
	_ = s.Stop()
	commands := n.Commands()
	a := newAttempt(t, n, "k")
	asked := a.acquire()
	redistest.Eventually(t, patience, "it is written", func() bool { return n.Commands() == commands+1 })
	released := a.release()
	_ = s.Cont()
	asked.want(t, Granted)
	released.want(t, Deleted)
	if exists(t, s, "k") {
		t.Error("the key is still there")
	}
	wantDebts(t, n, 0)
}

// An acquire whose connection broke may be executed after its release was answered on a new one.
// The node sends a second release, so the orphan does not live for its ttl (S4).
func TestAnAcquireOfADeadConnectionDoesNotOutliveItsRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		var way redistest.Detainer
		n := startNode(t, m.Client(t, way.Options), conn.TransportTimeout/10)
		ended := make(chan struct{}, 10)
		var suspensions atomic.Int64
		n.Changed = func(_ string, err error) {
			if err != nil {
				suspensions.Add(1)
			}
		}
		n.Observe = func(_ time.Duration, err error) {
			if conn.TimedOut(err) {
				ended <- struct{}{}
			}
		}
		newAttempt(t, n, "k0").acquire().want(t, Granted) // the link is there

		way.Hold()
		a := newAttempt(t, n, "k1")
		a.acquire().want(t, Failed) // after NodeTimeout
		<-ended                     // after three times that
		redistest.Eventually(t, patience, "it is suspended", func() bool { return suspensions.Load() > 0 })
		eventuallySuspended(t, n, false)
		a.release().want(t, Missing)
		wantDebts(t, n, 1)
		way.LetGo()
		synctest.Wait()
		if !m.Mini.Exists(a.t0().Key()) {
			t.Error("the acquire was not executed")
		}
		redistest.Eventually(t, patience, "the orphan is gone", func() bool {
			return n.Debts() == 0 && !m.Mini.Exists(a.t0().Key())
		})
		if got := suspensions.Load(); got != 1 {
			t.Errorf("suspended %d times", got)
		}
	})
}

func (a *attempt) t0() *Target { return a.Entry.t }

// A release that got no answer is repeated until the server is back.
func TestAReleaseIsOwedUntilTheServerIsBack(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	p := redistest.StartProxy(t, s.Addr())
	n := newNode(t, s.Client(t, at(p.Addr()), quick))
	a := newAttempt(t, n, "k")
	a.acquire().want(t, Granted)
	_ = p.Refuse(true)
	p.ResetAll()
	a.release().want(t, Failed)
	wantDebts(t, n, 1)
	_ = p.Refuse(false)
	wantDebts(t, n, 0)
	redistest.Eventually(t, patience, "the key is gone", func() bool { return !exists(t, s, "k") })
}

// A release whose connection ends before its answer is sent again at once, on a new connection: it is no
// error, whether the server had executed it, and maybe given the key to another one since, or had not.
func TestAReleaseThatIsLostIsSentAgain(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	p := redistest.StartProxy(t, s.Addr())
	n := newNode(t, s.Client(t, at(p.Addr()), quick))
	newAttempt(t, n, "warm").acquire().want(t, Granted)
	for name, lose := range map[string]func(a *attempt) *ear{
		"executed": func(a *attempt) *ear { p.CutReplies(0); return a.release() },
		"not executed": func(a *attempt) *ear {
			p.BlackHole(true)
			before := n.Commands()
			released := a.release()
			redistest.Eventually(t, patience, "it is written", func() bool { return n.Commands() > before })
			p.BlackHole(false)
			p.ResetAll()
			return released
		},
	} {
		a := newAttempt(t, n, name)
		a.acquire().want(t, Granted)
		settle()
		lose(a).want(t, Deleted)
		if wantDebts(t, n, 0); exists(t, s, name) {
			t.Errorf("%s: the key is left", name)
		}
		settle()
	}
}

// Close drops debts: their keys live for their ttl, and no timer of theirs remains.
func TestCloseDropsDebts(t *testing.T) {
	t.Parallel()
	c := redis.NewClient(&redis.Options{Addr: redistest.RefusedAddr(t), DialerRetries: 1})
	defer c.Close()
	n := newNode(t, c)
	a := newAttempt(t, n, "k")
	a.mu.Lock()
	a.present, a.gone = true, n.at(soon()) // as after a grant
	a.mu.Unlock()
	a.release().want(t, Failed)
	wantDebts(t, n, 1)
	if err := n.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantDebts(t, n, 0)
}

// lab is a Node without a server, in a synctest bubble: the test is the link.
type lab struct {
	n *Node

	mu    sync.Mutex // guards queue
	queue []*request
}

func newLab() *lab {
	b := &lab{n: &Node{began: time.Now().Add(-1), life: context.Background()}}
	b.n.debts.open = map[*Entry]*time.Timer{}
	b.n.route = func(r *request) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.queue = append(b.queue, r)
	}
	return b
}

// pop takes the next request out, nil if there is none.
func (b *lab) pop() *request {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.queue) == 0 {
		return nil
	}
	r := b.queue[0]
	b.queue = b.queue[1:]
	return r
}

// next takes the next request out, which must be of that kind.
func (b *lab) next(t *testing.T, op op) *request {
	t.Helper()
	synctest.Wait()
	r := b.pop()
	if r == nil || r.op != op {
		t.Fatalf("the next request is %v, want a %s", r, op)
	}
	return r
}

func (b *lab) attempt(t *testing.T) *attempt { return newAttempt(t, b.n, "k") }

// offer is the lease of an offer.
func (b *lab) offer(t *testing.T) *attempt {
	a := b.attempt(t)
	offer := a.t0()
	offer.Init("k", offer.Owner(), "contender")
	offer.Carry(&Offer{Target: offer}, 0, longTTL, false)
	return a
}

// releaseOf releases the lease of an offer, and returns the request.
func (b *lab) releaseOf(t *testing.T, a *attempt) *request {
	a.Release(new(RequestBuf), nil, false, &TurnPass{Contender: "contender"})
	return b.next(t, opRelease)
}

// refreshedOffer is the lease of an offer that is being refreshed.
func (b *lab) refreshedOffer(t *testing.T) *attempt {
	a := b.offer(t)
	a.refresh()
	return a
}

var errReset = &net.OpError{Op: "read", Err: errors.New("connection reset")}

// settleMoot ends r as the link does with a request that is obsolete, and says whether it is.
func settleMoot(r *request) bool {
	if !r.obsolete(r.e.n.now(), 0) {
		return false
	}
	r.completeUseless()
	return true
}

// If nothing is indeterminate, a debt to a node that stays down ends with the ttl.
func TestADebtEndsWithTheTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newLab()
		a := b.attempt(t)
		a.acquire()
		b.next(t, opAcquire).complete(Reply{Kind: Granted, Counter: 1}, answered)
		begin := time.Now()
		a.release()
		tries := 0
		b.next(t, opRelease).complete(failed(errReset), notSent)
		for b.n.Debts() > 0 {
			time.Sleep(10 * time.Millisecond)
			synctest.Wait()
			for r := b.pop(); r != nil; r = b.pop() {
				tries++
				r.complete(failed(errReset), notSent)
			}
		}
		if d := time.Since(begin); d < longTTL || d > longTTL+2*debtSecond {
			t.Errorf("the debt ended after %v", d)
		}
		if tries < 40 || tries > 60 {
			t.Errorf("%d tries", tries)
		}
	})
}

// If something is, it is retried for longer: the old connection may be read at any time. But not
// forever.
func TestADoubtOutlivesTheTTLAndEndsInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newLab()
		a := b.attempt(t)
		a.acquire()
		b.next(t, opAcquire).complete(failed(errReset), lost)
		begin := time.Now()
		a.release()
		b.next(t, opRelease).complete(failed(errReset), notSent)
		for b.n.Debts() > 0 {
			time.Sleep(10 * time.Millisecond)
			synctest.Wait()
			for r := b.pop(); r != nil; r = b.pop() {
				r.complete(failed(errReset), notSent)
			}
		}
		if d := time.Since(begin); d < debtAge || d > debtAge+2*debtSecond {
			t.Errorf("the debt ended after %v", d)
		}
	})
}

// An indeterminate request is decided by three answers, one soon after the first and one a second
// later, or by a deletion that nothing else explains.
func TestADoubtIsSettledByThreeAnswersOrADeletion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newLab()
		a := b.attempt(t)
		a.acquire()
		b.next(t, opAcquire).complete(failed(errReset), lost)
		a.release()
		b.next(t, opRelease).complete(Reply{Kind: Missing}, answered)
		for _, wait := range []time.Duration{debtSoon, debtSecond} {
			time.Sleep(wait - time.Millisecond)
			synctest.Wait()
			if b.pop() != nil {
				t.Fatal("the next release came early")
			}
			time.Sleep(time.Millisecond + debtSpread)
			r := b.next(t, opRelease)
			if r.turnPass == nil {
				t.Error("a waiter is not notified")
			}
			r.complete(Reply{Kind: Missing}, answered)
		}
		if b.n.Debts() != 0 {
			t.Error("still owed after three answers")
		}

		a = b.attempt(t)
		a.acquire()
		b.next(t, opAcquire).complete(failed(errReset), lost)
		a.release()
		b.next(t, opRelease).complete(Reply{Kind: Deleted}, answered)
		if b.n.Debts() != 0 {
			t.Error("still owed after the deletion")
		}
	})
}

// A deletion that the confirmed grant explains does not decide a lost repair.
func TestADeletionOfTheGrantSettlesNoDoubtOfARepair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newLab()
		a := b.attempt(t)
		a.acquire()
		b.next(t, opAcquire).complete(Reply{Kind: Granted, Counter: 1}, answered)
		a.Repair(longTTL, 5, soon())
		b.next(t, opRepair).complete(failed(errReset), lost)
		a.release()
		b.next(t, opRelease).complete(Reply{Kind: Deleted}, answered)
		if b.n.Debts() != 1 {
			t.Fatal("nothing is owed although the repair may still be executed")
		}
		time.Sleep(debtSecond)
		b.next(t, opRelease).complete(Reply{Kind: Deleted}, answered)
		if b.n.Debts() != 0 {
			t.Error("still owed")
		}
	})
}

// A node may have granted an offer although its message was lost. A refresh that had no answer may give the
// key the full ttl then, whenever it is executed: so the release is owed.
func TestALostRefreshOfAnOffersLeaseIsFollowedByItsRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newLab()
		a := b.refreshedOffer(t)
		b.next(t, opRefresh).complete(failed(errReset), lost)
		b.releaseOf(t, a).complete(failed(errReset), notSent)
		if b.n.Debts() != 1 {
			t.Fatal("nothing is owed although the refresh may still be executed")
		}
		time.Sleep(debtSecond)
		b.next(t, opRelease).complete(Reply{Kind: Deleted}, answered)
		if b.n.Debts() != 0 {
			t.Error("still owed")
		}
	})
}

// Nor need the client know of a grant whose refresh had an answer; and the release may be refused, because
// the server is suspended, while the refresh has none yet.
func TestARefreshOfAGrantThatIsUnknownIsFollowedByItsRelease(t *testing.T) {
	type outcome struct {
		rep   Reply
		how   delivery
		again bool
	}
	for name, refreshed := range map[string]outcome{
		"renewed":  {Reply{Kind: Renewed, Counter: 9}, answered, true},
		"lost":     {failed(errReset), lost, true},
		"failed":   {failed(errors.New("OOM command not allowed when used memory > 'maxmemory'")), answered, true},
		"missing":  {Reply{Kind: Missing}, answered, false},
		"held":     {Reply{Kind: Held, Holder: "another"}, answered, false},
		"not sent": {failed(errReset), notSent, false},
	} {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, after the release: %v", name, late), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := newLab()
					a := b.refreshedOffer(t)
					refresh := b.next(t, opRefresh)
					if !late {
						refresh.complete(refreshed.rep, refreshed.how)
					}
					b.releaseOf(t, a).complete(failed(link.ErrSuspended), notSent)
					if late {
						refresh.complete(refreshed.rep, refreshed.how)
					}
					time.Sleep(debtSecond) // one that is owed is sent at once, or later
					if refreshed.again {
						b.next(t, opRelease).complete(Reply{Kind: Deleted}, answered)
					}
					synctest.Wait()
					if r := b.pop(); r != nil || b.n.Debts() != 0 {
						t.Errorf("%v follows, %d releases are owed", r, b.n.Debts())
					}
				})
			})
		}
	}
}

// A message about a grant that comes while the release is on its way is of a grant before it: it is released
// again only if the release was not executed.
func TestAReleaseThatCrossesTheMessageOfItsGrantIsSentOnce(t *testing.T) {
	for name, first := range map[string]struct {
		rep   Reply
		how   delivery
		again bool
	}{
		"deleted":  {Reply{Kind: Deleted}, answered, false},
		"held":     {Reply{Kind: Held, Holder: "another"}, answered, false},
		"missing":  {Reply{Kind: Missing}, answered, false},
		"refused":  {failed(redisError("READONLY x")), answered, true},
		"lost":     {failed(errReset), lost, true},
		"not sent": {failed(errReset), notSent, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newLab()
				a := b.offer(t)
				release := b.releaseOf(t, a)
				a.Granted(longTTL)
				if r := b.pop(); r != nil {
					t.Fatalf("%v was sent beside the release", r)
				}
				release.complete(first.rep, first.how)
				time.Sleep(debtSecond)
				synctest.Wait()
				if first.again {
					b.next(t, opRelease).complete(Reply{Kind: Deleted}, answered)
				}
				synctest.Wait()
				if r := b.pop(); r != nil || b.n.Debts() != 0 {
					t.Errorf("%v follows, %d releases are owed", r, b.n.Debts())
				}
			})
		})
	}
}

// What a release deletes may have been granted, so it does not prove that an acquire whose connection died
// was executed: that may still make the key the offer's, for the whole ttl.
func TestAGrantDoesNotExplainAnIndeterminateAcquire(t *testing.T) {
	for _, message := range []string{"none", "before the release", "beside it", "after it"} {
		t.Run("message: "+message, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newLab()
				a := b.offer(t)
				comes := func(when string) {
					if message == when {
						a.Granted(time.Second)
					}
				}
				a.acquire()
				b.next(t, opAcquire).complete(failed(errReset), lost)
				comes("before the release")
				release := b.releaseOf(t, a)
				comes("beside it")
				release.complete(Reply{Kind: Deleted}, answered)
				comes("after it")
				time.Sleep(debtSecond)
				b.next(t, opRelease).complete(Reply{Kind: Deleted}, answered)
			})
		})
	}
}

// A node that granted an offer and is cut off since then is asked to release it for as long as the key may be
// there: for the span, or for the ttl of a refresh, from when that may have been executed last.
func TestTheReleaseOfAGrantIsOwed(t *testing.T) {
	const span, executing = 500 * time.Millisecond, 3 * time.Second
	for name, most := range map[string]time.Duration{
		"granted": span, "being refreshed": longTTL, "refreshed": executing + longTTL,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newLab()
				a := b.attempt(t)
				a.Granted(span)
				begin := time.Now()
				if most > span {
					a.refresh()
					refresh := b.next(t, opRefresh)
					if most > longTTL {
						time.Sleep(executing)
						refresh.complete(Reply{Kind: Renewed, Counter: 9}, answered)
					}
				}
				a.release()
				for b.next(t, opRelease).complete(failed(errReset), notSent); b.n.Debts() > 0; synctest.Wait() {
					time.Sleep(10 * time.Millisecond)
					if r := b.pop(); r != nil {
						r.complete(failed(errReset), notSent)
					}
				}
				if d := time.Since(begin); d < most || d > most+2*debtSecond {
					t.Errorf("the debt ended after %v", d)
				}
			})
		})
	}
}

// Whatever the order in which an acquire and its release end, a grant is released after
// it is known.
func TestAGrantThatIsKnownAfterItsReleaseIsReleased(t *testing.T) {
	for name, end := range map[string]func(r *request){
		"granted": func(r *request) { r.complete(Reply{Kind: Granted, Counter: 1}, answered) },
		"lost":    func(r *request) { r.complete(failed(errReset), lost) },
		"error":   func(r *request) { r.complete(failed(redisError("ERR x")), answered) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newLab()
				a := b.attempt(t)
				a.acquire()
				create := b.next(t, opAcquire) // is being written: Release cannot take it back
				a.release()
				b.next(t, opRelease).complete(Reply{Kind: Missing}, answered)
				end(create)
				b.next(t, opRelease).complete(Reply{Kind: Deleted}, answered)
				if b.n.Debts() != 0 {
					t.Error("still owed")
				}
			})
		})
	}
}

// A release that has become obsolete, because the acquire was not granted, is not a debt.
func TestAMootReleaseIsNoDebt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newLab()
		a := b.attempt(t)
		a.acquire()
		create := b.next(t, opAcquire)
		heard := a.release()
		create.complete(Reply{Kind: Held, Holder: "other", TTL: longTTL}, answered)
		if !settleMoot(b.next(t, opRelease)) {
			t.Error("the release was written for nothing")
		}
		heard.want(t, Missing)
		if b.n.Debts() != 0 {
			t.Error("a debt for nothing")
		}
	})
}

// A key of another type is not ours: a release that finds one is answered for good.
func TestAKeyOfAnotherTypeIsNoDebt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newLab()
		a := b.attempt(t)
		a.acquire()
		b.next(t, opAcquire).complete(Reply{Kind: Granted, Counter: 1}, answered)
		heard := a.release()
		b.next(t, opRelease).complete(failed(redisError("WRONGTYPE x")), answered)
		heard.want(t, Failed)
		if b.n.Debts() != 0 {
			t.Error("a debt that nobody can pay")
		}
	})
}

// A node that is down costs bounded memory: past maxDebts releases are dropped.
func TestDebtsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newLab()
		for range maxDebts + 10 {
			a := b.attempt(t)
			a.acquire()
			b.pop().complete(Reply{Kind: Granted, Counter: 1}, answered)
			a.release()
			b.pop().complete(failed(errReset), lost)
		}
		if got := b.n.Debts(); got != maxDebts {
			t.Errorf("%d debts", got)
		}
		b.n.debts.close()
	})
}
