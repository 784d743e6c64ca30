package sharing

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// After a deploy, each of many processes may wait for the same keys at once, one for each tenant: the polls
// of a process do not become more with its keys, and each key that is released is granted to it at once
// nevertheless.
func TestManyKeysAreWaitedForAtOnce(t *testing.T) {
	t.Parallel()
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, conns []redis.UniversalClient) {
		const keys, seconds = 300, 5
		holder := lockkit.New(t, flightlock.Options{}, conns...)
		waiter := lockkit.New(t, flightlock.Options{}, nodes[0].Client(t))
		var held []*flightlock.Lock
		var released [keys]time.Time
		var longest time.Duration
		var mu sync.Mutex
		var wg sync.WaitGroup
		for i := range keys {
			l, err := holder.SingleFlightLock(t.Context(), fmt.Sprint("tenant ", i), time.Minute, nil)
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, l)
		}
		for i := range keys {
			wg.Go(func() {
				l, err := waiter.SingleFlightLock(context.Background(), fmt.Sprint("tenant ", i), time.Minute, nil)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				longest = max(longest, time.Since(released[i]))
				mu.Unlock()
				if err := l.Release(context.Background()); err != nil {
					t.Error(err)
				}
			})
		}
		time.Sleep(seconds * time.Second)
		// Two attempts until a key's release is noticed, and 500 polls per second, spread over a quarter of their
		// time.
		if tries := waiter.Stats().Attempts; tries > 2*keys+seconds*500*4/3 || tries < 2*keys {
			t.Errorf("%d attempts for %d keys in %d seconds", tries, keys, seconds)
		}
		for i, l := range held {
			mu.Lock()
			released[i] = time.Now()
			mu.Unlock()
			if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
		}
		wg.Wait()
		if longest > 100*time.Millisecond {
			t.Errorf("a key was free for %v", longest)
		}
	})
}
