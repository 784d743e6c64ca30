package rediscache

import (
	"context"
	"fmt"
	"math"
	"reflect"
	"strings"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/redis/go-redis/v9"
)

// Options configure a Cache. Fresh is required; the zero value of each other field means its default.
// All durations are 0 or more.
type Options[V any] struct {
	// Name is the first part of every key in Redis, and the label of this Cache in metrics and logs:
	// the entry for key "42" of a Cache named "user" is at "user:42", and its lock at "lock:user:42".
	// Caches of one Redis with values of different types need different names. Default "": the keys
	// are as they are, and the label is "rediscache"; a key that begins as those of locks do is
	// ErrInvalid. Name and Version together have at most 2,048 bytes; a label is UTF-8 of at most 128
	// bytes, so a Cache with a longer Name needs Fetch.Name.
	Name string

	// Version is the version of the encoding, and the second part of every key: "user:v2:42". Change it
	// when processes of the old version could not decode the new values, or would misunderstand them;
	// then both versions have entries of their own while they run side by side, and Invalidate and Set
	// reach those of their own version only. Default "": no part.
	Version string

	// Fresh is how long a value is fresh, from when it was stored: 1ms to 10 years. Required.
	Fresh time.Duration

	// Stale is how much longer than Fresh a value may be served while a new one is loaded in the
	// background, or if loading it fails. Default 0: not at all. At most 10 years.
	Stale time.Duration

	// FreshFor returns how long a value is fresh, instead of Fresh, for instance from an expiry that the
	// value contains. A value for which it returns 0 or less is not stored, and what was stored before is
	// not served any more; more than 10 years count as 10 years. It must return soon. Default nil.
	FreshFor func(V) time.Duration

	// NotFoundFor is how long Redis stores that load has returned an error that matches ErrNotFound:
	// until then Get returns ErrNotFound without a load. Such an entry is never stale. Default 0: it is
	// not stored in Redis, and the processes that have loaded hold the error like any other
	// (FetchOptions.ErrorHold). At most 10 years.
	NotFoundFor time.Duration

	// Jitter is the largest fraction by which Fresh, FreshFor and NotFoundFor are shortened, at random,
	// so that entries that were stored together do not expire together. Default 0.1; below 1; negative
	// for none: better, with Stale, for keys that GetMany always gets together, which it then also
	// loads together.
	Jitter float64

	// MaxValue is the longest encoded value, in bytes, that is stored. Longer ones are served and not
	// stored. Default 0: 512 MiB less the header, which is Redis' own limit.
	MaxValue int

	// Codec encodes the values. It needs both functions, or none. Default JSON, or the bytes as they are
	// if V is []byte or string.
	Codec Codec[V]

	// LoadMany loads many values at once, for GetMany: see flightlock.Source. Default nil: load is
	// called for each key, concurrently. With it, load is still called by Get, and by GetMany for a key
	// that another process was loading when it was wanted, and did not.
	LoadMany func(ctx context.Context, keys []string) (map[string]V, error)

	// Copy returns a copy of a value. With it, each Get has its own, and may modify it. It is called on
	// the goroutine of Get. Default nil: callers of one load share the value, and so do those of the
	// local tier, so it must not be modified.
	Copy func(V) V

	// Local is how long a value that this process has found or loaded may be served from its memory,
	// without Redis: at most 1s. Invalidate and Set remove it from the memory of their own process at
	// once; other processes may serve the old value for that time. A value that may be served for less,
	// because of Fresh, FreshFor or NotFoundFor, is not kept there. Default 0: off.
	Local time.Duration

	// LocalKeys is how many values the local tier has at most. Default 10,000; not negative.
	LocalKeys int

	// EarlyRefresh loads a value in the background at a random time before it stops being fresh, earlier
	// if its load takes long or it is read often. So a hot key is never missed, nor served stale
	// (XFetch: Vattani, Chierichetti, Lowenstein, "Optimal Probabilistic Cache Stampede Prevention",
	// VLDB 2015). 1 is the paper's factor; more is earlier. With StaleWait, a Get that begins such a load
	// waits for it, as for that of a stale value, and Stats counts it as one. What Set stores where there
	// was no value is not loaded early: nothing says how long that takes. Default 0: off; not negative.
	EarlyRefresh float64

	// StaleWait is how long a Get that has found a stale value waits for the new one, before it returns
	// the stale one. Default 0: it does not wait.
	StaleWait time.Duration

	// Fetch has the options of locks and loads: LoadTimeout, MaxLoads, OnUnavailable and so on. Its
	// Name, if it is set, is the label in metrics and logs, and its StaleWait, if it is set, takes the
	// place of StaleWait above. LookupTimeout limits how long a Get waits
	// for lookups before it loads, its own included: each of the two lookups that it may make has half
	// of that time.
	Fetch flightlock.FetchOptions
}

