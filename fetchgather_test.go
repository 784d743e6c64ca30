package flightlock_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
)

// slowLookups makes LookupMany of callers take a second, and counts them.
func slowLookups(n *atomic.Int64) func(*flightlock.Source[string]) {
	return func(src *flightlock.Source[string]) {
		lookup := src.LookupMany
		src.LookupMany = func(ctx context.Context, keys []string) (map[string]flightlock.Found[string], error) {
			found, err := lookup(ctx, keys)
			if !flightlock.LoadFollows(ctx) {
				n.Add(1)
				time.Sleep(time.Second)
			}
			return found, err
		}
	}
}

var patientLookups = flightlock.FetchOptions{LookupTimeout: 10 * time.Second}

// Callers that arrive while lookups are in progress share the next one, and what they miss is one
// load.
func TestFetchManyGathersWhatCallersWant(t *testing.T) {
	var lookups atomic.Int64
	manyTest(t, 1, patientLookups, slowLookups(&lookups),
		func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
			var wg sync.WaitGroup
			for i := range 100 {
				wg.Go(func() { wantMany(t, fs[0], keysFrom(i%50, 50), "v0") })
			}
			wg.Wait()
			if n := lookups.Load(); n != 3 { // two by themselves, and one for all others
				t.Errorf("%d lookups", n)
			}
			// One load for each lookup, or some more if the callers of one begin their runs apart from each other: that
			// depends on the scheduler. Without gathering there would be a load for nearly each caller.
			if n := s.bulk.Load(); s.most() != 1 || n > 10 {
				t.Errorf("%d loads of one key, %d bulk loads", s.most(), n)
			}
			if got := fs[0].Stats(); got.Misses != 100*50 || got.Hits != 0 {
				t.Errorf("%+v", got)
			}
			lookups.Store(0)
			for i := range 100 {
				wg.Go(func() { wantMany(t, fs[0], keysFrom(i%50, 50), "v0") })
			}
			wg.Wait()
			if got := fs[0].Stats(); got.Hits != 100*50 || lookups.Load() != 3 { // and not the keys that other callers want
				t.Errorf("%+v, %d lookups", got, lookups.Load())
			}
		})
}

// More keys than MaxBatch are several lookups.
func TestGatheredLookupsHaveALimit(t *testing.T) {
	var lookups atomic.Int64
	opts := patientLookups
	opts.MaxBatch = 20
	manyTest(t, 1, opts, func(src *flightlock.Source[string]) {
		lookup := src.LookupMany
		src.LookupMany = func(ctx context.Context, keys []string) (map[string]flightlock.Found[string], error) {
			if len(keys) > 20 {
				t.Errorf("%d keys", len(keys))
			}
			return lookup(ctx, keys)
		}
		slowLookups(&lookups)(src)
	}, func(t *testing.T, _ *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() { wantMany(t, fs[0], keysFrom(10*i, 10), "v0") })
		}
		wg.Wait()
		if n := lookups.Load(); n != 2+9 {
			t.Errorf("%d lookups", n)
		}
	})
}

// A key is in one of the lookups that wait, however many callers want it, and with whichever others.
func TestAKeyIsInOneGatheredLookup(t *testing.T) {
	var lookups, keys atomic.Int64
	opts := patientLookups
	opts.MaxBatch = 20
	manyTest(t, 1, opts, func(src *flightlock.Source[string]) {
		slowLookups(&lookups)(src)
		lookup := src.LookupMany
		src.LookupMany = func(ctx context.Context, some []string) (map[string]flightlock.Found[string], error) {
			if !flightlock.LoadFollows(ctx) {
				keys.Add(int64(len(some)))
			}
			return lookup(ctx, some)
		}
	}, func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
		var wg sync.WaitGroup
		for i := range 2 {
			wg.Go(func() { wantMany(t, fs[0], keysFrom(100+2*i, 2), "v0") })
		}
		synctest.Wait()
		for i := range 100 {
			wg.Go(func() { wantMany(t, fs[0], keysFrom(i%26, 15), "v0") })
		}
		wg.Wait()
		if n := lookups.Load(); n != 2+2 || keys.Load() != 4+40 || s.most() != 1 {
			t.Errorf("%d lookups of %d keys, %d loads of one key", n, keys.Load(), s.most())
		}
	})
}

// A lookup that is shared is sent after each of its callers arrived: a change made while earlier
// lookups were in progress is visible to them.
func TestAGatheredLookupIsLaterThanItsCallers(t *testing.T) {
	var lookups atomic.Int64
	manyTest(t, 1, patientLookups, slowLookups(&lookups),
		func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
			wantMany(t, fs[0], keysFrom(0, 2), "v0")
			var wg sync.WaitGroup
			for range 2 {
				wg.Go(func() { wantMany(t, fs[0], keysFrom(0, 2), "v0") })
			}
			time.Sleep(time.Second / 2) // they have found the old value
			s.change("k0")
			s.change("k1")
			for range 4 {
				wg.Go(func() {
					values, err := fs[0].FetchMany(t.Context(), keysFrom(0, 2))
					if err != nil || values["k0"] == "k0=v0" || values["k1"] == "k1=v0" {
						t.Errorf("%v, %v", values, err)
					}
				})
			}
			wg.Wait()
		})
}

