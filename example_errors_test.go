package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/redis/go-redis/v9"
)

// The errors of an acquire, and what they mean for the caller.
func ExampleClient_SingleFlightLock_errors() {
	meaning := func(err error) string {
		switch {
		case err == nil:
			return "locked"
		case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
			return "the caller's time is up" // ErrNotAcquired or ErrUnavailable match too
		case errors.Is(err, flightlock.ErrNotAcquired):
			return "somebody else has it"
		case errors.Is(err, flightlock.ErrTooManyWaiters):
			return "too many want it"
		case errors.Is(err, flightlock.ErrUnavailable):
			return "Redis cannot say"
		}
		return "a mistake of ours"
	}
	nodes, stop := exampleNodes(1)
	defer stop()
	c, err := flightlock.New(flightlock.Options{NodeTimeout: 5 * time.Second, MaxWaiters: 1}, nodes...)
	if err != nil {
		panic(err)
	}
	defer c.Close(context.Background())
	try := func(ctx context.Context, key string, ttl time.Duration, retry flightlock.RetryStrategy) {
		lock, err := c.SingleFlightLock(ctx, key, ttl, retry)
		fmt.Println(meaning(err))
		if err == nil {
			defer lock.Release(ctx)
		}
	}

	ctx := context.Background()
	held, _ := c.SingleFlightLock(ctx, "hot", time.Minute, nil)
	try(ctx, "free", time.Second, nil)
	try(ctx, "hot", time.Second, flightlock.NoRetry())
	short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	try(short, "hot", time.Second, nil)
	try(ctx, "free", time.Hour, nil) // more than Options.MaxTTL

	waiting := make(chan struct{})
	go func() {
		try(ctx, "hot", time.Second, nil) // waits, and then gets the lock
		close(waiting)
	}()
	for c.Stats().Waiters == 0 {
		time.Sleep(time.Millisecond)
	}
	try(ctx, "hot", time.Second, nil)
	held.Release(ctx)
	<-waiting

	gone := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1})
	defer gone.Close()
	down, err := flightlock.New(flightlock.Options{}, gone)
	if err != nil {
		panic(err)
	}
	defer down.Close(ctx)
	_, err = down.SingleFlightLock(ctx, "k", time.Second, flightlock.NoRetry())
	fmt.Println(meaning(err))
	// Output:
	// locked
	// somebody else has it
	// the caller's time is up
	// a mistake of ours
	// too many want it
	// locked
	// Redis cannot say
}

// The answer of each node, for operators.
func ExampleQuorumError() {
	nodes := flightlocktest.Start(1) // in place of Redis
	defer nodes.Close()
	c, _ := nodes.Client(flightlock.Options{})
	other, _ := nodes.Client(flightlock.Options{}) // as in another process
	ctx := context.Background()
	lock, _ := other.TryLock(ctx, "k", time.Minute)
	defer lock.Release(ctx)

	_, err := c.TryLock(ctx, "k", time.Minute)
	var q *flightlock.QuorumError
	if errors.As(err, &q) {
		fmt.Println(q.Op, q.Key, q.Got, "of", q.Need)
		var n flightlock.NodeError = q.Nodes[0]
		fmt.Println(n.Holder == lock.Owner(), n.HolderTTL > 50*time.Second, n.Err)
	}
	// Output:
	// acquire k 0 of 1
	// true true <nil>
}

// A panic of code that a Fetcher calls is an error like others: see package fetch.
func ExamplePanicError() {
	err := error(&flightlock.PanicError{Op: "Load", Value: "oh no"})
	fmt.Println(err)
	// Output: flightlock: Load panicked: oh no
}
