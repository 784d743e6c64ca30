package sharing

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// However many processes miss, and whatever they miss, no more loads run at a time in all of them than
// FleetLoads, every value is had, and none is loaded twice. With FailClosed no more run either when
// connections are cut over and over; then some callers get an error instead, and ask again.
func TestFleetLoadsOnARealServer(t *testing.T) {
	for _, cut := range []bool{false, true} {
		t.Run(fmt.Sprint("cut=", cut), func(t *testing.T) {
			t.Parallel()
			const clients, callers, limit = 5, 6, 3
			rounds := testkit.Full(200, testkit.Sized(20, 8))
			servers, _ := lockkit.StartNodes(t, 1)
			cache := &fetchkit.Cache{Takes: 2 * time.Millisecond}
			opts := fetch.Options{FleetLoads: limit, FailClosed: cut, ErrorHold: -1, WaitTimeout: time.Hour,
				LoadTimeout: time.Hour, TTL: 20 * time.Second}
			var all, stop sync.WaitGroup
			var failed atomic.Int64
			over := make(chan struct{})
			for range clients {
				c := lockkit.New(t, lockkit.Patient, servers[0].Client(t))
				f := fetchkit.New(t, c, cache, opts)
				for range callers {
					all.Go(func() {
						for _, i := range rand.Perm(rounds) {
							keys := fetchkit.Keys(10*i, 1+rand.IntN(20))
							_, err := f.GetMany(t.Context(), keys)
							for cut && errors.Is(err, flightlock.ErrUnavailable) {
								failed.Add(1)
								time.Sleep(10 * time.Millisecond)
								_, err = f.GetMany(t.Context(), keys)
							}
							if err != nil {
								t.Error(err)
							}
						}
					})
				}
			}
			if cut {
				admin := redis.NewClient(&redis.Options{Addr: servers[0].Addr()})
				defer admin.Close()
				stop.Go(func() {
					for {
						for _, kind := range []string{"normal", "pubsub"} {
							admin.Do(t.Context(), "CLIENT", "KILL", "TYPE", kind)
						}
						select {
						case <-over:
							return
						case <-time.After(time.Duration(50+rand.IntN(200)) * time.Millisecond):
						}
					}
				})
			}
			all.Wait()
			close(over)
			stop.Wait()
			_, most := cache.Most()
			t.Logf("%d loads of %d keys, at most %d at a time; %d calls failed", cache.Loads.Load(),
				cache.Loaded.Load(), most, failed.Load())
			if most > limit || most == 0 {
				t.Errorf("%d loads at a time, of %d", most, limit)
			}
			if keys := int64(10*rounds + 10); !cut && cache.Loaded.Load() > keys {
				t.Errorf("%d keys were loaded, there are %d", cache.Loaded.Load(), keys)
			}
		})
	}
}
