package semaphore_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/flightlock/flightlock/semaphore"
)

// At most two reports are made at a time, in all processes together.
func Example() {
	nodes := flightlocktest.Start(3)
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		panic(err)
	}
	reports, err := semaphore.New(c, "reports", 2)
	if err != nil {
		panic(err)
	}

	ctx := context.Background()
	report := func() error {
		permit, err := reports.Acquire(ctx, 10*time.Second, flightlock.Within(nil, time.Minute))
		if err != nil {
			return err
		}
		defer permit.ReleaseAsync()
		if err := permit.AutoRefresh(ctx, flightlock.RefreshPolicy{}); err != nil {
			return err
		}
		work := permit.Context(ctx) // ends if the permit is lost
		return work.Err()
	}
	fmt.Println(report(), report(), report())
	// Output: <nil> <nil> <nil>
}

// Who must not wait does without.
func ExampleSemaphore_TryAcquire() {
	nodes := flightlocktest.Start(3)
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		panic(err)
	}
	s, err := semaphore.New(c, "gpu", 1)
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	permit, err := s.TryAcquire(ctx, 10*time.Second)
	fmt.Println(err)
	_, err = s.TryAcquire(ctx, 10*time.Second)
	fmt.Println(errors.Is(err, flightlock.ErrNotAcquired))
	fmt.Println(permit.Release(ctx))
	// Output:
	// <nil>
	// true
	// <nil>
}
