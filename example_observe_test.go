package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
)

// An Observer needs only the functions that it is made for. Class gives it a label with few values.
func ExampleObserver() {
	ctx := context.Background()
	nodes := flightlocktest.Start(1) // in place of Redis
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{
		Class: func(key string) string { return strings.Split(key, ":")[0] },
		Observers: []*flightlock.Observer{{
			WaitEnded: func(_ context.Context, w flightlock.WaitInfo) { fmt.Println("wait:", w.Class, w.Outcome, w.For) },
			HoldEnded: func(_ context.Context, h flightlock.HoldInfo) { fmt.Println("hold:", h.Class, h.End) },
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

// What of the ends of waits and holds is worth an alert is the application's to say.
func ExampleWaitOutcome() {
	alert := func(o flightlock.WaitOutcome) bool {
		switch o {
		case flightlock.OutcomeAcquired, flightlock.OutcomeNeedless:
			return false // all is well
		case flightlock.OutcomeNotAcquired, flightlock.OutcomeHeldByOthers, flightlock.OutcomeCanceled,
			flightlock.OutcomeClosed:
			return false // others were first, or nobody waits any more
		case flightlock.OutcomeUnavailable, flightlock.OutcomeTooManyWaiters:
			return true // an outage, or a key that is too hot
		case flightlock.OutcomeInvalid, flightlock.OutcomePanicked:
			return true // a mistake
		}
		return false
	}
	fmt.Println(alert(flightlock.OutcomeUnavailable), alert(flightlock.OutcomeHeldByOthers))
	// Output: true false
}

// Long waits have different causes, and different remedies.
func ExampleWaitCause() {
	remedy := map[flightlock.WaitCause]string{
		flightlock.WaitRemote:  "look at the nodes, and at the other processes",
		flightlock.WaitQueue:   "look at both",
		flightlock.WaitHandoff: "do less under the lock",
	}
	fmt.Println(remedy[flightlock.WaitHandoff])
	// Output: do less under the lock
}

// LoadEnded reports loads that failed with their error, which may be that of some keys only.
func ExampleLoadInfo() {
	report := func(_ context.Context, l flightlock.LoadInfo) {
		switch l.Outcome {
		case flightlock.LoadLoaded:
		case flightlock.LoadFailed, flightlock.LoadPanicked, flightlock.LoadTimedOut:
			fmt.Println(l.Fetcher, len(l.Keys), l.Outcome, l.Err)
		}
	}
	o := flightlock.Observer{LoadEnded: report} // for Options.Observers
	o.LoadEnded(context.Background(), flightlock.LoadInfo{
		Fetcher: "users", Keys: []string{"42"}, Outcome: flightlock.LoadFailed, Err: errors.New("no database"),
	})
	// Output: users 1 failed no database
}

// The outcomes of loads are a small set, and may be a label.
func ExampleLoadOutcome() {
	fmt.Println(flightlock.LoadTimedOut)
	// Output: timed_out
}

// A lock that ran out as it was meant to is no loss.
func ExampleHoldEnd() {
	lost := func(e flightlock.HoldEnd) bool {
		switch e {
		case flightlock.EndReleased, flightlock.EndRanOut:
			return false
		case flightlock.EndExpired, flightlock.EndTaken, flightlock.EndClosed:
			return true
		}
		return false
	}
	fmt.Println(lost(flightlock.EndRanOut), lost(flightlock.EndTaken))
	// Output: false true
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
