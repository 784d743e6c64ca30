//go:build unix

package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/flightlock/flightlock"
)

// A worker that is terminated stops its work, and its locks are free at once and not after their
// ttl.
func ExampleClient_Close() {
	nodes, stop := exampleNodes(1)
	defer stop()
	c, err := flightlock.New(flightlock.Options{}, nodes...)
	if err != nil {
		panic(err)
	}
	ctx, ignore := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer ignore()

	worked := make(chan error)
	go func() {
		worked <- c.Do(ctx, "job", time.Minute, nil, func(ctx context.Context, _ *flightlock.Lock) error {
			syscall.Kill(syscall.Getpid(), syscall.SIGTERM) // as `docker stop` does, in the middle of the job
			select {
			case <-ctx.Done(): // save the results so far, and return
			case <-time.After(time.Hour):
			}
			return ctx.Err()
		})
	}()
	<-ctx.Done()

	// Workers have 10 seconds to finish; then their contexts end and their locks are released.
	grace, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err = c.Close(grace)
	fmt.Println("closed:", err, "- worker:", <-worked)
	held, _ := nodes[0].Exists(context.Background(), "lock:job").Result()
	fmt.Println("locks held:", held)

	_, err = c.TryLock(context.Background(), "job", time.Minute)
	fmt.Println(errors.Is(err, flightlock.ErrClosed))
	// Output:
	// closed: <nil> - worker: context canceled
	// locks held: 0
	// true
}
