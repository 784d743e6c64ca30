package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// away is a connection on which requests arrive late.
type away struct {
	net.Conn
	way time.Duration
}

func (c away) Write(p []byte) (int, error) {
	time.Sleep(c.way)
	return c.Conn.Write(p)
}

// Processes that try at the same moment, each of them closest to another node, split the votes. One
// of them gets the lock nevertheless.
func TestOneOfThoseWhoSplitTheVotesHasTheKey(t *testing.T) {
	t.Parallel()
	for range sized(20, 6) {
		bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, _ []redis.UniversalClient) {
			var clients []*flightlock.Client
			for i := range nodes {
				var near []redis.UniversalClient
				for j, n := range nodes {
					near = append(near, n.Client(t, func(o *redis.Options) {
						dial := o.Dialer
						o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
							conn, err := dial(ctx, network, addr)
							if i == j || err != nil {
								return conn, err
							}
							return away{conn, 5 * time.Millisecond}, nil
						}
					}))
				}
				c := newClient(t, flightlock.Options{}, near...)
				must(t, c.Ready(t.Context()))
				mustRelease(t, mustLock(t, c, fmt.Sprint("warm", i), time.Second))
				clients = append(clients, c)
			}
			var mu sync.Mutex
			var wg sync.WaitGroup
			won, locks := 0, []*flightlock.Lock(nil)
			for _, c := range clients {
				wg.Go(func() {
					l, err := c.TryLock(t.Context(), "job", time.Minute)
					mu.Lock()
					defer mu.Unlock()
					if err == nil {
						won++
						locks = append(locks, l)
					} else if !errors.Is(err, flightlock.ErrNotAcquired) {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			if won != 1 {
				t.Errorf("%d have the key", won)
			}
			for _, l := range locks {
				mustRelease(t, l)
			}
		})
	}
}

// If ctx ends while TryLock pauses, the error matches ctx's, and the outcome of the last attempt.
func TestTryLockEndsWithItsCtxAfterASplit(t *testing.T) {
	bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := newClient(t, flightlock.Options{}, clients...)
		must(t, c.Ready(t.Context()))
		for i, n := range nodes {
			must(t, n.Mini.Set("lock:job", fmt.Sprint("other", i)))
			n.Mini.SetTTL("lock:job", time.Minute)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Microsecond)
		defer cancel()
		_, err := c.TryLock(ctx, "job", time.Second)
		if !errors.Is(err, flightlock.ErrNotAcquired) || !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		began := time.Now()
		if _, err := c.TryLock(t.Context(), "job", time.Second); !errors.Is(err, flightlock.ErrNotAcquired) {
			t.Error(err)
		}
		if took := time.Since(began); took > 200*time.Millisecond {
			t.Errorf("it took %v", took)
		}
	})
}
