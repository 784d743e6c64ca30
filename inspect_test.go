package flightlock_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// Inspect reports the holder, what is left, the token and who waits, in this process and others, and writes
// nothing.
func TestInspect(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a := lockkit.New(t, flightlock.Options{Label: "a#1"}, clients...)
		waiting := []*flightlock.Client{lockkit.New(t, flightlock.Options{Label: "w1"}, clients...),
			lockkit.New(t, flightlock.Options{Label: "w2"}, clients...)}
		ctx := t.Context()
		in, err := a.Inspect(ctx, "k")
		testkit.Must(t, err)
		if in.Key != "k" || in.Owner != "" || in.TTL != 0 || in.Fence != 0 || len(in.Nodes) != 3 ||
			len(in.Waiting) != 0 {
			t.Errorf("a free key: %+v", in)
		}
		l := lockkit.Lock(t, a, "k", 10*time.Second)
		for _, c := range waiting {
			go func() {
				if m, err := c.SingleFlightLock(ctx, "k", time.Second, nil); err == nil {
					_ = m.Release(ctx)
				}
			}()
			time.Sleep(2 * time.Second) // in this order
		}
		in, err = waiting[0].Inspect(ctx, "k")
		testkit.Must(t, err)
		if in.Owner != l.Owner() || in.Label != "a#1" || in.Fence < l.Fence() || in.Retained ||
			in.WaitingHere != 1 || in.TTL > 6*time.Second || in.TTL < 5900*time.Millisecond {
			t.Errorf("%+v", in)
		}
		if len(in.Waiting) != 2 || !strings.HasPrefix(in.Waiting[0], "w1#") ||
			!strings.HasPrefix(in.Waiting[1], "w2#") {
			t.Errorf("who waits: %q", in.Waiting)
		}
		testkit.Must(t, l.Err())
		testkit.Must(t, l.Release(ctx))
		time.Sleep(time.Second)
		in, err = a.Inspect(ctx, "k")
		testkit.Must(t, err)
		if in.Owner != "" || len(in.Waiting) != 0 || in.Fence <= l.Fence() {
			t.Errorf("free again: %+v", in)
		}
	})
}

// A node that does not answer is named, and the others decide; without a majority the error says so.
func TestInspectWhileNodesAreDown(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a := lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, a, "k", time.Minute)
		synctest.Wait()
		testkit.Stall(true, nodes[0])
		began := time.Now()
		in, err := a.Inspect(t.Context(), "k")
		testkit.Must(t, err)
		if in.Owner != l.Owner() || in.Nodes[0].Err == nil || in.Nodes[1].Err != nil ||
			time.Since(began) > time.Second {
			t.Errorf("after %v: %+v", time.Since(began), in)
		}
		testkit.Down(true, nodes[1])
		in, err = a.Inspect(t.Context(), "k")
		if !errors.Is(err, flightlock.ErrUnavailable) || in.Owner != "" || in.Nodes[2].Owner != l.Owner() ||
			!strings.Contains(err.Error(), "1 of the 2 votes") {
			t.Errorf("%+v, %v", in, err)
		}
		testkit.Stall(false, nodes[0])
		testkit.Down(false, nodes[1])
		_, err = a.Inspect(t.Context(), "")
		lockkit.WantInvalid(t, err)
		_, err = new(flightlock.Client).Inspect(t.Context(), "k")
		lockkit.WantInvalid(t, err)
		lockkit.Close(t, a)
		if _, err := a.Inspect(t.Context(), "k"); !errors.Is(err, flightlock.ErrClosed) {
			t.Error(err)
		}
	})
}

// A lease that its process only retains is named as such.
func TestInspectARetainedLease(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		a := lockkit.New(t, flightlock.Options{Linger: 10 * time.Second}, clients...)
		lockkit.LockAndRelease(t, a)
		synctest.Wait()
		testkit.Must(t, lockkit.Lock(t, a, "k", time.Minute).Release(t.Context()))
		in, err := a.Inspect(t.Context(), "k")
		testkit.Must(t, err)
		if in.Owner == "" || !in.Retained {
			t.Errorf("%+v", in)
		}
	})
}
