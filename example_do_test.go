package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
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

// A transfer needs both accounts, in whichever order they are named.
func ExampleClient_LockAll() {
	nodes := flightlocktest.Start(3)
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	locks, err := c.LockAll(ctx, []string{"account:7", "account:3"}, 10*time.Second, nil)
	if err != nil {
		panic(err)
	}
	fmt.Println(locks.Lock("account:3").Fence() > 0, locks.Lock("account:7").Fence() > 0, locks.Err())
	if err := locks.AutoRefresh(ctx, flightlock.RefreshPolicy{}); err != nil { // for longer work
		panic(err)
	}
	work := locks.Context(ctx) // ends when one of the locks is lost
	fmt.Println(work.Err())
	fmt.Println(locks.Release(ctx))
	// Output:
	// true true <nil>
	// <nil>
	// <nil>
}

// The same with the work in a function.
func ExampleClient_DoAll() {
	nodes := flightlocktest.Start(3)
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		panic(err)
	}
	err = c.DoAll(context.Background(), []string{"account:7", "account:3"}, 10*time.Second, nil,
		func(ctx context.Context, locks *flightlock.LockSet) error {
			fmt.Println(locks.Lock("account:7").Key(), ctx.Err())
			return nil
		})
	fmt.Println(err)
	// Output:
	// account:7 <nil>
	// <nil>
}
