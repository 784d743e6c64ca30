package flightlocktest_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fenced"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	logging.Disable() // it reports every refused dial
	goleak.VerifyTestMain(m)
}

// everywhere runs a test in a bubble and outside.
func everywhere(t *testing.T, test func(t *testing.T, nodes *flightlocktest.Nodes)) {
	run := func(t *testing.T) {
		nodes := flightlocktest.Start(3)
		defer nodes.Close()
		test(t, nodes)
	}
	t.Run("in a bubble", func(t *testing.T) { synctest.Test(t, run) })
	t.Run("outside", run)
}

func mustClient(t *testing.T, nodes *flightlocktest.Nodes, opts flightlock.Options) *flightlock.Client {
	t.Helper()
	if opts.NodeTimeout == 0 {
		opts.NodeTimeout = 5 * time.Second // for the time outside of bubbles, on a busy machine
	}
	c, err := nodes.Client(opts)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// A lock that is lost on demand is over at once, whether it is refreshed or not, and whichever of
// the methods acquired it; others are not.
func TestLose(t *testing.T) {
	everywhere(t, func(t *testing.T, nodes *flightlocktest.Nodes) {
		for _, opts := range []flightlock.Options{{}, {NoPrefix: true}, {KeyPrefix: "mine:"}} {
			c := mustClient(t, nodes, opts)
			for name, lock := range map[string]func(key string) (*flightlock.Lock, error){
				"SingleFlightLock": func(key string) (*flightlock.Lock, error) {
					return c.SingleFlightLock(t.Context(), key, time.Minute, nil)
				},
				"TryLock": func(key string) (*flightlock.Lock, error) { return c.TryLock(t.Context(), key, time.Minute) },
			} {
				l, err1 := lock(name)
				other, err2 := lock("other" + name)
				if err := errors.Join(err1, err2); err != nil {
					t.Fatal(err)
				}
				ctx := l.Context(t.Context())
				if err := nodes.Lose(t.Context(), name); err != nil {
					t.Fatal(err)
				}
				<-ctx.Done()
				if !errors.Is(l.Err(), flightlock.ErrLockLost) || !errors.Is(context.Cause(ctx), flightlock.ErrLockLost) {
					t.Errorf("%s: %v, cause %v", name, l.Err(), context.Cause(ctx))
				}
				if err := l.Release(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
					t.Errorf("Release: %v", err)
				}
				if err := other.Release(t.Context()); err != nil {
					t.Errorf("another lock: %v", err)
				}
			}
		}
	})
}

// Lose waits until somebody holds the key, and a waiter gets it next.
func TestLoseWaitsForAHolder(t *testing.T) {
	everywhere(t, func(t *testing.T, nodes *flightlocktest.Nodes) {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		if err := nodes.Lose(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("nobody holds it: %v", err)
		}
		c := mustClient(t, nodes, flightlock.Options{})
		ended := make(chan error)
		for range 2 {
			go func() {
				l, err := c.SingleFlightLock(t.Context(), "k", time.Minute, nil)
				if err != nil {
					ended <- err
					return
				}
				<-l.Context(t.Context()).Done()
				ended <- l.Err()
			}()
		}
		for range 2 {
			if err := nodes.Lose(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			if err := <-ended; !errors.Is(err, flightlock.ErrLockLost) {
				t.Errorf("got %v", err)
			}
		}
	})
}

// One of three nodes that is down, or distant, does not stop locking; two do.
func TestSomeNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes := flightlocktest.Start(3)
		defer nodes.Close()
		c := mustClient(t, nodes, flightlock.Options{NodeTimeout: 100 * time.Millisecond})
		try := func() (time.Duration, error) {
			began := time.Now()
			l, err := c.SingleFlightLock(t.Context(), "k", time.Minute, flightlock.FailFast(flightlock.NoRetry()))
			took := time.Since(began)
			if err == nil {
				err = l.Release(t.Context())
			}
			return took, err
		}
		for _, step := range []struct {
			what        string
			do          func()
			least, most time.Duration // of a lock
			err         error
		}{
			{"all are up", func() {}, 0, 0, nil},
			{"one is down", func() { nodes.Down(true, 2) }, 0, 0, nil},
			{"two are down", func() { nodes.Down(true, 0) }, 0, time.Second, flightlock.ErrUnavailable},
			{"all are up again", func() { nodes.Down(false) }, 0, 0, nil},
			{"one is far away", func() { nodes.Delay(20*time.Millisecond, 1) }, 0, 0, nil},
			// A second round trip if their counters differ.
			{"all are", func() {
				nodes.Delay(20 * time.Millisecond)
			}, 40 * time.Millisecond, 80 * time.Millisecond, nil},
			{"none is", func() { nodes.Delay(0) }, 0, 0, nil},
		} {
			step.do()
			time.Sleep(10 * time.Second) // virtual: requests in flight arrive, and suspended nodes are probed
			if took, err := try(); !errors.Is(err, step.err) || took < step.least || took > step.most {
				t.Errorf("%s: %v, %v", step.what, took, err)
			}
		}
	})
}

