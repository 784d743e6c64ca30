package flightlock_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A Load that ignores its ctx keeps its key in this process until it returns, also when its error is not held any more.
func TestALoadThatContinuesKeepsItsKey(t *testing.T) {
	bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		unblock := make(chan struct{})
		o := &origin{}
		o.load = func(context.Context, string) (string, error) {
			if o.loads.Add(1) == 1 {
				<-unblock
			}
			return "new", nil
		}
		f := newFetcher(t, newClient(t, flightlock.Options{}, clients...), o,
			flightlock.FetchOptions{LoadTimeout: time.Second, ErrorHold: time.Second})
		wantLoadTimeout(t, fetching(t.Context(), f, "k", 1), 1)
		time.Sleep(time.Minute) // the bubble's time
		wantLoadTimeout(t, fetching(t.Context(), f, "k", 1), 1)
		if n := o.loads.Load(); n != 1 {
			t.Errorf("%d loads", n)
		}
		close(unblock)
		synctest.Wait()
		wantAll(t, fetching(t.Context(), f, "k", 1), 1, "new")
	})
}
