package flightlock

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/jitter"
)

// RetryStrategy decides whether and when to retry after a failure. It is immutable: any number of concurrent
// calls may share one.
type RetryStrategy interface {
	// Next returns how long to wait after the attempt-th failure (1, 2, ...), and whether to retry. A delay
	// below a millisecond counts as one; math.MaxInt64 means never. The delays bound the wait: a call gives up
	// when the last one is over, also in the queue of its process.
	//
	// Next is called for 64 failures when the call begins, and for 64 more when their delays are over, on the
	// goroutine of the call, under no mutex. While it runs, other callers go first, and the end of ctx is not
	// noticed. If it panics, the call panics. That of a RefreshPolicy runs on a goroutine of its own, and a
	// panic is logged and ends refreshing.
	Next(attempt int) (delay time.Duration, ok bool)
}

// NoRetry makes one attempt. It is repeated, as is the last attempt of every strategy, while it has not shown
// whether somebody holds the key: up to eight times if processes that tried at the same moment have split the
// votes, up to twice if another process only retains the lease (Options.Linger). If that process does not
// react at once, the result is ErrNotAcquired although nobody holds the lock.
func NoRetry() RetryStrategy { return limitedRetry{interval: time.Millisecond} }

// LimitedRetry makes up to max retries after the first attempt, interval apart. An interval that is not above
// 0, or a max below 0, makes the call that uses the strategy return ErrInvalid.
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
	return cmp.Or(above0("LimitedRetry's interval", s.interval), notBelow0("LimitedRetry's max", s.max))
}

// ExponentialBackoff waits a random time between 0 and a bound that starts at min and doubles with each
// failure up to max ("full jitter"). It retries until ctx ends. While no majority of the nodes has a vote it
// retries less often: its waits grow to a quarter of the time that this has lasted, at most a second. Unless
// 0 < min <= max, the call that uses the strategy returns ErrInvalid.
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
	if s.max < s.min && s.min > 0 {
		return invalid("ExponentialBackoff's max", s.max, fmt.Sprintf("it must not be below min, %v", s.min))
	}
	return above0("ExponentialBackoff's min", s.min)
}

// Limit is s with at most max retries. A nil s means ExponentialBackoff(5ms, 250ms). If max is below 0, the
// call that uses the strategy returns ErrInvalid.
func Limit(s RetryStrategy, max int) RetryStrategy {
	return limits{RetryStrategy: orDefault(s), max: max, not: flight.Endless, bad: notBelow0("Limit's max", max)}
}

// Within is s, and gives up d after the call began, with a last attempt. It bounds the wait of Do, and not
// the work as a deadline of ctx would. In RefreshPolicy.Retry, d counts from the first of consecutive
// failures. A nil s means ExponentialBackoff(5ms, 250ms). If d is not above 0, the call that uses the
// strategy returns ErrInvalid. It can be combined with the other strategies of this package in any order;
// inside one of your own it has no effect.
func Within(s RetryStrategy, d time.Duration) RetryStrategy {
	return limits{RetryStrategy: orDefault(s), max: math.MaxInt, within: d, not: flight.Endless,
		bad: above0("Within's d", d)}
}

// FailFast is s, and gives up with ErrUnavailable as soon as no majority of the nodes can be reached, also
// while it waits: because they are suspended, quarantined, or refuse connections or commands. A node that
// does not answer counts within four times NodeTimeout; behind a lock that this process holds, the next
// refresh of that lock shows it. A nil s means ExponentialBackoff(5ms, 250ms). It can be combined with the
// other strategies in any order. In RefreshPolicy.Retry it has no effect.
func FailFast(s RetryStrategy) RetryStrategy {
	return limits{RetryStrategy: orDefault(s), max: math.MaxInt, also: flight.FailFast}
}

// limits are what Limit, Within and FailFast add to a strategy.
type limits struct {
	RetryStrategy
	max       int           // retries
	within    time.Duration // 0: it does not give up then
	also, not flight.Traits // that it has, and has not, besides those of the strategy inside
	bad       error         // what is wrong with them
}

func (s limits) Next(attempt int) (time.Duration, bool) {
	if attempt > s.max {
		return 0, false
	}
	return s.RetryStrategy.Next(attempt)
}

// Traits tells the flight what it may expect.
func (s limits) Traits() flight.Traits { return flight.TraitsOf(s.RetryStrategy)&^s.not | s.also }

// Within is when it gives up, or the strategy inside if that is sooner. Next cannot know when the call began.
func (s limits) Within() time.Duration {
	inner := flight.WithinOf(s.RetryStrategy)
	if inner == 0 || s.within == 0 {
		return max(inner, s.within)
	}
	return min(inner, s.within)
}

func (s limits) check() error { return cmp.Or(s.bad, checkStrategy(s.RetryStrategy)) }

// orDefault returns s, or the default strategy for nil.
func orDefault(s RetryStrategy) RetryStrategy {
	if s == nil {
		return exponentialBackoff{5 * time.Millisecond, 250 * time.Millisecond}
	}
	return s
}

// checkStrategy reports bad arguments of the strategies of this package.
func checkStrategy(s RetryStrategy) error {
	if c, ok := s.(interface{ check() error }); ok {
		return c.check()
	}
	return nil
}
