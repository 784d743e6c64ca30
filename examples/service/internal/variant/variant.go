// Package variant has what keeps the processes of the service from doing one thing at once: flightlock, and beside
// it, to be compared, what people use without it. The service is the same over all of them.
//
// To write a service of your own, take flightlock.go and leave the rest: what it calls can be called without the
// interfaces here.
package variant

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
)

// The names of the variants.
const (
	Flightlock   = "flightlock"
	Singleflight = "singleflight"
	Redsync      = "redsync"
)

// Names has all of them.
var Names = []string{Flightlock, Singleflight, Redsync}

// ErrNoLock says that a lock could not be had, whatever the variant says in detail.
var ErrNoLock = errors.New("no lock")

// ErrLost says that a lock was lost while it was needed.
var ErrLost = errors.New("the lock was lost")

// A Locker has locks, and makes caches that are loaded under them.
type Locker interface {
	// Ready prepares for the first locks.
	Ready(ctx context.Context) error
	// Do runs fn while it holds the lock on key, for as long as fn takes. fn's ctx ends when ctx does and when the
	// lock is lost. The error is fn's, or ErrNoLock if it has not run; ErrLost stands before fn's if that happened.
	Do(ctx context.Context, key string, ttl time.Duration, fn func(context.Context, Lock) error) error
	// NewCache puts a cache in front of load.
	NewCache(name string, load Load, opts CacheOptions) (Cache, error)
	// Close ends what is left. Caches are closed before.
	Close(ctx context.Context) error
}

// A Lock is one that is held.
type Lock interface {
	Fence() int64 // its token; 0 where the variant has none
	Err() error   // nil while it is held
}

// Load gets a value from where it comes from. fence is the lock's token: 0 without a lock.
type Load func(ctx context.Context, key string, fence int64) (string, error)

// A Cache gives values, and loads those that it has not.
type Cache interface {
	Fetch(ctx context.Context, key string) (string, error)
	Stats() Stats
	Close(ctx context.Context) error // lets running loads finish
}

// CacheOptions say how to go about it.
type CacheOptions struct {
	Fresh       time.Duration // how long a value is good
	LoadTimeout time.Duration // of one load
	MaxLoads    int           // at once, in this process; 0: any number
}

// Stats are counters.
type Stats struct {
	Loads         uint64 `json:"loads"`
	Unlocked      uint64 `json:"unlocked"` // loads without a lock
	LookupErrors  uint64 `json:"lookupErrors"`
	StoreFailures uint64 `json:"storeFailures"`
}

// Add adds up two of them.
func (s Stats) Add(t Stats) Stats {
	return Stats{s.Loads + t.Loads, s.Unlocked + t.Unlocked, s.LookupErrors + t.LookupErrors, s.StoreFailures + t.StoreFailures}
}

// Env is what a variant is made over.
type Env struct {
	Nodes      []string      // urls of the nodes that lock
	Cache      *redis.Client // where values are cached
	Log        *slog.Logger
	Registerer prometheus.Registerer
}

// New makes the variant of that name.
func New(name string, env Env) (Locker, error) {
	switch name {
	case Flightlock:
		return newFlightlock(env)
	case Singleflight:
		return newSingleflight(env), nil
	case Redsync:
		return newRedsync(env)
	}
	return nil, fmt.Errorf("there is no variant %q", name)
}
