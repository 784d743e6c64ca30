package outage

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// stalledAlone runs fn on a single node that has answered promptly and then stops: the next caller
// sends its own request to it, and no answer arrives within NodeTimeout.
func stalledAlone(
	t *testing.T, timeout time.Duration, fn func(t *testing.T, c *flightlock.Client, node *redistest.MemNode),
) {
	t.Helper()
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{NodeTimeout: timeout}, clients...)
		lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
		nodes[0].Stall(true)
		fn(t, c, nodes[0])
		nodes[0].Stall(false)
		time.Sleep(10 * time.Second) // for the doubts
		if n := c.Stats().Debts; n != 0 {
			t.Errorf("%d debts", n)
		}
		if keys := lockKeysOf(nodes[0]); len(keys) != 0 {
			t.Errorf("left behind: %q", keys)
		}
	})
}

func lockKeysOf(n *redistest.MemNode) (keys []string) {
	for _, k := range n.Mini.Keys() {
		if len(k) > 5 && k[:5] == "lock:" {
			keys = append(keys, k)
		}
	}
	return keys
}

// A ctx whose deadline comes before NodeTimeout ends the call by then, although the node
// that would have to answer has stopped. Whether it has is not known yet.
func TestAContextIsShorterThanAStall(t *testing.T) {
	t.Parallel()
	stalledAlone(t, 2*time.Second, func(t *testing.T, c *flightlock.Client, _ *redistest.MemNode) {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		start := time.Now()
		_, err := c.SingleFlightLock(ctx, "k", 10*time.Second, nil)
		if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, flightlock.ErrUnavailable) ||
			errors.Is(err, flightlock.ErrNotAcquired) {
			t.Error(err)
		}
		if took := time.Since(start); took != 20*time.Millisecond {
			t.Errorf("it took %v", took)
		}
	})
}

// No call blocks for much longer than NodeTimeout, no matter which goroutine sends the request.
func TestAStallBlocksForNodeTimeout(t *testing.T) {
	t.Parallel()
	const timeout = time.Second
	stalledAlone(t, timeout, func(t *testing.T, c *flightlock.Client, node *redistest.MemNode) {
		start := time.Now()
		if _, err := c.TryLock(t.Context(), "k", 10*time.Second); !errors.Is(err, flightlock.ErrUnavailable) {
			t.Error(err)
		}
		if took := time.Since(start); took > timeout*9/8 {
			t.Errorf("TryLock took %v", took)
		}
		node.Stall(false)
		time.Sleep(10 * time.Second)
		l := lockkit.Lock(t, c, "k", 10*time.Second)
		node.Stall(true)
		start = time.Now()
		if err := l.Release(t.Context()); !errors.Is(err, flightlock.ErrUnavailable) {
			t.Error(err)
		}
		if took := time.Since(start); took > timeout*9/8 {
			t.Errorf("Release took %v", took)
		}
	})
}

// A caller whose ctx ends while it waits behind one whose request is not answered knows only that others
// wait, as long as the node has time to answer, and then that it has not answered.
func TestAStallBehindACaller(t *testing.T) {
	stalledAlone(t, time.Second, func(t *testing.T, c *flightlock.Client, _ *redistest.MemNode) {
		first := make(chan error, 1)
		go func() {
			_, err := c.TryLock(t.Context(), "k", 10*time.Second)
			first <- err
		}()
		synctest.Wait()
		behind := func(d time.Duration) error {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			_, err := c.SingleFlightLock(ctx, "k", 10*time.Second, nil)
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			return err
		}
		if err := behind(20 * time.Millisecond); !errors.Is(err, flightlock.ErrNotAcquired) ||
			errors.Is(err, flightlock.ErrUnavailable) {
			t.Error(err)
		}
		if err := behind(1500 * time.Millisecond); !errors.Is(err, flightlock.ErrUnavailable) ||
			errors.Is(err, flightlock.ErrNotAcquired) {
			t.Error(err)
		}
		<-first
	})
}

// Close while callers' own requests are not answered.
func TestCloseDuringAStall(t *testing.T) {
	const timeout = time.Second
	stalledAlone(t, timeout, func(t *testing.T, c *flightlock.Client, node *redistest.MemNode) {
		results := make(chan error, 2)
		for _, key := range []string{"k", "k2"} {
			go func() {
				_, err := c.SingleFlightLock(t.Context(), key, 10*time.Second, nil)
				results <- err
			}()
		}
		synctest.Wait()
		closed := make(chan error, 1)
		go func() { closed <- c.Close(t.Context()) }()
		start := time.Now()
		for range 2 {
			if err := <-results; !errors.Is(err, flightlock.ErrClosed) {
				t.Error(err)
			}
		}
		if took := time.Since(start); took > timeout*9/8 {
			t.Errorf("callers were kept for %v", took)
		}
		node.Stall(false)
		if err := <-closed; err != nil {
			t.Error(err)
		}
	})
}

// A ctx that is canceled ends the call then, as one with a deadline does, although the only node has stopped.
func TestACancelDuringAStallOfTheOnlyNode(t *testing.T) {
	t.Parallel()
	stalledAlone(t, 5*time.Second, func(t *testing.T, c *flightlock.Client, _ *redistest.MemNode) {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(20*time.Millisecond, cancel)
		start := time.Now()
		if _, err := c.SingleFlightLock(ctx, "warm", 10*time.Second, nil); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if took := time.Since(start); took > 70*time.Millisecond {
			t.Errorf("it took %v", took)
		}
	})
}

// A provider of credentials that hangs, and may not even have a ctx that it could honour, is a slow node: it
// is asked when a connection has ended, here by its age, and keeps no caller beyond the times above.
func TestAProviderOfCredentialsThatHangs(t *testing.T) {
	const timeout = time.Second
	for name, set := range map[string]func(o *redis.Options, wait func()){
		"it has a ctx": func(o *redis.Options, wait func()) {
			o.CredentialsProviderContext = func(context.Context) (string, string, error) {
				wait()
				return "", "", nil
			}
		},
		"it has none": func(o *redis.Options, wait func()) {
			o.CredentialsProvider = func() (string, string) {
				wait()
				return "", ""
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var hangs atomic.Bool
				back := make(chan struct{})
				node := redistest.StartMemNode(t, "10.0.0.1:6379")
				c := lockkit.New(t, flightlock.Options{NodeTimeout: timeout}, node.Client(t, func(o *redis.Options) {
					set(o, func() {
						if hangs.Load() {
							<-back
						}
					})
				}))
				l := lockkit.Lock(t, c, "k", time.Minute)
				hangs.Store(true)
				node.Down(true) // the next request needs another connection
				node.Down(false)
				start := time.Now()
				time.AfterFunc(time.Minute, func() {
					hangs.Store(false)
					close(back)
				})
				if err := l.Release(t.Context()); !errors.Is(err, flightlock.ErrUnavailable) {
					t.Error(err)
				}
				if took := time.Since(start); took > timeout*9/8 {
					t.Errorf("Release took %v", took)
				}
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				if _, err := c.TryLock(ctx, "other", time.Second); !errors.Is(err, flightlock.ErrUnavailable) {
					t.Error(err)
				}
				if took := time.Since(start); took > 10*time.Second {
					t.Errorf("TryLock returned after %v", took)
				}
				time.Sleep(time.Until(start.Add(70 * time.Second))) // the bubble's time
				lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
			})
		})
	}
}
