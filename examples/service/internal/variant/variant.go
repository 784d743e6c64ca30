// Package variant has three ways to keep the processes of the service from doing the same thing
// at once: flightlock, and for comparison what people use without it. The rest of the service is
// the same with each.
//
// A service of your own needs flightlock.go only, and may call flightlock itself where these
// interfaces stand in between.
package variant

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/flightlock/flightlock/rediscache"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
)

// The names of the variants.
const (
	Flightlock   = "flightlock"
	Singleflight = "singleflight"
	Redsync      = "redsync"
)

// Names lists them.
var Names = []string{Flightlock, Singleflight, Redsync}

var (
	// ErrNoLock reports that a lock was not acquired.
	ErrNoLock = errors.New("no lock")
	// ErrLost reports that a lock was lost while it was needed.
	ErrLost = errors.New("lock lost")
	// ErrNotFound is what a Load returns if there is no such value.
	ErrNotFound = rediscache.ErrNotFound
)

// A Locker locks, and makes caches that are loaded under locks.
type Locker interface {
	// Ready prepares for the first locks.
	Ready(ctx context.Context) error
	// Do runs fn under the lock on key, and keeps the lock while fn runs. The ctx of fn ends
	// with ctx and when the lock is lost. The error is that of fn; ErrNoLock, and fn did not
	// run; or ErrLost.
	Do(ctx context.Context, key string, ttl time.Duration, fn func(context.Context, Lock) error) error
	// NewCache makes a cache in front of load.
	NewCache(name string, load Load, opts CacheOptions) (Cache, error)
	// Close ends the Locker, after its caches.
	Close(ctx context.Context) error
}

// A Lock is a lock that is held. *flightlock.Lock is one.
type Lock interface {
	Fence() int64 // the fencing token; 0 with variants that have none
	Err() error   // nil while the lock is held
}

// Load gets the value of key from where it comes from.
type Load func(ctx context.Context, key string) (string, error)

// A Cache returns values from Redis, and loads those that are missing.
type Cache interface {
	Fetch(ctx context.Context, key string) (string, error)
	// Invalidate removes values that have changed where they come from.
	Invalidate(ctx context.Context, keys ...string) error
	Stats() Stats
	Close(ctx context.Context) error // waits for running loads
}

// CacheOptions are the settings of a Cache.
type CacheOptions struct {
	Fresh       time.Duration // how long a value is served
	LoadTimeout time.Duration // of one load
	MaxLoads    int           // running at once in this process; 0 means no limit
}

// Stats are counters.
type Stats struct {
	Loads         uint64 `json:"loads"`
	Unlocked      uint64 `json:"unlocked"` // of these, without a lock
	LookupErrors  uint64 `json:"lookupErrors"`
	StoreFailures uint64 `json:"storeFailures"`
}

// Add returns the sums.
func (s Stats) Add(t Stats) Stats {
	return Stats{
		Loads:         s.Loads + t.Loads,
		Unlocked:      s.Unlocked + t.Unlocked,
		LookupErrors:  s.LookupErrors + t.LookupErrors,
		StoreFailures: s.StoreFailures + t.StoreFailures,
	}
}

// Env is what a variant works with.
type Env struct {
	Nodes      []string      // urls of the lock nodes
	Cache      *redis.Client // where values are cached
	Log        *slog.Logger
	Registerer prometheus.Registerer

	NodeTimeout time.Duration // of flightlock; 0: its default
}

// New makes the variant with that name.
func New(name string, env Env) (Locker, error) {
	switch name {
	case Flightlock:
		return newFlightlock(env)
	case Singleflight:
		return newSingleflight(env), nil
	case Redsync:
		return newRedsync(env)
	}
	return nil, fmt.Errorf("no variant %q", name)
}
