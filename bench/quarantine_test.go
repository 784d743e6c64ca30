package main

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
)

// BenchmarkQuarantine compares clients with the quarantine and without (Options.DisableQuarantine),
// in small turns as BenchmarkAgainstRaw does, on three real servers of its own: every goroutine has
// a key to itself. What differs is the acquire script, which reads the marker only with the
// quarantine, and the client, which then looks at what a vote's memory is worth. A second client
// without is the control: x-control is how far two that are the same come apart. With fewer than
// three nodes there is no quarantine, so there would be nothing to compare. One op is one turn of
// each.
//
// In seldom, a turn is one lock after a pause: each client asks so seldom that every acquire of it
// takes a look at when the server was made a master.
func BenchmarkQuarantine(b *testing.B) {
	for _, goroutines := range []int{1, 1000} {
		b.Run(fmt.Sprintf("nodes=3/goroutines=%d", goroutines), func(b *testing.B) {
			quarantined(b, func(name string, lock func(key string) error) float64 {
				return turn(b, goroutines, name, lock)
			})
		})
	}
	b.Run("nodes=3/seldom", func(b *testing.B) {
		quarantined(b, func(name string, lock func(key string) error) float64 {
			time.Sleep(40 * time.Millisecond) // of which there are three between two of a client's own
			start := time.Now()
			if err := lock(name); err != nil {
				b.Error(err)
			}
			return float64(time.Since(start))
		})
	})
}

func quarantined(b *testing.B, turn func(name string, lock func(key string) error) float64) {
	_, urls := startServers(b, 3)
	type rival struct {
		name string
		lock func(key string) error
		took []float64
	}
	rivals := []*rival{{name: "without"}, {name: "with"}, {name: "control"}}
	for _, r := range rivals {
		opts := flightlock.Options{NodeTimeout: patientTimeout, DisableQuarantine: r.name != "with"}
		c, err := flightlock.Open(opts, urls...)
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close(context.Background())
		r.lock = func(key string) error { return lockAndRelease(b.Context(), c, key) }
		turn(r.name, r.lock) // scripts, connections
	}
	order := slices.Clone(rivals)
	b.ResetTimer()
	for range b.N {
		for _, r := range order {
			r.took = append(r.took, turn(r.name, r.lock))
		}
		order = append(order[1:], order[0]) // nobody is always the first
	}
	without, with, control := rivals[0].took, rivals[1].took, rivals[2].took
	f := figures{}
	for i := range without {
		f.add("x-without", 2*with[i]/(without[i]+control[i]))
		f.add("x-control", control[i]/without[i])
		f.add("with-ns/lock", with[i])
		f.add("without-ns/lock", without[i])
	}
	f.report(b)
}
