package flightlock_test

import (
	"context"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A caller of Lock waits for a holder of its own process as for one of another: it is notified, and polls as often as
// that requires, whatever its strategy.
func TestLockIsNotifiedByItsOwnProcess(t *testing.T) {
	t.Parallel()
	const held = 12 * time.Second // longer than the nodes know of a want that is not renewed
	for name, retry := range map[string]flightlock.RetryStrategy{
		"short pauses": flightlock.LimitedRetry(5*time.Millisecond, 1e6),
		"long pauses":  flightlock.LimitedRetry(20*time.Second, 10),
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				for _, n := range nodes {
					n.SetDelay(100 * time.Microsecond)
				}
				c := newClient(t, flightlock.Options{}, clients...)
				first, err := c.Lock(t.Context(), "k", time.Minute, nil)
				if err != nil {
					t.Fatal(err)
				}
				before := c.Stats().Commands
				got := make(chan time.Time)
				go func() {
					defer close(got)
					l, err := c.Lock(context.Background(), "k", time.Minute, retry)
					if err != nil {
						t.Error(err)
						return
					}
					got <- time.Now()
					mustRelease(t, l)
				}()
				time.Sleep(held)
				if n := c.Stats().Commands - before; n > 200 {
					t.Errorf("%d commands in %v", n, held)
				}
				released := time.Now()
				mustRelease(t, first)
				if waited := (<-got).Sub(released); waited < 0 || waited > 10*time.Millisecond {
					t.Errorf("the next caller got the key %v after its release", waited)
				}
				<-got
			})
		})
	}
}
