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

// A ctx that ends before anything is known of the key returns its own error alone, and nothing is sent if it
// has ended before the call. Behind others of the process, and after an outcome, both match, at once.
func TestACtxThatEnds(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c, other := lockkit.New(t, flightlock.Options{}, clients...),
			lockkit.New(t, flightlock.Options{}, clients...)
		asked := map[string]func(ctx context.Context, c *flightlock.Client) error{
			"SingleFlightLock": func(ctx context.Context, c *flightlock.Client) error {
				_, err := c.SingleFlightLock(ctx, "k", time.Second, nil)
				return err
			},
			"TryLock": func(ctx context.Context, c *flightlock.Client) error {
				_, err := c.TryLock(ctx, "k", time.Second)
				return err
			},
			"Do": func(ctx context.Context, c *flightlock.Client) error {
				return c.Do(ctx, "k", time.Second, nil, func(context.Context, *flightlock.Lock) error { return nil })
			},
		}
		check := func(what string, err, ctxErr error, known bool) {
			t.Helper()
			if !errors.Is(err, ctxErr) || errors.Is(err, flightlock.ErrNotAcquired) != known ||
				errors.Is(err, flightlock.ErrUnavailable) ||
				strings.Contains(err.Error(), "not acquired (context ") != known {
				t.Errorf("%s: %v", what, err)
			}
			if q := (*flightlock.QuorumError)(nil); !errors.As(err, &q) || q.Op != "acquire" || q.Key != "k" ||
				q.Need != 2 {
				t.Errorf("%s: does not say what was wanted: %#v", what, err)
			}
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for name, ask := range asked {
			check(name+", ended before", ask(ended, c), context.Canceled, false)
		}
		if n := c.Stats().Commands; n != 0 {
			t.Errorf("%d commands for an ended ctx", n)
		}
		l := lockkit.Lock(t, c, "k", time.Minute)
		synctest.Wait()
		for where, c := range map[string]*flightlock.Client{"behind others": c, "behind another process": other} {
			for _, name := range []string{"SingleFlightLock", "Do"} {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				began := time.Now()
				check(name+" "+where, asked[name](ctx, c), context.DeadlineExceeded, true)
				cancel()
				if took := time.Since(began); took != time.Second {
					t.Errorf("%s %s: it took %v", name, where, took)
				}
			}
		}
		lockkit.Release(t, l)
		if s := c.Stats(); s.Waiters != 0 || s.Held != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// A caller that ends its wait while nodes still have time to answer does not report them as unreachable:
// neither one behind others of the process, whose strategy gives up, nor one whose ctx ends. Nodes that have
// had NodeTimeout are.
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
			testkit.Delay(20*time.Millisecond, nodes...) // each way
			behind, ended := outcomes(30 * time.Millisecond)
			if !errors.Is(behind, flightlock.ErrNotAcquired) {
				t.Errorf("behind others: %v", behind)
			}
			if !errors.Is(ended, context.DeadlineExceeded) || errors.Is(ended, flightlock.ErrUnavailable) {
				t.Errorf("its ctx has ended: %v", ended)
			}
			time.Sleep(time.Second) // in the bubble's time: until the attempts are undone
			testkit.Delay(0, nodes...)
			testkit.Stall(true, nodes...)
			behind, ended = outcomes(400 * time.Millisecond)
			for _, err := range []error{behind, ended} {
				if !errors.Is(err, flightlock.ErrUnavailable) {
					t.Errorf("no node has answered: %v", err)
				}
			}
			testkit.Stall(false, nodes...)
			time.Sleep(5 * time.Second) // until the debts are paid
		})
	}
}

// A QuorumError that somebody has made, for a test of their own, has a text.
func TestAQuorumErrorOfOneself(t *testing.T) {
	if text := (&flightlock.QuorumError{Op: "acquire", Key: "k"}).Error(); !strings.Contains(text,
		`acquire "k"`) {
		t.Error(text)
	}
}
