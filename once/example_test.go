package once_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/flightlock/flightlock/once"
)

// A report of each day must not be missed: what fails is run by the next process, or the next call.
func ExampleRecordLast() {
	nodes := flightlocktest.Start(1)
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		panic(err)
	}
	rdb := nodes.Redis(0) // any server that does not lose what it has acknowledged
	day := time.Now().Truncate(24 * time.Hour)

	diskIsFull := true
	report := func(ctx context.Context, lock *flightlock.Lock) error {
		if diskIsFull {
			return errors.New("the disk is full")
		}
		fmt.Println("the report is made")
		return nil
	}
	for range 3 { // as many processes would, each by its own timer
		ran, err := once.RecordLast(context.Background(), c, rdb, "report", day, 72*time.Hour, report)
		fmt.Println(ran, err)
		diskIsFull = false
	}
	// Output:
	// true the disk is full
	// the report is made
	// true <nil>
	// false <nil>
}

// A reminder must not be sent twice: what fails is not tried again.
func ExampleRecordFirst() {
	nodes := flightlocktest.Start(1)
	defer nodes.Close()
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		panic(err)
	}
	rdb := nodes.Redis(0)
	hour := time.Now().Truncate(time.Hour)

	remind := func(ctx context.Context, lock *flightlock.Lock) error {
		return errors.New("no answer: it may have been sent")
	}
	for range 2 {
		ran, err := once.RecordFirst(context.Background(), c, rdb, "reminder", hour, 6*time.Hour, remind)
		fmt.Println(ran, err)
	}
	// Output:
	// true no answer: it may have been sent
	// false <nil>
}
