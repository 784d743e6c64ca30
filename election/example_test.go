package election_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/election"
	"github.com/flightlock/flightlock/flightlocktest"
)

// One process leads until it is shut down, and others redirect to it.
func ExampleCampaign() {
	nodes := flightlocktest.Start(3)
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		panic(err)
	}
	ctx := context.Background()

	terms := 0
	err = election.Campaign(ctx, c, "scheduler", "10.0.0.7:8080", 10*time.Second,
		func(ctx context.Context, lock *flightlock.Lock) error {
			address, token, _, err := election.Leader(ctx, c, "scheduler")
			fmt.Println("leader:", address, token == lock.Fence(), err)
			if terms++; terms == 1 { // an accident: the campaign survives it
				go nodes.Lose(ctx, "scheduler")
				<-ctx.Done()
				return ctx.Err()
			}
			return nil // it resigns
		})
	fmt.Println("terms:", terms, err)
	_, _, _, err = election.Leader(ctx, c, "scheduler")
	fmt.Println("nobody leads:", errors.Is(err, election.ErrNoLeader))
	// Output:
	// leader: 10.0.0.7:8080 true <nil>
	// leader: 10.0.0.7:8080 true <nil>
	// terms: 2 <nil>
	// nobody leads: true
}

// A page of the state of the service says who leads.
func ExampleLeader() {
	nodes := flightlocktest.Start(3)
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		panic(err)
	}
	_, _, _, err = election.Leader(context.Background(), c, "scheduler")
	fmt.Println(errors.Is(err, election.ErrNoLeader), err)
	// Output: true election: nobody leads: "scheduler"
}

// A proxy follows the leader.
func ExampleObserve() {
	nodes := flightlocktest.Start(3)
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		election.Campaign(ctx, c, "scheduler", "10.0.0.7:8080", 10*time.Second,
			func(ctx context.Context, _ *flightlock.Lock) error { <-ctx.Done(); return nil })
	}()

	var now election.Term
	var nobody error // it is worth knowing, too
	for now, nobody = range election.Observe(context.Background(), c, "scheduler") {
		if nobody == nil {
			break
		}
	}
	fmt.Println("send requests to", now.Value)
	cancel()
	<-done
	// Output: send requests to 10.0.0.7:8080
}
