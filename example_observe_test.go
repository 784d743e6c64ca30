package flightlock_test

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
)

// An Observer is for some kinds of events. Class gives it a label with few values.
func ExampleObserver() {
	ctx := context.Background()
	nodes := flightlocktest.Start(1) // in place of Redis
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{
		Class: func(key string) string { return strings.Split(key, ":")[0] },
		Observers: []*flightlock.Observer{{
			Of: flightlock.EventWait | flightlock.EventHold,
			Ended: func(_ context.Context, e flightlock.Event) {
				if e.Kind == flightlock.EventWait {
					fmt.Println("wait:", e.Class, e.Outcome, e.Cause)
				} else {
					fmt.Println("hold:", e.Class, e.Outcome)
				}
			},
		}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close(ctx)
	_ = c.Do(ctx, "order:42", 10*time.Second, nil, func(context.Context, *flightlock.Lock) error {
		_, err := c.TryLock(ctx, "order:42", time.Second) // with a ctx that does not carry the lock
		return err
	})
	// Output:
	// wait: order acquired remote
	// wait: order not_acquired queue
	// hold: order released
}

// Most events have one or two numbers that are worth a metric. What is worth an alert is the application's to
// say: causes and outcomes are few, and may be labels.
func ExampleEvent() {
	remedy := map[flightlock.WaitCause]string{
		flightlock.WaitRemote:  "look at the nodes, and at the other processes",
		flightlock.WaitQueue:   "look at both",
		flightlock.WaitHandoff: "do less under the lock",
	}
	show := func(_ context.Context, e flightlock.Event) {
		switch e.Kind {
		case flightlock.EventWait, flightlock.EventHold, flightlock.EventLoad:
			fmt.Println(e.Class, e.Fetcher, e.Outcome, e.Took, remedy[e.Cause])
		case flightlock.EventMiss, flightlock.EventLoss:
			fmt.Println(e.Class, e.Fetcher, e.Key, e.Outcome, e.Took)
		case flightlock.EventRefresh, flightlock.EventAttempt, flightlock.EventRoundTrip:
			fmt.Println(e.Key, e.Node, e.Err, e.Took)
		}
		switch e.Outcome {
		case flightlock.OutcomeAcquired, flightlock.OutcomeNeedless, flightlock.EndReleased, flightlock.LoadLoaded:
			// all is well
		case flightlock.OutcomeNotAcquired, flightlock.OutcomeHeldByOthers, flightlock.OutcomeCanceled:
			// others were first, or nobody waits any more
		case flightlock.EndRanOut, flightlock.OutcomeClosed: // and so is EndClosed
			// as it was meant to
		case flightlock.OutcomeUnavailable, flightlock.OutcomeTooManyWaiters, flightlock.LoadTimedOut,
			flightlock.LoadFailed:
			fmt.Println("alert: an outage, or a key that is too hot")
		case flightlock.EndExpired, flightlock.EndTaken:
			fmt.Println("alert: a lock was lost")
		case flightlock.OutcomeInvalid, flightlock.OutcomePanicked: // and so is LoadPanicked
			fmt.Println("alert: a mistake")
		}
	}
	ctx := context.Background()
	show(ctx, flightlock.Event{Kind: flightlock.EventWait, Class: "order", Outcome: flightlock.OutcomeAcquired,
		Cause: flightlock.WaitHandoff, Took: time.Second})
	for _, end := range []flightlock.Outcome{flightlock.EndTaken, flightlock.EndClosed,
		flightlock.LoadPanicked} {
		show(ctx, flightlock.Event{Outcome: end})
	}
	// Output:
	// order  acquired 1s do less under the lock
	// alert: a lock was lost
	// alert: a mistake
}

// NodeStats are for a page that shows the state of each node.
func ExampleClient_NodeStats() {
	nodes := flightlocktest.Start(3) // in place of Redis
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close(context.Background())
	for _, n := range c.NodeStats() {
		fmt.Println(n.Name, n.Suspended, n.Debts)
	}
	// Output:
	// 10.0.0.1:6379 false 0
	// 10.0.0.2:6379 false 0
	// 10.0.0.3:6379 false 0
}
