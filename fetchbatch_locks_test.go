package flightlock_test

import (
	"context"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
)

// What a batch has loaded for keys whose locks were lost meanwhile is given to the callers, and not stored. The others
// are stored.
func TestABatchStoresNothingAfterALossOfTheLock(t *testing.T) {
	var stored []string
	manyTest(t, 1, flightlock.FetchOptions{TTL: time.Second}, func(src *flightlock.Source[string]) {
		store := src.StoreManyStamped
		src.StoreManyStamped = func(ctx context.Context, values, stamps map[string]string,
			locks map[string]*flightlock.Lock) error {
			stored = append(stored, slices.Sorted(maps.Keys(values))...)
			return store(ctx, values, stamps, locks)
		}
	}, func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode) {
		s.takes = 10 * time.Second
		time.AfterFunc(5*time.Second, func() { node.Mini.Del("lock:k0") })
		wantMany(t, fs[0], keysFrom(0, 3), "v0")
		if got := fs[0].Stats(); !slices.Equal(stored, []string{"k1", "k2"}) || got.Lost != 1 {
			t.Errorf("stored: %v; %+v", stored, got)
		}
	})
}

// A batch loads the keys that it has locked before it waits for others: no lock is held meanwhile.
func TestABatchLoadsBeforeItWaitsForLocks(t *testing.T) {
	var loading time.Time
	manyTest(t, 1, flightlock.FetchOptions{}, func(src *flightlock.Source[string]) {
		load := src.LoadMany
		src.LoadMany = func(ctx context.Context, keys []string) (map[string]string, error) {
			if slices.Contains(keys, "k1") {
				loading = time.Now()
			}
			return load(ctx, keys)
		}
	}, func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode) {
		c := newClient(t, flightlock.Options{}, node.Client(t))
		locks := []*flightlock.Lock{mustLock(t, c, "k0", time.Minute), mustLock(t, c, "k2", time.Minute)}
		time.AfterFunc(3*s.takes, func() {
			for _, l := range locks {
				mustRelease(t, l)
			}
		})
		began := time.Now()
		wantMany(t, fs[0], keysFrom(0, 3), "v0")
		if took := loading.Sub(began); took < 0 || took > time.Millisecond { // the bubble's time
			t.Errorf("the load of k1 began after %v", took)
		}
	})
}
