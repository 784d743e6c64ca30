// Package seam is what other packages of this repository need of a Client, and users cannot and need
// not have: package fetch its locks, package rediscache its prefix, package flightlocktest its holders.
package seam

import (
	"context"
	"log/slog"
	"time"

	"github.com/redis/go-redis/v9"
)

// Of is the Client that is a *flightlock.Client; nil for the zero one. Package flightlock sets it when the
// program starts.
var Of func(client any) Client

// Client is a *flightlock.Client. Its methods are safe for concurrent use.
type Client interface {
	KeyPrefix() string              // "" is none
	Nodes() []redis.UniversalClient // as the caller passed them
	NodeTimeout() time.Duration
	MaxTTL() time.Duration

	// Holders gives, for each Lock that is held on key now, a function that refreshes that Lock and returns its
	// Err.
	Holders(key string) []func() error

	Locks

	// Log queues a line for Options.Logger. Go runs f on a goroutine for which Close waits, and which only ends
	// when f does: for code of the user's that nobody may wait for. It reports false, and does not run f, after
	// Close.
	Log(level slog.Level, msg string, args ...any)
	Go(f func()) bool

	// Attach has Close call close, before it ends anything else, until Detach is called for what it closes. It
	// reports false after Close.
	Attach(what any, close func(ctx context.Context) error) bool
	Detach(what any)

	// Observe has the Client's Observers observe a Fetcher until closed is called. read may be called at any
	// time until then. f is nil if they observe no loads and misses.
	Observe(name string, read func() Counts) (f Fetcher, closed func())

	// Bare is ctx without the locks that it carries.
	Bare(ctx context.Context) context.Context
}

// Locks are those of Fetchers: in a namespace of their own, so that none is a user's. A key is the Fetcher's
// Name, ":", and its own key.
type Locks interface {
	// CheckTTL is the error of a ttl with which locks could not be refreshed.
	CheckTTL(ttl time.Duration) error

	// CheckKey is the error of a key that cannot be locked.
	CheckKey(key string) error

	// Begin makes one attempt for key, and does not wait for its outcome: end does. end must be called.
	Begin(ctx context.Context, key string, ttl time.Duration) (end func() (Lock, error))

	// Contend acquires key, and waits as long as others have it. It calls needless when there is an event about
	// the key, and when Look is called: true ends the wait, with stopped and without a lock. It returns at once
	// if too few nodes can be reached, and with the Reason FailedElsewhere if the work of the one that it has
	// waited for has failed.
	Contend(ctx context.Context, key string, ttl time.Duration, needless func(ctx context.Context) bool) (
		l Lock, stopped bool, err error)
	Look(key string)

	// Known is what Contend knows of a key that it waits for: nil, or who has it.
	Known(key string) error

	// ReleaseFailed is l.ReleaseAsync after the work under l has failed, which ends the wait of all who Contend.
	ReleaseFailed(l Lock)

	// Why says what the error of an attempt means, and Holder which owner has the key; "" is nobody.
	Why(err error) Reason
	Holder(err error) string

	// Away reports whether too few nodes can be reached now.
	Away() bool
}

// Lock is a *flightlock.Lock, which is refreshed until it is released.
type Lock interface {
	Err() error
	ReleaseAsync()
}

// Reason is why there is no lock.
type Reason uint8

// The reasons.
const (
	Refused         Reason = iota // an attempt cannot succeed: the Client is closed, or the argument bad
	Again                         // another attempt may succeed: the votes were split, or a reply was late
	InUse                         // somebody has the lock
	Away                          // too few nodes can be reached
	FailedElsewhere               // the work of the one that had it has failed
)

// Fetcher is a Fetcher that is observed. outcome is a flightlock.LoadOutcome.
type Fetcher interface {
	LoadStarted(ctx context.Context, keys []string) context.Context
	LoadEnded(ctx context.Context, keys []string, took time.Duration, outcome string, err error)
	MissEnded(ctx context.Context, key string, took time.Duration, err error)
}

// Counting is a Store that counts for itself, too. Count may be called at any time.
type Counting interface{ Count(c *Counts) }

// OfRun is the key of a value of a ctx: the Store is asked by a run, and not by a caller. OfLoad is that of a
// load for the run that a caller begins, which also reaches a run with BareContext. OfOld is that of what a
// load replaces, a map of fetch.Entry.
type (
	OfRun  struct{}
	OfLoad struct{}
	OfOld  struct{}
)

// Counts are the counters of a Fetcher, and of the Cache that it is in.
type Counts struct {
	Hits, Stale, Misses, Joined                                 uint64
	Loads, UnlockedLoads, LoadFailures, StoreFailures, Unstored uint64
	LookupErrors, Lost, Outdated, NotFound                      uint64
	Running                                                     int64

	Cached                                   bool // there is a Cache
	LocalHits, Undecodable, TooLong, Dropped uint64
	Repeating, Down, Hearing                 int64
}
