package flightlock_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// randomly is random numbers for the goroutines of one test.
type randomly struct {
	mu sync.Mutex // guards r
	r  *rand.Rand
}

func (x *randomly) intN(n int) int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.r.IntN(n)
}

// upTo is a time of at most so many milliseconds.
func (x *randomly) upTo(ms int) time.Duration { return time.Duration(x.intN(ms+1)) * time.Millisecond }

// loadMany is a LoadMany that does whatever one may do.
func (x *randomly) loadMany(
	fs []*flightlock.Fetcher[string],
) func(context.Context, []string) (map[string]string, error) {
	return func(ctx context.Context, keys []string) (map[string]string, error) {
		values := map[string]string{}
		for _, key := range keys {
			values[key] = "v0"
		}
		switch x.intN(12) {
		case 0:
			panic("a bug")
		case 1:
			runtime.Goexit()
		case 2:
			time.Sleep(x.upTo(300)) // the bubble's time, here and below
			return nil, errMine
		case 3:
			<-ctx.Done()
			return nil, ctx.Err()
		case 4:
			_, _ = fs[x.intN(len(fs))].FetchMany(ctx, keysFrom(x.intN(40), 1+x.intN(5)))
		case 5:
			return map[string]string{keys[0]: "v0"}, flightlock.KeyErrors{keys[len(keys)-1]: errMine}
		}
		time.Sleep(x.upTo(700))
		return values, nil
	}
}

// call fetches some keys, for a while or until it has them, and then changes some.
func (x *randomly) call(ctx context.Context, s *manyOrigin, f *flightlock.Fetcher[string]) {
	if x.intN(3) == 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, x.upTo(2000))
		defer cancel()
	}
	if first := x.intN(40); x.intN(4) == 0 {
		_, _ = f.Fetch(ctx, fmt.Sprint("k", first))
	} else {
		_, _ = f.FetchMany(ctx, keysFrom(first, 1+x.intN(12)))
	}
	for range x.intN(5) {
		key := fmt.Sprint("k", x.intN(50))
		switch x.intN(3) {
		case 0:
			s.change(key)
		case 1:
			s.expire(key)
		default:
			s.goStale(key)
		}
	}
	time.Sleep(x.upTo(1000))
}

// Whatever loads, callers, the cache and the node of the locks do, and whatever the limits are: all calls return, no
// run is left, no slot is lost, and a Fetcher closes while that goes on.
func TestFetchManyWhateverHappens(t *testing.T) {
	seeds := uint64(6)
	if redistest.Long() {
		seeds = 40
	}
	for seed := range seeds {
		x := &randomly{r: rand.New(rand.NewPCG(seed, 0))}
		opts := flightlock.FetchOptions{
			MaxLoads: x.intN(3), MaxUnlockedLoads: 1 + x.intN(2), MaxBatch: []int{0, 2, 7}[x.intN(3)], ErrorHold: -1,
			TTL: 2 * time.Second, LoadTimeout: 3 * time.Second, WaitTimeout: 20 * time.Second,
		}
		if x.intN(4) == 0 {
			opts.OnUnavailable = flightlock.FailClosed
		}
		manyTest(t, 3, opts, nil, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
		) {
			s.load2 = x.loadMany(fs)
			killed := lockkit.New(t, flightlock.Options{}, node.Client(t))
			for range 20 { // and nobody releases them
				_, _ = killed.TryLock(t.Context(), fmt.Sprint("k", x.intN(40)), 2*time.Second)
			}
			var wg sync.WaitGroup
			for range 25 {
				wg.Go(func() {
					for range 6 {
						x.call(t.Context(), s, fs[x.intN(len(fs))])
					}
				})
			}
			wg.Go(func() {
				for range 4 {
					time.Sleep(x.upTo(3000))
					node.Down(true)
					time.Sleep(x.upTo(3000))
					node.Down(false)
					s.fails.Store(true)
					time.Sleep(x.upTo(1000))
					s.fails.Store(false)
				}
			})
			if seed%2 == 1 {
				time.Sleep(x.upTo(5000))
				if err := fs[2].Close(t.Context()); err != nil {
					t.Errorf("seed %d: %v", seed, err)
				}
			}
			wg.Wait()
			time.Sleep(time.Minute) // for loads whose callers have left
			synctest.Wait()
			s.version.Store(0) // MaxBatch may leave a key alone, which Load loads
			s.load2 = func(_ context.Context, keys []string) (map[string]string, error) {
				time.Sleep(time.Second)
				return slowForK0(0)(t.Context(), keys)
			}
			for i, f := range fs[:2] {
				if got := f.Stats(); got.Running != 0 {
					t.Errorf("seed %d: %+v", seed, got)
				}
				for begun := time.Now(); time.Since(begun) < time.Minute; { // until all its lanes have dialled again
					if _, err := f.FetchMany(t.Context(), keysFrom(500+100*i, 40)); err == nil {
						break
					}
					time.Sleep(time.Second)
				}
				began := time.Now()
				for j := range max(opts.MaxLoads, 1) {
					wg.Go(func() { wantMany(t, f, keysFrom(1000*(i+1)+100*j, 5), "v0") })
					time.Sleep(time.Millisecond) // they do not share a load
				}
				wg.Wait()
				if took := time.Since(began); took > 3*time.Second {
					t.Errorf("seed %d, MaxLoads %d: %v for loads of a second", seed, opts.MaxLoads, took)
				}
			}
		})
	}
}
