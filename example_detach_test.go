package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
)

// An HTTP handler begins a job and answers; a worker, in another process, finishes it. Nobody else has the
// lock in between.
func ExampleClient_Attach() {
	nodes := flightlocktest.Start(1)
	defer nodes.Close()
	handler, _ := nodes.Client(flightlock.Options{}) // in one process
	worker, _ := nodes.Client(flightlock.Options{})  // in another
	ctx := context.Background()

	lock, err := handler.SingleFlightLock(ctx, "order:42", 30*time.Second, nil)
	if err != nil {
		panic(err)
	}
	d, err := lock.Detach() // the last thing that the handler does under the lock
	if err != nil {
		panic(err)
	}
	message, _ := d.MarshalText() // it is a secret: whoever has it can have the lock

	var received flightlock.Detached
	if err := received.UnmarshalText(message); err != nil {
		panic(err)
	}
	attached, err := worker.Attach(ctx, received)
	if err != nil {
		panic(err) // flightlock.ErrNotHeld: the job took too long to arrive, or arrived twice
	}
	fmt.Println("the same token:", attached.Fence() == lock.Fence())
	_, err = worker.Attach(ctx, received)
	fmt.Println("a second time:", errors.Is(err, flightlock.ErrNotHeld))
	fmt.Println(attached.Release(ctx))
	// Output:
	// the same token: true
	// a second time: true
	// <nil>
}

// A Detached in a log shows no secret.
func ExampleDetached_LogValue() {
	c, stop := exampleClient()
	defer stop()
	lock, err := c.TryLock(context.Background(), "order:42", time.Minute)
	if err != nil {
		panic(err)
	}
	d, err := lock.Detach()
	if err != nil {
		panic(err)
	}
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("passed on", "lock", d)
	fmt.Println(d.Key(), strings.Contains(log.String(), "order:42"),
		strings.Contains(log.String(), lock.Owner()))
	fmt.Println(d.LogValue().String() == d.String(), d.GoString() == d.String())
	// Output:
	// order:42 true false
	// true true
}

// Who holds a lock, and who waits for it.
func ExampleClient_Inspect() {
	nodes := flightlocktest.Start(3)
	defer nodes.Close()
	billing, _ := nodes.Client(flightlock.Options{Label: "billing-7"})
	admin, _ := nodes.Client(flightlock.Options{Label: "admin"})
	ctx := context.Background()
	if _, err := billing.TryLock(ctx, "user:42", time.Minute); err != nil {
		panic(err)
	}
	var in flightlock.Inspection
	in, err := admin.Inspect(ctx, "user:42")
	if err != nil {
		panic(err) // flightlock.ErrUnavailable: fewer than two of the nodes answer
	}
	fmt.Printf("held by %s, for at most a minute: %v; waiting: %d\n", in.Label, in.TTL <= time.Minute,
		len(in.Waiting))
	var disagree []flightlock.NodeInspection
	for _, n := range in.Nodes {
		if n.Err == nil && n.Owner != "" && n.Owner != in.Owner {
			disagree = append(disagree, n)
		}
	}
	fmt.Println("nodes with another owner:", len(disagree))
	// Output:
	// held by billing-7, for at most a minute: true; waiting: 0
	// nodes with another owner: 0
}

// An operator frees a lock: its holder is asked until it answers. RevokeForce is for one that is known to be
// gone.
func ExampleClient_Revoke() {
	nodes := flightlocktest.Start(1)
	defer nodes.Close()
	holder, _ := nodes.Client(flightlock.Options{})
	admin, _ := nodes.Client(flightlock.Options{})
	ctx := context.Background()
	lock, err := holder.TryLock(ctx, "user:42", time.Minute)
	if err != nil {
		panic(err)
	}
	work := lock.Context(ctx)
	_ = lock.AutoRefresh(ctx, flightlock.RefreshPolicy{Interval: 10 * time.Millisecond})

	in, err := admin.Inspect(ctx, "user:42")
	if err != nil {
		panic(err)
	}
	err = admin.Revoke(ctx, "user:42", in.Owner)
	for errors.Is(err, flightlock.ErrUnavailable) { // it hears of revocations only from its first refresh on
		err = admin.Revoke(ctx, "user:42", in.Owner)
	}
	if err != nil {
		panic(err)
	}
	fmt.Println("revoked:", errors.Is(context.Cause(work), flightlock.ErrRevoked))
	// Output: revoked: true
}

// A holder that stands still does not answer. Its tokens are below that of whoever gets the lock next.
func ExampleClient_RevokeForce() {
	nodes := flightlocktest.Start(1)
	defer nodes.Close()
	holder, _ := nodes.Client(flightlock.Options{})
	admin, _ := nodes.Client(flightlock.Options{})
	ctx := context.Background()
	stopped, err := holder.TryLock(ctx, "user:42", time.Minute)
	if err != nil {
		panic(err)
	}

	in, err := admin.Inspect(ctx, "user:42")
	if err != nil {
		panic(err)
	}
	if err := admin.RevokeForce(ctx, "user:42", in.Owner); err != nil {
		panic(err)
	}
	next, err := admin.TryLock(ctx, "user:42", time.Minute)
	if err != nil {
		panic(err)
	}
	defer next.Release(ctx)
	fmt.Println("a larger token:", next.Fence() > stopped.Fence())
	// Output: a larger token: true
}
