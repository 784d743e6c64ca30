package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/flightlock/flightlock/internal/link"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A server that is stopped gets no more requests once its answers are overdue: they fail at once,
// and nothing accumulates, long before its connection is given up.
func TestAStoppedServerIsLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := startNode(t, m.Client(t), time.Second)
		newAttempt(t, n, "warm").acquire().want(t, Granted) // the link is there
		m.Stall(true)
		late := newAttempt(t, n, "late")
		first := late.acquire()
		if rep := first.want(t, Failed); !errors.Is(rep.Err, errLate) {
			t.Error(rep.Err)
		}
		before := runtime.NumGoroutine()
		for i := range 5000 {
			rep := newAttempt(t, n, fmt.Sprint("k", i)).acquire().wantNow(t, Failed)
			if !errors.Is(rep.Err, ErrStalled) {
				t.Fatalf("a request to a stalled server fails with %v", rep.Err)
			}
		}
		if after := runtime.NumGoroutine(); after > before+10 {
			t.Errorf("%d goroutines, %d before", after, before)
		}
		if n.Suspended() {
			t.Error("it is suspended already")
		}
		m.Stall(false)
		late.release().want(t, Deleted) // what was granted late, on the same connection
		newAttempt(t, n, "again").acquire().want(t, Granted)
	})
}

// A server that falls silent just after it has answered is suspended when three times NodeTimeout are over.
func TestASilentServerIsSuspended(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := newImpatientNode(t, m.Client(t))
		told := make(chan error, 10)
		n.Changed = func(_ string, err error) { told <- err }
		newAttempt(t, n, "k").acquire().want(t, Granted)
		m.Down(true)
		m.Stall(true)
		a := newAttempt(t, n, "k2")
		a.acquire().want(t, Failed)
		time.Sleep(4 * n.timeout) // the bubble's time, as below
		rep := newAttempt(t, n, "k3").acquire().wantNow(t, Failed)
		if !n.Suspended() || !errors.Is(rep.Err, link.ErrSuspended) {
			t.Errorf("suspended: %v; %v", n.Suspended(), rep.Err)
		}
		m.Down(false)
		m.Stall(false)
		time.Sleep(2 * redialEvery)
		newAttempt(t, n, "k3").acquire().want(t, Granted)
		a.release()
		if suspended, back := <-told, <-told; suspended == nil || back != nil || len(told) > 0 {
			t.Errorf("%v and %v were reported, and %d more", suspended, back, len(told))
		}
	})
}

// A server whose exchanges end without an answer is suspended: its requests fail at once, with the
// reason; a probe finds out that it is back. Both changes are reported.
func TestASuspendedServerIsProbed(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	p := redistest.StartProxy(t, s.Addr())
	n := newNode(t, s.Client(t, at(p.Addr()), quick))
	changes := make(chan error, 10)
	n.Changed = func(_ string, err error) { changes <- err }
	held := newAttempt(t, n, "held")
	held.acquire().want(t, Granted)

	_ = p.Refuse(true)
	p.ResetAll()
	for range 3 {
		newAttempt(t, n, "k").acquire().want(t, Failed)
	}
	eventuallySuspended(t, n, true)
	redistest.Eventually(t, patience, "a request says why it fails", func() bool {
		why := newAttempt(t, n, "k").acquire().wantNow(t, Failed).Err.Error()
		return strings.Contains(why, "suspended") && strings.Contains(why, "refused")
	})
	held.release().wantNow(t, Failed)
	wantDebts(t, n, 1)

	_ = p.Refuse(false)
	eventuallySuspended(t, n, false)
	newAttempt(t, n, "k2").acquire().want(t, Granted)
	wantDebts(t, n, 0)
	redistest.Eventually(t, patience, "the debt was paid", func() bool { return !exists(t, s, "held") })
	if err := <-changes; err == nil {
		t.Error("the recovery was reported first")
	}
	if err := <-changes; err != nil {
		t.Errorf("%v was reported, want the recovery", err)
	}
}

