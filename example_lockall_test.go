package flightlock_test

import (
	"context"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
)

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
