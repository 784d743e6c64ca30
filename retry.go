package flightlock

import (
	"fmt"
	"time"

	"github.com/flightlock/flightlock/internal/jitter"
)

// RetryStrategy says how long to go on after failures.
//
// Strategies are immutable: one value may serve any number of calls at once. Delays below
// a millisecond count as one; there is no upper limit, for delays or counts, and math.MaxInt64
// means never.
type RetryStrategy interface {
	// Next says how long to wait after the attempt-th failure (1, 2, ...), and whether to
	// try again. It is called with small locks held, so it must not block. If it panics, its
	// caller's wait ends, and its caller's goroutine panics with that value, unless it has got the
	// lock meanwhile; a RefreshPolicy's Retry has no such caller, and ends the process.
	Next(attempt int) (delay time.Duration, ok bool)
}

// NoRetry makes one attempt.
func NoRetry() RetryStrategy { return noRetry{} }

type noRetry struct{}

func (noRetry) Next(int) (time.Duration, bool) { return 0, false }

// LimitedRetry makes up to max retries after the first attempt, interval apart. interval
// must be above 0 and max not below 0; the call that uses the strategy says so otherwise.
func LimitedRetry(interval time.Duration, max int) RetryStrategy {
	return limitedRetry{interval, max}
}

type limitedRetry struct {
	interval time.Duration
	max      int
}

func (s limitedRetry) Next(attempt int) (time.Duration, bool) { return s.interval, attempt <= s.max }

func (s limitedRetry) check() error {
	switch {
	case s.interval <= 0:
		return invalid("LimitedRetry's interval", s.interval, "it must be above 0")
	case s.max < 0:
		return invalid("LimitedRetry's max", s.max, "it must not be below 0")
	}
	return nil
}

// ExponentialBackoff waits a random time between 0 and a bound that starts at min and
// doubles with each failure up to max ("full jitter"). It goes on until ctx ends. 0 < min
// <= max is required; the call that uses the strategy says so otherwise.
func ExponentialBackoff(min, max time.Duration) RetryStrategy {
	return exponentialBackoff{min, max}
}

type exponentialBackoff struct{ min, max time.Duration }

func (s exponentialBackoff) Next(attempt int) (time.Duration, bool) {
	bound := s.min
	for ; attempt > 1 && bound < s.max; attempt-- {
		bound *= 2
		if bound <= 0 { // overflow
			bound = s.max
		}
	}
	return jitter.N(min(bound, s.max)) + 1, true
}

// Endless says that the strategy never gives up.
func (s exponentialBackoff) Endless() bool { return true }

func (s exponentialBackoff) check() error {
	switch {
	case s.min <= 0:
		return invalid("ExponentialBackoff's min", s.min, "it must be above 0")
	case s.max < s.min:
		return invalid("ExponentialBackoff's max", s.max, fmt.Sprintf("it must not be below min, %v", s.min))
	}
	return nil
}

// Limit is s with at most max retries. max must not be below 0.
func Limit(s RetryStrategy, max int) RetryStrategy { return limited{orDefault(s), max} }

type limited struct {
	RetryStrategy
	max int
}

func (s limited) Next(attempt int) (time.Duration, bool) {
	if attempt > s.max {
		return 0, false
	}
	return s.RetryStrategy.Next(attempt)
}

// Endless hides that of the strategy inside.
func (s limited) Endless() bool { return false }

func (s limited) check() error {
	if s.max < 0 {
		return invalid("Limit's max", s.max, "it must not be below 0")
	}
	return checkStrategy(s.RetryStrategy)
}

// orDefault gives nil its meaning.
func orDefault(s RetryStrategy) RetryStrategy {
	if s == nil {
		return exponentialBackoff{5 * time.Millisecond, 250 * time.Millisecond}
	}
	return s
}

// checkStrategy finds bad arguments of the strategies of this package.
func checkStrategy(s RetryStrategy) error {
	if c, ok := s.(interface{ check() error }); ok {
		return c.check()
	}
	return nil
}

// FailFast is s as long as a majority of the nodes can be reached: while others hold the lock, and while answers are
// late now and then. When a majority is away (suspended, refusing connections, in quarantine), the caller gets
// ErrUnavailable at once instead of waiting for the nodes to come back.
func FailFast(s RetryStrategy) RetryStrategy { return failFast{orDefault(s)} }

type failFast struct{ RetryStrategy }

// FailsFast is for the local tier.
func (s failFast) FailsFast() bool { return true }

func (s failFast) Endless() bool {
	e, is := s.RetryStrategy.(interface{ Endless() bool })
	return is && e.Endless()
}

func (s failFast) check() error { return checkStrategy(s.RetryStrategy) }