// A server whose writes are paused lets everybody in. It is suspended once, and not again after each probe.
func TestAServerWhoseWritesArePausedIsSuspendedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		var paused atomic.Bool
		var probes atomic.Int64
		unpaused := make(chan struct{})
		m.Mini.Server().SetPreHook(func(_ *server.Peer, cmd string, _ ...string) bool {
			switch {
			case cmd == "HELLO":
				probes.Add(1)
			case cmd == "EVALSHA" && paused.Load():
				<-unpaused
			}
			return false
		})
		n := newImpatientNode(t, m.Client(t))
		var suspended, back atomic.Int64
		n.Changed = func(_ string, err error) {
			if err == nil {
				back.Add(1)
			} else {
				suspended.Add(1)
			}
		}
		newAttempt(t, n, "k").acquire().want(t, Granted)
		paused.Store(true)
		for range 1000 {
			newAttempt(t, n, "k2").acquire()
			time.Sleep(10 * time.Millisecond) // the bubble's time
		}
		if probes.Load() < 6 || suspended.Load() != 1 || back.Load() != 0 {
			t.Errorf("it was probed %d times, suspended %d times, and back %d times",
				probes.Load(), suspended.Load(), back.Load())
		}
		paused.Store(false)
		close(unpaused)
		eventuallySuspended(t, n, false)
		newAttempt(t, n, "k3").acquire().want(t, Granted)
	})
}

// Debts to a server are paid at once when it is back, however long their retry would have waited:
// others wait for that key.
func TestTheEndOfASuspensionPaysDebts(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	p := redistest.StartProxy(t, s.Addr())
	n := newNode(t, s.Client(t, at(p.Addr()), quick))
	held := newAttempt(t, n, "held")
	held.acquire().want(t, Granted)
	_ = p.Refuse(true)
	p.ResetAll()
	for range 3 {
		newAttempt(t, n, "k").acquire().want(t, Failed)
	}
	eventuallySuspended(t, n, true)
	held.mu.Lock()
	held.released, held.releasePending = true, true // as after a release that failed
	held.mu.Unlock()
	n.debts.owe(&held.Entry, time.Hour)

	_ = p.Refuse(false)
	redistest.Eventually(t, patience, "the key is gone", func() bool { return !exists(t, s, "held") })
	wantDebts(t, n, 0)
}

// One connection that breaks is no reason to suspend a server.
func TestOneBrokenConnectionSuspendsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := newNode(t, m.Client(t))
		n.Changed = func(_ string, err error) { t.Errorf("a change was reported: %v", err) }
		newAttempt(t, n, "k").acquire().want(t, Granted)
		settle()
		m.Stall(true)
		lost := newAttempt(t, n, "k2").acquire()
		m.Cut()
		m.Stall(false)
		lost.want(t, Failed)
		newAttempt(t, n, "k3").acquire().want(t, Granted)
	})
}

// Close ends the probing of a server that never comes back.
func TestCloseEndsProbing(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t, at(redistest.RefusedAddr(t)), quick))
	for range 3 {
		newAttempt(t, n, "k").acquire().want(t, Failed)
	}
	eventuallySuspended(t, n, true) // and goleak looks for the goroutine
}

// An answer that takes slightly too long suspends nobody: other keys are served.
func TestAHiccupSuspendsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		const timeout = 50 * time.Millisecond
		n := startNode(t, m.Client(t), timeout)
		n.Changed = func(_ string, err error) { t.Errorf("a change was reported: %v", err) }
		newAttempt(t, n, "warm").acquire().want(t, Granted)
		synctest.Wait()
		m.SetDelay(timeout * 4 / 5) // a round trip takes two
		newAttempt(t, n, "late").acquire().want(t, Failed)
		m.SetDelay(0)
		time.Sleep(timeout) // the bubble's time, as below
		newAttempt(t, n, "k2").acquire().want(t, Granted)
		time.Sleep(time.Second) // until the late answer has come
	})
}

