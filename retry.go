package flightlock

import (
	"fmt"
	"time"

	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/jitter"
)

// RetryStrategy says how long to go on after failures.
//
// Strategies are immutable: one value may serve any number of calls at once. Delays below
// a millisecond count as one; there is no upper limit, for delays or counts, and math.MaxInt64
// means never.
type RetryStrategy interface {
	// Next says how long to wait after the attempt-th failure (1, 2, ...), and whether to
	// try again. It runs on the goroutine of the call that uses it, with no lock of this library held, and may be
	// asked ahead about failures that have not happened. Nobody but that call waits for it: as long as it has not
	// returned, others of the process that wait for the key go first, and an end of ctx is noticed when it has. If it
	// panics, the call panics. A RefreshPolicy's Retry has no such call: it runs on a goroutine of its own, and a panic
	// is logged, and ends refreshing.
	Next(attempt int) (delay time.Duration, ok bool)
}

// NoRetry makes one attempt.
func NoRetry() RetryStrategy { return noRetry{} }

type noRetry struct{}

func (noRetry) Next(int) (time.Duration, bool) { return 0, false }

// Traits says that the strategy does not block.
func (noRetry) Traits() flight.Traits { return flight.Quick }

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

// Traits says that the strategy does not block.
func (limitedRetry) Traits() flight.Traits { return flight.Quick }

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

// Traits says that the strategy never gives up, and does not block.
func (exponentialBackoff) Traits() flight.Traits { return flight.Quick | flight.Endless }

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

// Traits are those of the strategy inside, but it ends.
func (s limited) Traits() flight.Traits { return flight.TraitsOf(s.RetryStrategy) &^ flight.Endless }

func (s limited) check() error {
	if s.max < 0 {
		return invalid("Limit's max", s.max, "it must not be below 0")
	}
	return checkStrategy(s.RetryStrategy)
}

// FailFast is s as long as a majority of the nodes can be reached: while others hold the lock, and
// while answers are late now and then. When a majority is away (suspended, refusing connections or
// commands, in quarantine), the caller gets ErrUnavailable at once instead of waiting for the nodes to come back;
// so it does when that begins while it waits, in the queue of its process too. (Behind a lock that
// this process holds, one who comes later than that is told with the lock's next refresh.) A node
// that does not answer counts as away within four times NodeTimeout.
//
// It combines with the others in any order. In RefreshPolicy.Retry it is s: a lock is worth
// refreshing as long as it is valid.
func FailFast(s RetryStrategy) RetryStrategy { return failFast{orDefault(s)} }

type failFast struct{ RetryStrategy }

// Traits are those of the strategy inside, and its caller fails fast.
func (s failFast) Traits() flight.Traits {
	return flight.TraitsOf(s.RetryStrategy) | flight.FailFast
}

func (s failFast) check() error { return checkStrategy(s.RetryStrategy) }

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