// Lookups that hang delay others for a while only.
func TestGatheredLookupsBehindOnesThatHang(t *testing.T) {
	hang := make(chan struct{})
	var lookups atomic.Int64
	opts := flightlock.FetchOptions{LookupTimeout: time.Second}
	manyTest(t, 1, opts, func(src *flightlock.Source[string]) {
		hang = make(chan struct{}) // of this bubble
		lookup := src.LookupMany
		src.LookupMany = func(ctx context.Context, keys []string) (map[string]flightlock.Found[string], error) {
			if !flightlock.LoadFollows(ctx) && lookups.Add(1) <= 2 {
				<-hang
			}
			return lookup(ctx, keys)
		}
	}, func(t *testing.T, _ *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
		var wg sync.WaitGroup
		for i := range 2 {
			wg.Go(func() { wantMany(t, fs[0], keysFrom(10*i, 2), "v0") })
		}
		synctest.Wait()
		began := time.Now()
		wantMany(t, fs[0], keysFrom(100, 2), "v0")
		if took := time.Since(began); took != 2*time.Second { // a LookupTimeout, and the load
			t.Errorf("after %v", took)
		}
		close(hang)
		wg.Wait()
	})
}

// A caller whose ctx ends leaves, and keys that no caller waits for are not looked up.
func TestACallerLeavesAGatheredLookup(t *testing.T) {
	var lookups atomic.Int64
	manyTest(t, 1, patientLookups, slowLookups(&lookups),
		func(t *testing.T, _ *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
			var wg sync.WaitGroup
			for i := range 2 {
				wg.Go(func() { wantMany(t, fs[0], keysFrom(10*i, 2), "v0") })
			}
			synctest.Wait()
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			began := time.Now()
			_, err := fs[0].FetchMany(ctx, keysFrom(100, 2))
			if !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > time.Millisecond {
				t.Errorf("%v after %v", err, time.Since(began))
			}
			wg.Wait()
			if n := lookups.Load(); n != 2 {
				t.Errorf("%d lookups", n)
			}
		})
}

// A caller may be in several lookups. It leaves all of them, and the one that is not only its own continues.
func TestACallerLeavesSeveralGatheredLookups(t *testing.T) {
	var lookups atomic.Int64
	opts := patientLookups
	opts.MaxBatch = 20
	manyTest(t, 1, opts, slowLookups(&lookups),
		func(t *testing.T, _ *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
			var wg sync.WaitGroup
			for i := range 3 {
				wg.Go(func() { wantMany(t, fs[0], keysFrom(20*i, 12), "v0") })
				synctest.Wait()
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			values, err := fs[0].FetchMany(ctx, keysFrom(45, 20)) // 7 of them in the third one, with one more
			var many *flightlock.ManyError
			if !errors.As(err, &many) || len(many.Errors) != 20 || len(values) != 0 {
				t.Errorf("%v, %v", values, err)
			}
			wg.Wait()
			if n := lookups.Load(); n != 3 {
				t.Errorf("%d lookups", n)
			}
		})
}

// A FetchMany inside a LookupMany does not wait for lookups that wait for it.
func TestFetchManyInsideALookupIsNotGathered(t *testing.T) {
	var f *flightlock.Fetcher[string]
	manyTest(t, 1, patientLookups, func(src *flightlock.Source[string]) {
		lookup := src.LookupMany
		src.LookupMany = func(ctx context.Context, keys []string) (map[string]flightlock.Found[string], error) {
			if keys[0][:2] != "in" && !flightlock.LoadFollows(ctx) {
				time.Sleep(time.Second)
				if _, err := f.FetchMany(ctx, []string{"in1", "in2"}); err != nil {
					t.Error(err)
				}
			}
			return lookup(ctx, keys)
		}
	}, func(t *testing.T, _ *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
		f = fs[0]
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() { wantMany(t, fs[0], keysFrom(10*i, 2), "v0") })
		}
		began := time.Now()
		wg.Wait()
		if took := time.Since(began); took > 5*time.Second { // and no LookupTimeout
			t.Errorf("after %v", took)
		}
	})
}

// A lookup that is made for several callers is for those that came before it was sent: a later one may know of a
// change.
func TestALookupThatWasSentIsNotForLaterCallers(t *testing.T) {
	var lookups atomic.Int64
	manyTest(t, 1, patientLookups, slowLookups(&lookups),
		func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
			keys := keysFrom(0, 2)
			wantMany(t, fs[0], keys, "v0")
			var wg sync.WaitGroup
			for _, pause := range []time.Duration{500, 250, 500} {
				wg.Go(func() { wantMany(t, fs[0], keys, "v0") })
				time.Sleep(pause * time.Millisecond)
			}
			// After a second the first one's lookup was over, and the third one's was sent: it has found the old values.
			s.change("k0")
			s.change("k1")
			wantMany(t, fs[0], keys, "v2")
			wg.Wait()
		})
}
