package flightlocktest_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
)

// publish is a user's function: it works in steps, and must not begin the next one after it has
// lost its lock.
func publish(ctx context.Context, c *flightlock.Client, step func()) error {
	lock, err := c.SingleFlightLock(ctx, "report", 10*time.Second, nil)
	if err != nil {
		return err
	}
	defer lock.Release(ctx)
	if err := lock.AutoRefresh(context.Background(), flightlock.RefreshPolicy{}); err != nil {
		return err
	}
	ctx = lock.Context(ctx)
	for range 3 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		step()
	}
	return nil
}

// A test that a function stops when it loses its lock, and returns the reason.
func Example() {
	nodes := flightlocktest.Start(3)
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		panic(err)
	}
	ctx := context.Background()

	steps := 0
	err = publish(ctx, c, func() {
		if steps++; steps == 2 {
			if err := nodes.Lose(ctx, "report"); err != nil {
				panic(err)
			}
		}
	})
	fmt.Println("steps:", steps)
	fmt.Println("lost:", errors.Is(err, flightlock.ErrLockLost))
	// Output:
	// steps: 2
	// lost: true
}

// A test of a function while no lock can be acquired.
func ExampleNodes_Down() {
	nodes := flightlocktest.Start(1)
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		panic(err)
	}
	ctx := context.Background()

	nodes.Down(true)
	_, err = c.TryLock(ctx, "report", time.Second)
	fmt.Println(errors.Is(err, flightlock.ErrUnavailable))
	nodes.Down(false)
	fmt.Println(publish(ctx, c, func() {}))
	// Output:
	// true
	// <nil>
}

// A test of a function that locks on one node and stores on the same.
func ExampleNodes_Redis() {
	nodes := flightlocktest.Start(1)
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		panic(err)
	}
	ctx := context.Background()

	visit := func(ctx context.Context, _ *flightlock.Lock) error { // what is tested
		return nodes.Redis(0).Incr(ctx, "visits").Err()
	}
	for range 3 {
		if err := c.Do(ctx, "visits", time.Minute, nil, visit); err != nil {
			panic(err)
		}
	}
	fmt.Println(nodes.Redis(0).Get(ctx, "visits").Val())
	// Output: 3
}

// Two of three nodes are far away, so a majority takes a round trip to them.
func ExampleNodes_Delay() {
	nodes := flightlocktest.Start(3)
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		panic(err)
	}
	nodes.Delay(10*time.Millisecond, 1, 2)
	began := time.Now()
	lock, err := c.TryLock(context.Background(), "report", time.Minute)
	if err != nil {
		panic(err)
	}
	fmt.Println(time.Since(began) >= 20*time.Millisecond, lock.Err())
	// Output: true <nil>
}
