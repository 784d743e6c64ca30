package flightlock_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// A ctx that ends before anything is known of the key returns its own error alone: no node has
// answered that the lock is held. Behind others of the process, and after an outcome, both match.
func TestACtxThatEndsBeforeAnythingIsKnown(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
		asked := map[string]func(ctx context.Context, key string) error{
			"SingleFlightLock": func(ctx context.Context, key string) error {
				_, err := c.SingleFlightLock(ctx, key, time.Second, nil)
				return err
			},
			"TryLock": func(ctx context.Context, key string) error {
				_, err := c.TryLock(ctx, key, time.Second)
				return err
			},
			"Do": func(ctx context.Context, key string) error {
				return c.Do(ctx, key, time.Second, nil, func(context.Context, *flightlock.Lock) error { return nil })
			},
		}
		check := func(what string, err, ctxErr error, known bool) {
			t.Helper()
			if !errors.Is(err, ctxErr) || errors.Is(err, flightlock.ErrNotAcquired) != known ||
				errors.Is(err, flightlock.ErrUnavailable) {
				t.Errorf("%s: %v", what, err)
			}
			if q := (*flightlock.QuorumError)(nil); !errors.As(err, &q) || q.Op != "acquire" || q.Key == "" || q.Need != 1 {
				t.Errorf("%s: does not say what was wanted: %#v", what, err)
			}
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for name, ask := range asked {
			check(name+", ended before", ask(ended, "k"), context.Canceled, false)
		}
		nodes[0].SetDelay(20 * time.Millisecond)
		for name, ask := range asked {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(5*time.Millisecond, cancel) // while the node is asked
			// A caller that makes the attempt on its own goroutine may be granted the lock; otherwise the
			// node has not answered yet.
			err := ask(ctx, "k:"+name)
			if err != nil && (!errors.Is(err, context.Canceled) || errors.Is(err, flightlock.ErrNotAcquired)) {
				t.Errorf("%s, ended while the request was in flight: %v", name, err)
			}
			synctest.Wait()
			time.Sleep(2 * time.Second)
		}
		nodes[0].SetDelay(0)
		l := lockkit.Lock(t, c, "k", time.Minute)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.SingleFlightLock(ctx, "k", time.Second, nil)
		check("behind others", err, context.DeadlineExceeded, true)
		other := lockkit.New(t, flightlock.Options{}, clients...)
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = other.SingleFlightLock(ctx, "k", time.Second, nil)
		check("behind another process", err, context.DeadlineExceeded, true)
		lockkit.Release(t, l)
	})
}

// A caller that ends its wait while nodes still have time to answer does not report them as unreachable: neither one
// behind others of the process, whose strategy gives up, nor one whose ctx ends. Nodes that have had NodeTimeout are.
func TestNodesThatHaveTimeToAnswerAreNotCalledUnreachable(t *testing.T) {
	for _, n := range []int{1, 3} {
		inBubble(t, n, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
			lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
			outcomes := func(until time.Duration) (behind, ended error) {
				ctx, cancel := context.WithTimeout(t.Context(), until)
				defer cancel()
				failed := make(chan error)
				lock := func(key string, retry flightlock.RetryStrategy) {
					_, err := c.SingleFlightLock(ctx, key, time.Second, retry)
					failed <- err
				}
				go lock("k1", nil)
				synctest.Wait()
				_, behind = c.SingleFlightLock(t.Context(), "k1", time.Second, flightlock.LimitedRetry(until/2, 1))
				go lock("k2", nil)
				<-failed
				return behind, <-failed
			}
			for _, n := range nodes {
				n.SetDelay(20 * time.Millisecond) // each way
			}
			behind, ended := outcomes(30 * time.Millisecond)
			if !errors.Is(behind, flightlock.ErrNotAcquired) {
				t.Errorf("behind others: %v", behind)
			}
			if !errors.Is(ended, context.DeadlineExceeded) || errors.Is(ended, flightlock.ErrUnavailable) {
				t.Errorf("its ctx has ended: %v", ended)
			}
			time.Sleep(time.Second) // in the bubble's time: until the attempts are undone
			for _, n := range nodes {
				n.SetDelay(0)
				n.Stall(true)
			}
			behind, ended = outcomes(400 * time.Millisecond)
			for _, err := range []error{behind, ended} {
				if !errors.Is(err, flightlock.ErrUnavailable) {
					t.Errorf("no node has answered: %v", err)
				}
			}
			for _, n := range nodes {
				n.Stall(false)
			}
			time.Sleep(5 * time.Second) // until the debts are paid
		})
	}
}

// A QuorumError that somebody has made, for a test of their own, has a text.
func TestAQuorumErrorOfOneself(t *testing.T) {
	if text := (&flightlock.QuorumError{Op: "acquire", Key: "k"}).Error(); !strings.Contains(text, `acquire "k"`) {
		t.Error(text)
	}
}