// A client that sent nothing while all nodes were down does not notice it: its first attempt after that is
// good.
func TestDownWhileNobodyLocks(t *testing.T) {
	everywhere(t, func(t *testing.T, nodes *flightlocktest.Nodes) {
		c := mustClient(t, nodes, flightlock.Options{})
		for range 3 {
			l, err := c.TryLock(t.Context(), "k", time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			nodes.Down(true)
			nodes.Down(false)
			if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
			nodes.Down(true)
			nodes.Down(false)
			if err := nodes.Redis(0).Ping(t.Context()).Err(); err != nil {
				t.Error(err)
			}
		}
	})
}

// The values of the tested code live on the nodes, too.
func TestRedis(t *testing.T) {
	everywhere(t, func(t *testing.T, nodes *flightlocktest.Nodes) {
		c := mustClient(t, nodes, flightlock.Options{})
		loads := 0
		f, err := fetch.New(c, fetch.Plain(
			func(ctx context.Context, key string) (string, bool, error) {
				v, err := nodes.Redis(0).Get(ctx, key).Result()
				if errors.Is(err, redis.Nil) {
					return "", false, nil
				}
				return v, err == nil, err
			},
			func(ctx context.Context, key, v string) error {
				return fenced.Set(ctx, nodes.Redis(0), key, v, 1, time.Hour)
			},
		), fetch.Each(func(context.Context, string) (string, error) { loads++; return "v", nil }), fetch.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close(t.Context())
		for range 3 {
			if v, err := f.Get(t.Context(), "k"); v != "v" || err != nil {
				t.Errorf("%q, %v", v, err)
			}
		}
		if loads != 1 {
			t.Errorf("%d loads", loads)
		}
		nodes.Down(true, 0)
		if err := nodes.Redis(0).Ping(t.Context()).Err(); err == nil {
			t.Error("a node that is down answers")
		}
		nodes.Down(false)
	})
}

func TestNoSuchNode(t *testing.T) {
	nodes := flightlocktest.Start(3)
	defer nodes.Close()
	for what, do := range map[string]func(){
		"Redis":          func() { nodes.Redis(3) },
		"Down":           func() { nodes.Down(true, 0, -1) },
		"Delay":          func() { nodes.Delay(0, 3) },
		"negative Delay": func() { nodes.Delay(-1) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s does not panic", what)
				}
			}()
			do()
		}()
	}
}

// In a bubble a minute of waiting takes no time, and clients are like processes: they
// exclude each other.
func TestVirtualTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes := flightlocktest.Start(3)
		defer nodes.Close()
		a := mustClient(t, nodes, flightlock.Options{})
		b := mustClient(t, nodes, flightlock.Options{})
		l, err := a.TryLock(t.Context(), "k", time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrNotAcquired) {
			t.Errorf("got %v", err)
		}
		began := time.Now()
		if _, err := b.SingleFlightLock(t.Context(), "k", time.Second, nil); err != nil {
			t.Error(err)
		}
		if waited := time.Since(began); waited < 59*time.Second || l.Err() == nil {
			t.Errorf("waited %v, the first: %v", waited, l.Err())
		}
	})
}

