package redistest

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	// startTimeout bounds how long a server or a cluster may take to come up. A
	// loaded machine under the race detector needs seconds; nothing needs this long.
	startTimeout = 30 * time.Second

	// pollEvery is the pause between two looks at a condition.
	pollEvery = 2 * time.Millisecond
)

// Eventually waits until cond holds and ends the test when it does not within the given
// time. what completes the sentence "timed out waiting until ...". cond runs on the
// caller's goroutine, every two milliseconds.
func Eventually(tb testing.TB, within time.Duration, what string, cond func() bool) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	if !poll(ctx, cond) {
		tb.Fatalf("timed out after %v waiting until %s", within, what)
	}
}

// EventuallyNoLocks waits until no lock key with the default prefix is left on the servers.
func EventuallyNoLocks(tb testing.TB, within time.Duration, servers ...*Server) {
	tb.Helper()
	Eventually(tb, within, "no lock key is left", func() bool {
		for _, s := range servers {
			if slices.ContainsFunc(s.Keys(tb), func(key string) bool { return strings.HasPrefix(key, "lock:") }) {
				return false
			}
		}
		return true
	})
}

// poll looks at cond until it holds (true) or ctx ends (false).
func poll(ctx context.Context, cond func() bool) bool {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		if cond() {
			return true
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		}
	}
}
