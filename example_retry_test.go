package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/redis/go-redis/v9"
)

// One attempt, and no waiting.
func ExampleNoRetry() {
	c, stop := exampleClient()
	defer stop()
	ctx := context.Background()
	lock, _ := c.SingleFlightLock(ctx, "k", time.Minute, nil)
	defer lock.Release(ctx)

	_, err := c.SingleFlightLock(ctx, "k", time.Minute, flightlock.NoRetry())
	fmt.Println(errors.Is(err, flightlock.ErrNotAcquired))
	// Output: true
}

// Five more attempts, 10ms apart. Who queues behind others of its process waits for as long.
func ExampleLimitedRetry() {
	c, stop := exampleClient()
	defer stop()
	ctx := context.Background()
	lock, _ := c.SingleFlightLock(ctx, "k", time.Minute, nil)
	defer lock.Release(ctx)

	began := time.Now()
	_, err := c.SingleFlightLock(ctx, "k", time.Minute, flightlock.LimitedRetry(10*time.Millisecond, 5))
	fmt.Println(errors.Is(err, flightlock.ErrNotAcquired), time.Since(began) >= 50*time.Millisecond)
	// Output: true true
}

// The longer it fails, the less it asks: at random below 1ms, 2ms, 4ms, and so on.
func ExampleExponentialBackoff() {
	s := flightlock.ExponentialBackoff(time.Millisecond, 8*time.Millisecond)
	for attempt, bound := range []time.Duration{1, 2, 4, 8, 8} {
		delay, again := s.Next(attempt + 1)
		fmt.Println(delay <= bound*time.Millisecond, again)
	}
	// Output:
	// true true
	// true true
	// true true
	// true true
	// true true
}

func ExampleLimit() {
	s := flightlock.Limit(flightlock.ExponentialBackoff(time.Millisecond, time.Second), 2)
	for attempt := 1; attempt <= 3; attempt++ {
		_, again := s.Next(attempt)
		fmt.Println(attempt, again)
	}
	// Output:
	// 1 true
	// 2 true
	// 3 false
}

// office waits longer each time, and goes home at last.
type office struct{ closes int }

func (o office) Next(attempt int) (time.Duration, bool) {
	return time.Duration(attempt) * time.Millisecond, attempt <= o.closes
}

// A strategy of one's own is a value that is never changed.
func ExampleRetryStrategy() {
	c, stop := exampleClient()
	defer stop()
	ctx := context.Background()
	var retry flightlock.RetryStrategy = office{closes: 3}
	lock, _ := c.SingleFlightLock(ctx, "k", time.Minute, retry)
	defer lock.Release(ctx)

	_, err := c.SingleFlightLock(ctx, "k", time.Minute, retry)
	fmt.Println(errors.Is(err, flightlock.ErrNotAcquired))
	// Output: true
}

// A caller that can do without the lock does not wait for Redis to come back.
func ExampleFailFast() {
	gone := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1})
	defer gone.Close()
	c, err := flightlock.New(flightlock.Options{Nodes: []redis.UniversalClient{gone}})
	if err != nil {
		panic(err)
	}
	defer c.Close(context.Background())

	_, err = c.SingleFlightLock(context.Background(), "report", time.Second, flightlock.FailFast(nil)) // ctx never ends
	fmt.Println(errors.Is(err, flightlock.ErrUnavailable))
	// Output: true
}
