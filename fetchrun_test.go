package flightlock_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// A Load that ignores its ctx keeps its key in this process until it returns, also when its error is not held any more.
func TestALoadThatContinuesKeepsItsKey(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		unblock := make(chan struct{})
		o := &lockkit.Origin{}
		o.Load = func(context.Context, string) (string, error) {
			if o.Loads.Add(1) == 1 {
				<-unblock
			}
			return "new", nil
		}
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
			flightlock.FetchOptions{LoadTimeout: time.Second, ErrorHold: time.Second})
		wantLoadTimeout(t, fetching(t.Context(), f, "k", 1), 1)
		time.Sleep(time.Minute) // the bubble's time
		wantLoadTimeout(t, fetching(t.Context(), f, "k", 1), 1)
		if n := o.Loads.Load(); n != 1 {
			t.Errorf("%d loads", n)
		}
		close(unblock)
		synctest.Wait()
		wantAll(t, fetching(t.Context(), f, "k", 1), 1, "new")
	})
}
