package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// panicsAt is a strategy that panics when it is called for that failure, or a later one.
type panicsAt int

func (p panicsAt) Next(attempt int) (time.Duration, bool) {
	if attempt >= int(p) {
		panic(p)
	}
	return 5 * time.Millisecond, true
}

// recovered calls f and returns what it panicked with.
func recovered(f func()) (v any) {
	defer func() { v = recover() }()
	f()
	return nil
}

// A strategy's panic is returned to its caller, no matter which goroutine's attempt failed, and
// affects that caller alone: those before and after it in the queue get the lock.
func TestAPanicOfAStrategyIsItsCallers(t *testing.T) {
	for _, n := range []int{1, 3} {
		for _, at := range []panicsAt{1, 5} {
			t.Run(fmt.Sprintf("nodes=%d/failure=%d", n, at), func(t *testing.T) {
				bubble(t, n, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
					other, c := newClient(t, flightlock.Options{}, clients...), newClient(t, flightlock.Options{}, clients...)
					for _, behind := range []bool{false, true} {
						l := mustLock(t, other, "k", 10*time.Second)
						released := make(chan struct{}, 2)
						wait := func() {
							mustRelease(t, mustLock(t, c, "k", time.Second))
							released <- struct{}{}
						}
						if behind {
							go wait()
							synctest.Wait()
						}
						if v := recovered(func() { _, _ = c.SingleFlightLock(t.Context(), "k", time.Second, at) }); v != at {
							t.Errorf("behind %v: the call panicked with %v, want %v", behind, v, at)
						}
						if !behind {
							go wait()
						}
						go wait()
						time.Sleep(time.Second)
						mustRelease(t, l)
						<-released
						<-released
						if s := c.Stats(); s.Waiters != 0 || s.Held != 0 {
							t.Errorf("behind %v: %+v", behind, s)
						}
					}
					if v := recovered(func() { // one that arrives when the nodes are down
						_, _ = c.Lock(t.Context(), "k", time.Second, flightlock.NoRetry())
					}); v != nil {
						t.Error(v)
					}
				})
			})
		}
	}
}

// A NewOwner that panics, or ends its goroutine, leaves nothing behind: the attempt still has an owner, whose name says
// so.
func TestANewOwnerThatDoesNotReturnCostsOnlyItsLabel(t *testing.T) {
	for label, fails := range map[string]func(){
		"NewOwner panicked: no label":    func() { panic("no label") },
		"NewOwner called runtime.Goexit": runtime.Goexit,
	} {
		for _, n := range []int{1, 3} {
			bubble(t, n, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
				var broken atomic.Bool
				c := newClient(t, flightlock.Options{NewOwner: func() string {
					if broken.Load() {
						fails()
					}
					return "me"
				}}, clients...)
				mustRelease(t, mustLock(t, c, "k", time.Second))
				broken.Store(true)
				l := mustLock(t, c, "k", time.Second)
				if got := l.Owner(); !strings.HasPrefix(got, label+"#") {
					t.Errorf("the owner is %q", got)
				}
				mustRelease(t, l)
				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				if err := c.Close(ctx); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// stuck is a log that blocks on a line until it is ended.
type stuck struct {
	slog.Handler
	end chan struct{}
}

func (stuck) Enabled(context.Context, slog.Level) bool { return true }

func (s stuck) Handle(context.Context, slog.Record) error {
	<-s.end
	return nil
}

// A log that hangs delays nothing: the Context of the lost lock that it was about to log ends in
// time, the other locks of that node are refreshed, and a suspended node comes back.
func TestALogThatHangsHoldsNothingUp(t *testing.T) {
	for _, n := range []int{1, 3} {
		bubble(t, n, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			log := stuck{end: make(chan struct{})}
			c := newClient(t, flightlock.Options{Logger: slog.New(log), DisableQuarantine: true}, clients...)
			defer close(log.end)
			l := mustLock(t, c, "runs out", time.Second)
			until, ctx := l.Until(), l.Context(t.Context())
			time.Sleep(1500 * time.Millisecond)
			if ctx.Err() == nil || !errors.Is(l.Err(), flightlock.ErrLockLost) {
				t.Errorf("%v after Until its Context is %v, Err %v", time.Since(until), ctx.Err(), l.Err())
			}

			time.Sleep(10 * time.Second) // so that the next loss is logged
			var kept []*flightlock.Lock
			for i := range 20 {
				l := mustLock(t, c, fmt.Sprint("kept", i), time.Second)
				if err := l.AutoRefresh(flightlock.RefreshPolicy{}); err != nil {
					t.Fatal(err)
				}
				kept = append(kept, l)
			}
			taken := mustLock(t, c, "taken", time.Minute)
			ctx = taken.Context(t.Context())
			for _, n := range nodes {
				n.Mini.Del("lock:taken")
			}
			go taken.Refresh(t.Context())
			time.Sleep(5 * time.Second)
			if ctx.Err() == nil {
				t.Error("a refresh found that the lock was gone, and its Context has not ended")
			}
			for _, l := range kept {
				if err := l.Err(); err != nil {
					t.Fatal(err)
				}
				mustRelease(t, l)
			}

			for _, n := range nodes {
				n.Down(true)
			}
			_, err := c.SingleFlightLock(t.Context(), "k", time.Second, flightlock.LimitedRetry(10*time.Millisecond, 10))
			if !errors.Is(err, flightlock.ErrUnavailable) {
				t.Error(err)
			}
			for _, n := range nodes {
				n.Down(false)
			}
			time.Sleep(10 * time.Second)
			if s := c.Stats(); s.Suspended != 0 {
				t.Errorf("%d nodes are suspended still", s.Suspended)
			}
			mustRelease(t, mustLock(t, c, "k", time.Second))
		})
	}
}
