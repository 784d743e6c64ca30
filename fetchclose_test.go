package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// Close with an ended ctx while runs that have won their locks look up again, or wait for a permit to do so: all
// callers get ErrClosed, and nothing is loaded.
func TestFetcherCloseWhileLookupsBeforeLoadsWait(t *testing.T) {
	for _, policy := range []flightlock.Policy{flightlock.FailClosed, flightlock.LoadLocally} {
		testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			s := &stampedCache{takes: time.Second}
			src := s.source()
			src.LookupStamped = func(ctx context.Context, _ string) (flightlock.Found[string], error) {
				if flightlock.LoadFollows(ctx) {
					<-ctx.Done()
					return flightlock.Found[string]{}, ctx.Err()
				}
				return flightlock.Found[string]{}, nil
			}
			f, err := flightlock.NewFetcher(lockkit.New(t, flightlock.Options{}, clients...), src,
				flightlock.FetchOptions{OnUnavailable: policy})
			if err != nil {
				t.Fatal(err)
			}
			const keys = 300 // more than there are permits
			results := make(chan error, keys)
			for i := range keys {
				go func() {
					_, err := f.Fetch(t.Context(), fmt.Sprint("k", i))
					results <- err
				}()
			}
			synctest.Wait()
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := f.Close(ctx); err != nil {
				t.Errorf("Close: %v", err)
			}
			wrong := 0
			for range keys {
				if err := <-results; !errors.Is(err, flightlock.ErrClosed) || errors.Is(err, context.Canceled) {
					if wrong++; wrong == 1 {
						t.Errorf("policy %v: %v", policy, err)
					}
				}
			}
			if n := s.loads.Load(); wrong > 0 || n > 0 {
				t.Errorf("policy %v: %d callers did not get ErrClosed, %d loads", policy, wrong, n)
			}
		})
	}
}