// A server, or what is in front of it, that answers probes and closes the connection for scripts is suspended
// for at least the pause between two probes each time, and is not dialled and reported hundreds of times a
// second.
func TestAServerThatAnswersProbesOnlyIsLeftAlone(t *testing.T) {
	// with an answer to a script that does not exist, as of a probe, it is back
	for _, back := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			m := redistest.StartMemNode(t, "10.0.0.1:6379")
			var dials atomic.Int64
			m.Mini.Server().SetPreHook(func(c *server.Peer, cmd string, args ...string) bool {
				if cmd == "SCRIPT" || cmd == "EVALSHA" && !(back && strings.Trim(args[0], "0") == "") {
					c.Close()
					return true
				}
				return false
			})
			n := newNode(t, m.Client(t, redistest.CountDials(&dials)))
			var told changes
			n.Changed = told.add
			const lasts = 2 * time.Second
			for began := time.Now(); time.Since(began) < lasts; time.Sleep(time.Millisecond) {
				<-newAttempt(t, n, fmt.Sprint("k", time.Now().UnixNano()%8)).acquire().heard
			}
			told.mu.Lock()
			defer told.mu.Unlock()
			changes, probed, most := len(told.all), int(dials.Load()), 2+int(lasts/redialEvery)
			if changes > 2*most || probed > most || probed < 4 || back != (changes > 1) {
				t.Errorf("back: %v; %d changes were reported and it was dialled %d times in %v", back, changes, probed,
					lasts)
			}
		})
	}
}

// However many refreshes have too few votes, a server that is suspended gets a probe for them every quarter
// of NodeTimeout at most, also if its dials hang for minutes; one that answers none, because it needs none;
// and one that refuses logins is probed as ever.
func TestProbesForRefreshesAreBounded(t *testing.T) {
	const lasts = 2 * time.Second
	for name, tc := range map[string]struct {
		change func(m *redistest.MemNode, hangs *atomic.Bool)
		most   func(n *Node) int64
	}{
		"well":    {func(*redistest.MemNode, *atomic.Bool) {}, func(*Node) int64 { return 0 }},
		"refused": {func(m *redistest.MemNode, _ *atomic.Bool) { m.Down(true) }, everyQuarter},
		"lost":    {func(m *redistest.MemNode, _ *atomic.Bool) { m.Lose(true) }, everyQuarter},
		"hangs":   {func(m *redistest.MemNode, hangs *atomic.Bool) { hangs.Store(true); m.Cut() }, everyQuarter},
		"no login": {func(m *redistest.MemNode, _ *atomic.Bool) { m.RequireAuth("other"); m.Cut() },
			func(*Node) int64 { return 4 + int64(lasts/redialEvery) }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := redistest.StartMemNode(t, "10.0.0.1:6379")
				var hangs atomic.Bool
				var dials atomic.Int64
				end := make(chan struct{})
				defer close(end)
				n := newImpatientNode(t, m.Client(t, func(o *redis.Options) {
					dial := o.Dialer
					o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
						dials.Add(1)
						if hangs.Load() { // and ignores ctx
							<-end
							return nil, errors.New("no connection")
						}
						return dial(ctx, network, addr)
					}
				}))
				newAttempt(t, n, "k").acquire().want(t, Granted)
				tc.change(m, &hangs)
				dials.Store(0)
				for began := time.Now(); time.Since(began) < lasts; time.Sleep(700 * time.Microsecond) {
					newAttempt(t, n, "k2").acquire()
					n.ProbeNow()
				}
				if got, most := dials.Load(), tc.most(n); got > most {
					t.Errorf("%d dials in %v, want %d at most", got, lasts, most)
				}
			})
		})
	}
}

func everyQuarter(n *Node) int64 {
	return 2 + int64(2*time.Second/(n.timeout/4)+2*time.Second/redialEvery)
}

// A dialer that ignores its context, and hangs for as long as the server is away, costs a limited number of
// goroutines, however long that is.
func TestProbesWithADialerThatHangsDoNotPileUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		var away atomic.Bool
		var hanging atomic.Int64
		back := make(chan struct{})
		n := newImpatientNode(t, m.Client(t, func(o *redis.Options) {
			dial := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if away.Load() {
					hanging.Add(1)
					<-back
					hanging.Add(-1)
				}
				return dial(ctx, network, addr)
			}
		}))
		a := newAttempt(t, n, "key")
		a.acquire().want(t, Granted)
		away.Store(true)
		m.Cut()
		a.release()
		time.Sleep(10 * time.Minute) // the bubble's time: hundreds of probes
		const most = 100 + 8         // dials of the link, and those that were in a hurry
		if got := hanging.Load(); got > most {
			t.Errorf("%d dials hang", got)
		}
		away.Store(false)
		close(back)
		time.Sleep(10 * time.Second)
		newAttempt(t, n, "other").acquire().want(t, Granted)
	})
}