// The nodes are those of Start, and Close closes what Client has made.
func TestClientsBelongToTheirNodes(t *testing.T) {
	nodes := flightlocktest.Start(1)
	defer nodes.Close()
	c := mustClient(t, nodes, flightlock.Options{})
	if _, err := nodes.Client(flightlock.Options{NodeTimeout: -1}); !errors.Is(err, flightlock.ErrInvalid) {
		t.Errorf("got %v", err)
	}
	nodes.Close()
	nodes.Close()
	if _, err := c.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// A Lose that has failed has not taken the key from its holder.
func TestLoseThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes := flightlocktest.Start(3)
		defer nodes.Close()
		opts := flightlock.Options{NodeTimeout: 50 * time.Millisecond}
		a, b := mustClient(t, nodes, opts), mustClient(t, nodes, opts)
		l, err := a.TryLock(t.Context(), "k", time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		nodes.Down(true)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err = nodes.Lose(ctx, "k")
		t.Log(err)
		nodes.Down(false)
		if err == nil {
			t.Fatal("no error")
		}
		time.Sleep(10 * time.Second)
		if l.Err() != nil {
			t.Fatal(l.Err())
		}
		other, err := b.TryLock(t.Context(), "k", time.Second)
		if err == nil && l.Err() == nil {
			t.Errorf("two holders: tokens %d and %d", l.Fence(), other.Fence())
		}
	})
}

// Nobody would close a Client that is made after Close.
func TestClientAfterClose(t *testing.T) {
	nodes := flightlocktest.Start(1)
	nodes.Close()
	if c, err := nodes.Client(flightlock.Options{}); c != nil || !errors.Is(err, flightlock.ErrClosed) {
		t.Errorf("a Client: %v, %v", c != nil, err)
	}
}

// A Lose that has failed because the nodes are too slow for the holder has not taken the key from it either.
func TestLoseWhileNodesAreTooSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes := flightlocktest.Start(3)
		defer nodes.Close()
		a := mustClient(t, nodes, flightlock.Options{NodeTimeout: 50 * time.Millisecond})
		b := mustClient(t, nodes, flightlock.Options{})
		l, err := a.TryLock(t.Context(), "k", time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		nodes.Delay(100 * time.Millisecond)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := nodes.Lose(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("Lose: %v", err)
		}
		if other, err := b.TryLock(t.Context(), "k", time.Second); err == nil && l.Err() == nil {
			t.Errorf("two holders: tokens %d and %d", l.Fence(), other.Fence())
		}
		nodes.Delay(0)
		time.Sleep(time.Second) // a probe has been answered
		if err := l.Release(t.Context()); err != nil {
			t.Errorf("Release: %v", err)
		}
	})
}

// While a holder does not know yet that it has lost the key, nobody else has it.
func TestLoseMakesNoSecondHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes := flightlocktest.Start(3)
		defer nodes.Close()
		a := mustClient(t, nodes, flightlock.Options{})
		b := mustClient(t, nodes, flightlock.Options{DisableNotify: true})
		nodes.Delay(10 * time.Millisecond)
		for phase := range 20 { // of the attempts: some arrive between the steps of Lose
			key := fmt.Sprint("k", phase)
			l, err := a.TryLock(t.Context(), key, time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan error)
			go func() {
				_, err := b.SingleFlightLock(t.Context(), key, time.Minute,
					flightlock.LimitedRetry(time.Millisecond, 1000))
				if err == nil {
					err = l.Err()
				}
				done <- err
			}()
			time.Sleep(time.Duration(100+phase) * time.Millisecond) // the bubble's time
			if err := nodes.Lose(t.Context(), key); err != nil {
				t.Fatal(err)
			}
			if err := <-done; !errors.Is(err, flightlock.ErrLockLost) {
				t.Errorf("phase %d: when the next holder had the key, the Err of the one before was %v", phase, err)
			}
		}
	})
}
