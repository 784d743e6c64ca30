package main

import (
	"errors"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// task is what one worker process does in one bout.
type task struct {
	Rival    string
	Settings settings
	Load     load
	Prefix   string // of keys, so that bouts do not meet
	Number   int    // of the process among those of the bout
	Procs    int    // how many there are
	Profile  string // directory for profiles of the run; "" for none
}

// kind names a way of loading.
type kind string

const (
	closed   kind = "closed"   // goroutines that lock, work and release, without a pause
	open     kind = "open"     // arrivals at random times, whether the earlier ones have got their lock or not
	handover kind = "handover" // two processes that pass one lock to and fro
	stampede kind = "stampede" // callers that want one value, which is not in the cache
	waiters  kind = "waiters"  // goroutines that wait for a lock, and their memory
	holding  kind = "holding"  // many locks that are held and refreshed

	coldKeys     kind = "cold keys"    // callers that want many values each, none of which is in the cache
	invalidation kind = "invalidation" // callers that get values while others change them
)

// load is what every process of a bout does. All of them share the keys.
type load struct {
	Kind       kind
	Goroutines int // per process: of closed; that wait, of waiters; callers, of stampede
	// Keys is how many there are. 0: a key for each goroutine; 1: all want one; more: by Zipf's law, or by
	// chance if open. Of caches, all of them; of held locks, as many.
	Keys     int
	Rate     float64       // of open: arrivals per second and process
	Even     bool          // with more keys: all are wanted as often
	Affinity float64       // with more keys: the share of locks that are of keys of this process
	Pause    time.Duration // of closed: after each lock
	Work     time.Duration // under the lock; of stampede: how long a value takes to be loaded
	Window   time.Duration // how long is measured
	// Bare leaves out all that is not lock and release: no waits are noted, no work is done.
	Bare bool
	// Drain lets calls that are under way at the end come back, however long that takes, and counts
	// them. Without it they are cut short, and their waits so far count as waits.
	Drain bool
}

// result is what a process, or all of them together, did in one window.
type result struct {
	Locks      uint64
	Failures   uint64 // calls that returned an error, other than for the end of the window
	Violations uint64 // times that two goroutines of one process were in one lock
	FirstError string
	Elapsed    time.Duration
	Waits      []byte // a histogram of nanoseconds, as hdrhistogram encodes it

	// Sharers, Sum and Squares of the locks that each goroutine got make Jain's index.
	Sharers, Sum, Squares float64

	CPU            time.Duration // of the process
	Mallocs, Bytes uint64
	Extra          map[string]float64 // what only one kind measures
}

// newHistogram holds up to 100 s, with 3 significant figures.
func newHistogram() *hdrhistogram.Histogram { return hdrhistogram.New(100, 100e9, 3) }

const longestWait = 99e9

func recordWait(h *hdrhistogram.Histogram, d time.Duration) {
	_ = h.RecordValue(min(max(int64(d), 1), longestWait)) // in range
}

func encodeWaits(h *hdrhistogram.Histogram) ([]byte, error) {
	return h.Encode(hdrhistogram.V2CompressedEncodingCookieBase)
}

// mergeResults adds up what the processes did in one window. Waits become one histogram.
func mergeResults(all []*result) (sum result, waits *hdrhistogram.Histogram, err error) {
	waits = newHistogram()
	sum.Extra = map[string]float64{}
	for _, r := range all {
		sum.Locks += r.Locks
		sum.Failures += r.Failures
		sum.Violations += r.Violations
		if sum.FirstError == "" {
			sum.FirstError = r.FirstError
		}
		sum.Elapsed = max(sum.Elapsed, r.Elapsed)
		sum.Sharers, sum.Sum, sum.Squares = sum.Sharers+r.Sharers, sum.Sum+r.Sum, sum.Squares+r.Squares
		sum.CPU += r.CPU
		sum.Mallocs += r.Mallocs
		sum.Bytes += r.Bytes
		for k, v := range r.Extra {
			sum.Extra[k] += v
		}
		if len(r.Waits) > 0 {
			h, e := hdrhistogram.Decode(r.Waits)
			if e != nil {
				err = errors.Join(err, e)
				continue
			}
			waits.Merge(h)
		}
	}
	return sum, waits, err
}

// jain is Jain's fairness index of n shares: 1 if all are equal, 1/n if one has everything, 0 if
// nobody has anything.
func jain(n, sum, squares float64) float64 {
	if squares == 0 {
		return 0
	}
	return sum * sum / (n * squares)
}
