package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
)

// Do locks, keeps the lock for as long as the function runs, and releases it.
func ExampleClient_Do() {
	c, stop := exampleClient()
	defer stop()
	err := c.Do(context.Background(), "invoice:7", 5*time.Second, nil,
		func(ctx context.Context, l *flightlock.Lock) error {
			fmt.Println("with a token:", l.Fence() > 0) // ctx ends if the lock is lost
			return errors.New("no such invoice")
		})
	fmt.Println(err)
	// Output:
	// with a token: true
	// no such invoice
}

// A function that may be called with or without the lock can lock in both cases.
func ExampleLock_Context_nested() {
	c, stop := exampleClient()
	defer stop()
	addLine := func(ctx context.Context, n int) error {
		return c.Do(ctx, "invoice:7", 5*time.Second, nil, func(context.Context, *flightlock.Lock) error {
			fmt.Println("line", n)
			return nil
		})
	}
	addLine(context.Background(), 1)
	err := c.Do(context.Background(), "invoice:7", 5*time.Second, nil,
		func(ctx context.Context, _ *flightlock.Lock) error {
			return errors.Join(addLine(ctx, 2), addLine(ctx, 3)) // with this ctx the lock is nested
		})
	fmt.Println(err)
	// Output:
	// line 1
	// line 2
	// line 3
	// <nil>
}

func ExampleFromContext() {
	c, stop := exampleClient()
	defer stop()
	save := func(ctx context.Context) { // further down the call stack
		fmt.Println("fenced:", flightlock.FromContext(ctx).Fence() > 0)
	}
	save(context.Background())
	c.Do(context.Background(), "k", time.Second, nil, func(ctx context.Context, _ *flightlock.Lock) error {
		save(ctx)
		return nil
	})
	// Output:
	// fenced: false
	// fenced: true
}
