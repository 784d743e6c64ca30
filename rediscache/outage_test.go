package rediscache_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock/rediscache"
)

// When the server of the values stops, callers wait until the first lookups and a probe have timed out.
// After that they wait for two loads at most: one that began before they came may be too old for them,
// the next one is not. The same holds if the nodes of the locks stop as well.
func TestHotKeysInAnOutage(t *testing.T) {
	for _, all := range []bool{false, true} {
		t.Run(fmt.Sprintf("nodes=%v", all), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				w.origin.takes = 20 * time.Millisecond
				caches := make([]*rediscache.Cache[string], 4)
				for i := range caches {
					caches[i] = w.cache(rediscache.Options[string]{Fresh: 3 * time.Second})
				}
				const stops = 4 * time.Second
				rnd := rand.New(rand.NewPCG(1, 2))
				var wg sync.WaitGroup
				for began := time.Now(); time.Since(began) < 9*time.Second; time.Sleep(2 * time.Millisecond) {
					at := time.Since(began)
					if at == stops {
						w.values.Stall(true)
						if all {
							w.locks.Delay(5 * time.Second)
						}
					}
					c, key := caches[rnd.IntN(len(caches))], fmt.Sprint("k", rnd.IntN(50))
					wg.Go(func() {
						if _, err := c.Get(t.Context(), key); err != nil {
							t.Errorf("after %v: %v", at, err)
						}
						// a lookup, a probe, an attempt to lock, and loads; then loads alone
						most := 500*time.Millisecond + 250*time.Millisecond + 100*time.Millisecond + 2*w.origin.takes
						if at >= stops+850*time.Millisecond {
							most = 2 * w.origin.takes
						}
						if took := time.Since(began) - at; took > most {
							t.Errorf("a call after %v took %v, more than %v", at, took, most)
						}
					})
				}
				wg.Wait()
				w.values.Stall(false)
				if all {
					w.locks.Delay(0)
				}
			})
		})
	}
}
