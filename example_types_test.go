package flightlock_test

import (
	"fmt"

	"github.com/flightlock/flightlock"
)

// A panic of code that a Fetcher calls is an error like others: see package fetch.
func ExamplePanicError() {
	err := error(&flightlock.PanicError{Op: "Load", Value: "oh no"})
	fmt.Println(err)
	// Output: flightlock: Load panicked: oh no
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