const (
	longest      = 10 * 365 * 24 * time.Hour
	longestLocal = time.Second
	longestValue = 512<<20 - payloadAt
	longestKey   = 4 << 10 // what can be locked

	defaultJitter        = 0.1
	defaultLocalKeys     = 10_000
	defaultLookupTimeout = time.Second
	defaultLoadTimeout   = 30 * time.Second
	defaultLockTTL       = 10 * time.Second
	longestTombstone     = 24 * time.Hour
)

func invalid(name string, value any, limit string) error {
	return fmt.Errorf("rediscache: %w: %s is %v, but %s", flightlock.ErrInvalid, name, value, limit)
}

func (o Options[V]) validated() (Options[V], error) {
	setDefault(&o.Jitter, defaultJitter)
	setDefault(&o.LocalKeys, defaultLocalKeys)
	setDefault(&o.MaxValue, longestValue)
	setDefault(&o.Fetch.LookupTimeout, defaultLookupTimeout)
	setDefault(&o.Fetch.LoadTimeout, defaultLoadTimeout)
	if o.Fetch.LoadTimeout > 0 { // as for a Fetcher. "For ever" would be too much where it is a part of a sum
		o.Fetch.LookupTimeout = min(o.Fetch.LookupTimeout, o.Fetch.LoadTimeout, longestTombstone)
	}
	setDefault(&o.Fetch.StaleWait, o.StaleWait)
	setDefault(&o.Fetch.Name, o.Name)
	setDefault(&o.Fetch.Name, "rediscache")
	if o.Codec.Encode == nil && o.Codec.Decode == nil {
		o.Codec = defaultCodec[V]()
	}
	switch {
	case o.Fresh < time.Millisecond || o.Fresh > longest:
		return o, invalid("Options.Fresh", o.Fresh, fmt.Sprintf("it must be from 1ms to %v", longest))
	case math.IsNaN(o.Jitter) || o.Jitter >= 1:
		return o, invalid("Options.Jitter", o.Jitter, "it must be below 1")
	case math.IsNaN(o.EarlyRefresh) || math.IsInf(o.EarlyRefresh, 0) || o.EarlyRefresh < 0:
		return o, invalid("Options.EarlyRefresh", o.EarlyRefresh, "it must be 0 or more")
	case o.MaxValue < 1 || o.MaxValue > longestValue:
		return o, invalid("Options.MaxValue", o.MaxValue, fmt.Sprintf("it must be from 1 to %d bytes", longestValue))
	case o.LocalKeys < 1:
		return o, invalid("Options.LocalKeys", o.LocalKeys, "it must be above 0, or 0 for the default")
	case o.Codec.Encode == nil || o.Codec.Decode == nil:
		return o, invalid("Options.Codec", "incomplete", "it needs both Encode and Decode")
	case len(o.Name)+len(o.Version) > longestKey/2:
		return o, invalid("Options.Name and Version", fmt.Sprintf("%d bytes long", len(o.Name)+len(o.Version)),
			fmt.Sprintf("%d is the limit", longestKey/2))
	}
	for _, d := range []struct {
		name  string
		value time.Duration
		most  time.Duration
	}{
		{"Options.Stale", o.Stale, longest},
		{"Options.NotFoundFor", o.NotFoundFor, longest},
		{"Options.Local", o.Local, longestLocal},
		{"Options.StaleWait", o.StaleWait, math.MaxInt64},
	} {
		if d.value < 0 || d.value > d.most {
			return o, invalid(d.name, d.value, fmt.Sprintf("it must be from 0 to %v", d.most))
		}
	}
	return o, nil
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// prefix is what stands before each key.
func (o *Options[V]) prefix() string {
	var parts strings.Builder
	for _, part := range []string{o.Name, o.Version} {
		if part != "" {
			parts.WriteString(part)
			parts.WriteByte(':')
		}
	}
	return parts.String()
}

// tombstoneTime is how long a tombstone stays: longer than a load and its store.
func (o *Options[V]) tombstoneTime() time.Duration {
	ttl := o.Fetch.TTL
	setDefault(&ttl, defaultLockTTL)
	if o.Fetch.LoadTimeout > longestTombstone {
		return longestTombstone
	}
	return min(o.Fetch.LoadTimeout+ttl+o.Fetch.LookupTimeout, longestTombstone)
}

// checkServer reports clients that may read an entry which is not the latest.
func checkServer(rdb redis.UniversalClient) error {
	if rdb == nil || reflect.ValueOf(rdb).Kind() == reflect.Pointer && reflect.ValueOf(rdb).IsNil() {
		return invalid("rdb", "nil", "the values need a server")
	}
	switch rdb := rdb.(type) {
	case *redis.Ring:
		return invalid("rdb", "a *redis.Ring",
			"a Ring moves keys to other shards when one fails, and back: "+
				"what was invalidated meanwhile would come back, too")
	case *redis.ClusterClient:
		for name, on := range map[string]bool{
			"ReadOnly":       rdb.Options().ReadOnly,
			"RouteByLatency": rdb.Options().RouteByLatency,
			"RouteRandomly":  rdb.Options().RouteRandomly,
		} {
			if on {
				return invalid("rdb."+name, "true", "a replica may still have what was invalidated: reads must go to the masters")
			}
		}
	}
	return nil
}
