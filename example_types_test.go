package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
)

// A load that failed is not repeated for ErrorHold: callers that come after it get its error at once, and learn
// until when.
func ExampleHeldError() {
	c, stop := exampleClient()
	defer stop()
	down := errors.New("the database is down")
	f := exampleFetcher(c, flightlock.FetchOptions{ErrorHold: time.Minute},
		func(context.Context, string) (string, error) {
			fmt.Println("SELECT")
			return "", down
		})
	defer f.Close(context.Background())

	_, err := f.Fetch(context.Background(), "k")
	fmt.Println(err == down)
	_, err = f.Fetch(context.Background(), "k") // no second SELECT
	var held *flightlock.HeldError
	if errors.As(err, &held) {
		fmt.Println(held.Err == down, time.Until(held.Until) > 50*time.Second)
	}
	// Output:
	// SELECT
	// true
	// true true
}

// Some of the keys of a LoadMany may fail: KeyErrors says which, and their callers find the reason in a ManyError.
func ExampleKeyErrors() {
	c, stop := exampleClient()
	defer stop()
	locked := errors.New("the row is locked")
	f, err := flightlock.NewFetcher(c, flightlock.Source[string]{
		Lookup: func(context.Context, string) (string, flightlock.Freshness, error) { return "", flightlock.Miss, nil },
		Load:   func(context.Context, string) (string, error) { panic("not needed") },
		LoadMany: func(_ context.Context, ids []string) (map[string]string, error) {
			return map[string]string{"1": "Ada"}, flightlock.KeyErrors{"2": locked}
		},
		Store: func(context.Context, string, string, *flightlock.Lock) error { return nil },
	}, flightlock.FetchOptions{})
	if err != nil {
		panic(err)
	}
	defer f.Close(context.Background())

	values, err := f.FetchMany(context.Background(), []string{"1", "2"})
	fmt.Println(values)
	fmt.Println(err)
	fmt.Println(errors.Is(err, locked))
	// Output:
	// map[1:Ada]
	// flightlock: fetch: 1 key has failed; "2": the row is locked
	// true
}

// The values of the other keys are there, too.
func ExampleManyError() {
	c, stop := exampleClient()
	defer stop()
	f := exampleFetcher(c, flightlock.FetchOptions{}, func(_ context.Context, key string) (string, error) {
		if key == "3" {
			return "", flightlock.ErrNotFound
		}
		return "value of " + key, nil
	})
	defer f.Close(context.Background())

	values, err := f.FetchMany(context.Background(), []string{"1", "2", "3"})
	var many *flightlock.ManyError
	if errors.As(err, &many) {
		for key, reason := range many.Errors {
			fmt.Println(key, errors.Is(reason, flightlock.ErrNotFound))
		}
	}
	fmt.Println(values)
	// Output:
	// 3 true
	// map[1:value of 1 2:value of 2]
}

// A finding that is not ok says why it matters, and how to fix it.
func ExampleFinding() {
	f := flightlock.Finding{
		Node: "10.0.0.1:6379", Check: "eviction", Status: flightlock.StatusFail,
		Found: "maxmemory-policy is allkeys-lru",
		Why:   "a lock that is evicted has two holders",
		Fix:   "redis-cli -h 10.0.0.1 CONFIG SET maxmemory-policy noeviction",
	}
	fmt.Print(flightlock.Report{Status: f.Status, Findings: []flightlock.Finding{f}})
	// Output:
	// fail     10.0.0.1:6379  eviction  maxmemory-policy is allkeys-lru
	//          why: a lock that is evicted has two holders
	//          fix: redis-cli -h 10.0.0.1 CONFIG SET maxmemory-policy noeviction
	// 1 fail, 0 warn, 0 unknown, 0 ok
}
