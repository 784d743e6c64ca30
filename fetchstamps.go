package flightlock

import (
	"context"
	"errors"

	"github.com/flightlock/flightlock/internal/coalesce"
)

// Found is the result of a stamped lookup. The zero Found is a miss without a stamp.
type Found[V any] struct {
	Value V
	Fresh Freshness

	// Stamp identifies the state of the entry: every write and every invalidation gives it another one,
	// which the entry never had before. An entry without a value may have a stamp, too: see
	// Source.LookupStamped. "" means that there is no entry, so that nothing can be stored.
	Stamp string
}

// ErrNotFound is what a Load returns if the origin has no such value. A Fetcher treats it like any
// other error, except that with stamps it is not held ([FetchOptions.ErrorHold]) for callers that may
// know of a later change. Package rediscache can store it (negative caching).
var ErrNotFound = errors.New("flightlock: not found")

// ErrOutdated is what a StoreStamped returns if it stored nothing because the entry no longer has the
// stamp. The callers get the value. It is counted by [FetchStats.Outdated], and not as a failure.
var ErrOutdated = errors.New("flightlock: the entry has changed since it was looked up")

// LoadFollows reports whether ctx is the one of a LookupStamped after which the Fetcher loads, unless
// the lookup finds a fresh value. Such a lookup has to leave an entry with a stamp: see
// [Source.LookupStamped].
func LoadFollows(ctx context.Context) bool { return ctx.Value(loadFollowsKey{}) != nil }

type loadFollowsKey struct{}

// Why stamps.
//
// A load takes its value from the origin at one time, and stores it at another. If the origin is
// changed in between, and the entry is deleted because of that, the load stores the old value after
// the deletion. A lock around the load does not help, because the one that changes the origin does
// not have it; nor does a fencing token, which orders loads and no deletions. So a load stores by
// comparing the stamp that it found before it began. This is what Facebook's memcache calls a lease
// (Nishtala et al., NSDI 2013), and it needs no lock: that one only saves loads.
//
// Callers that share a flight would see the old value, too, if they came after the change. So each
// result has a scope: it is for callers that came before the lookup on which it is based was sent,
// and for those whose own lookup brought the same stamp, because then nothing had changed until they
// came. The others make their lookup again, and find what was stored, or join the next flight. All
// of its lookups are later than they, so that they wait for at most two flights.

// stamped reports whether the Source has stamps.
func (f *Fetcher[V]) stamped() bool { return f.src.LookupStamped != nil }

// checkSource reports what is missing in a Source.
func checkSource[V any](src Source[V]) error {
	switch {
	case src.LookupStamped == nil && src.StoreStamped == nil:
		switch {
		case src.Lookup == nil:
			return invalid("Source.Lookup", "nil", "it is required")
		case src.Load == nil:
			return invalid("Source.Load", "nil", "it is required")
		case src.Store == nil:
			return invalid("Source.Store", "nil", "it is required: other processes find the value where it puts it")
		}
	case src.LookupStamped == nil:
		return invalid("Source.LookupStamped", "nil", "StoreStamped needs the stamps that it finds")
	case src.StoreStamped == nil:
		return invalid("Source.StoreStamped", "nil", "with LookupStamped nothing is stored without comparing stamps")
	}
	if src.Load == nil {
		return invalid("Source.Load", "nil", "it is required")
	}
	return nil
}

// lookup is a lookup that no load follows.
func (f *Fetcher[V]) lookup(ctx context.Context, key string) (found Found[V], err error) {
	if f.src.Lookup == nil {
		return f.src.LookupStamped(ctx, key)
	}
	found.Value, found.Fresh, err = f.src.Lookup(ctx, key)
	return found, err
}

// lookupToLoad is a lookup that a load follows, unless it finds a fresh value.
func (f *Fetcher[V]) lookupToLoad(ctx context.Context, key string) (Found[V], error) {
	if !f.stamped() {
		return f.lookup(ctx, key)
	}
	return f.src.LookupStamped(context.WithValue(ctx, loadFollowsKey{}, true), key)
}

// sending is called right before a lookup or load whose result many callers may get. It returns the
// scope of that result, as far as it is known before.
func (f *Fetcher[V]) sending() coalesce.Scope {
	if !f.stamped() {
		return coalesce.Scope{}
	}
	return coalesce.Scope{Limited: true, Before: f.sent.Add(1)}
}

// storeOne stores v: by comparing the stamp, if there are stamps.
func (f *Fetcher[V]) storeOne(ctx context.Context, r *fetchRun[V], v V, l *Lock) error {
	if f.stamped() {
		return f.src.StoreStamped(ctx, r.Key(), v, r.scope.Stamp, l)
	}
	return f.src.Store(ctx, r.Key(), v, l)
}
