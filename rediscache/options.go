package rediscache

import (
	"cmp"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/redis/go-redis/v9"
)

// Options configure a Cache. Zero values mean the defaults; Fresh is required.
type Options[V any] struct {
	// Name is the first part of every key in Redis: "user:42" for key "42" of a Cache named "user". Caches of
	// one Redis with values of different types need different names, of which none begins with another one and a
	// colon, or ends like a Version. UTF-8 without braces, at most 127 bytes with Version. Default "": none.
	Name string
	// Version is that of the encoding, and the second part of every key: "user:v2:42". Change it when old
	// processes would misunderstand the new values. Invalidate and Set reach entries of their own version only.
	// A "v", a digit, and what you like but colons. Default "": none; keys that begin like one are ErrInvalid.
	Version string

	// Fresh is how long a value is fresh after it was stored: 1ms to 10 years. Required.
	Fresh time.Duration
	// Stale is how much longer than Fresh a value may be served while a new one is loaded in the background, or
	// if loading it fails. At most 10 years. Default 0: not at all.
	Stale time.Duration
	// FreshFor, if not nil, returns how long a value is fresh, instead of Fresh, and must return soon. At most
	// 10 years count. With 0 or less the value is not stored, and what was stored before is not served any more.
	FreshFor func(V) time.Duration
	// NotFoundFor is how long Redis stores that there is no such value, so that Get returns ErrNotFound without
	// a load. It is never stale, nor in the local tier. At most 10 years. Default 0: each miss loads.
	NotFoundFor time.Duration
	// Jitter is the largest fraction by which Fresh, FreshFor and NotFoundFor are shortened, at random, so that
	// not all expire together. Below 1; negative: none. Default 0.1.
	Jitter float64

	// MaxValue is how many bytes an encoded value may have to be stored. Default 0: 512 MiB, Redis' limit.
	MaxValue int
	// Codec encodes the values. Default JSON, or the bytes as they are if V is []byte or string.
	Codec Codec[V]
	// Copy copies the value for each Get, which may then modify it. Default nil: callers share one.
	Copy func(V) V

	// Tags returns the tags of a value, for InvalidateTag: at most 32, each UTF-8 of 1 to 512 bytes, the same in
	// all Caches of one Name and Version. A load takes two more round trips then. The server must not evict keys
	// (maxmemory-policy noeviction): see docs/caches.md. Default nil: none.
	Tags func(key string, v V) []string

	// Local is how long this process may serve a fresh value from its memory: at most 24h. Its own changes take
	// effect at once. Other processes may serve the old value for that time, but for 1s at most. Above 1s, Name
	// must be set and rdb a *redis.Client, and the server tells of changes (CLIENT TRACKING: see
	// docs/caches.md); while it does not, Local is 1s. Default 0: off.
	Local time.Duration
	// LocalKeys is how many values the local tier has at most. Default 10,000.
	LocalKeys int
	// MaxLocal is how many bytes the local tier has at most, as Redis counts entries and keys; in memory they
	// are several times as many. An entry above a 16th of it is not kept. Default 0: no limit.
	MaxLocal int

	// EarlyRefresh loads a value in the background at a random time before it stops being fresh, earlier if its
	// load takes long or it is read often, so that a hot key is never missed nor stale (XFetch, VLDB 2015). 1 is
	// the paper's factor; more is earlier. Such a value counts as stale. Default 0: off.
	EarlyRefresh float64

	// What follows is that of fetch.Options, with its defaults.

	LockTTL     time.Duration // fetch.Options.TTL
	LoadTimeout time.Duration // fetch.Options.LoadTimeout
	WaitTimeout time.Duration // fetch.Options.WaitTimeout
	FailClosed  bool          // fetch.Options.FailClosed
	MaxLoads    int           // fetch.Options.MaxLoads
	// fetch.Options.FleetLoads, for all Caches of this Name and Version
	FleetLoads       int
	MaxUnlockedLoads int // fetch.Options.MaxUnlockedLoads
	MaxBatch         int // fetch.Options.MaxBatch
	// fetch.Options.ErrorHold: the one duration that may be negative
	ErrorHold time.Duration
	// fetch.Options.StaleWait, also for values that EarlyRefresh loads
	StaleWait   time.Duration
	BareContext bool // fetch.Options.BareContext
	// fetch.Options.LookupTimeout, for both lookups of a Get together
	LookupTimeout time.Duration
	OnError       func(key, op string, err error) // fetch.Options.OnError
}

const (
	longest          = 10 * 365 * 24 * time.Hour
	longestValue     = 512<<20 - payloadAt
	longestKey       = 4 << 10 // what can be locked
	longestName      = 128     // what fetch.Options.Name may have
	longestTombstone = 24 * time.Hour
)

// invalid is an ErrInvalid that names a field or argument, its value, and the limit.
func invalid(name string, value any, limit string) error {
	return fmt.Errorf("flightlock: %w: %s is %v, but %s", flightlock.ErrInvalid, name, value, limit)
}

// validated fills in the defaults, and reports a field that is out of range.
func (o Options[V]) validated(c seam.Client) (Options[V], error) {
	o.Jitter = max(cmp.Or(o.Jitter, 0.1), 0)
	o.LocalKeys = cmp.Or(o.LocalKeys, 10_000)
	o.MaxLocal = cmp.Or(o.MaxLocal, math.MaxInt)
	o.MaxValue = cmp.Or(o.MaxValue, longestValue)
	o.LockTTL = cmp.Or(o.LockTTL, min(10*time.Second, c.MaxTTL()))
	o.LookupTimeout = cmp.Or(o.LookupTimeout, time.Second)
	o.LoadTimeout = cmp.Or(o.LoadTimeout, 30*time.Second)
	if o.LoadTimeout > 0 { // as for a Fetcher. "For ever" would be too much where it is a part of a sum
		o.LookupTimeout = min(o.LookupTimeout, o.LoadTimeout, longestTombstone)
	}
	if o.Codec.Encode == nil && o.Codec.Decode == nil {
		o.Codec = defaultCodec[V]()
	}
	if o.Copy == nil {
		o.Copy = func(v V) V { return v }
	}
	prefix, locks := o.prefix(), c.KeyPrefix()
	switch {
	case math.IsNaN(o.Jitter) || o.Jitter >= 1:
		return o, invalid("Options.Jitter", o.Jitter, "it must be below 1")
	case math.IsNaN(o.EarlyRefresh) || math.IsInf(o.EarlyRefresh, 0) || o.EarlyRefresh < 0:
		return o, invalid("Options.EarlyRefresh", o.EarlyRefresh, "it must be 0 or more")
	case o.Local > time.Second && prefix == "":
		return o,
			invalid("Options.Local", o.Local, "above 1s it needs Options.Name: the server tells of changes by that")
	case o.MaxValue < 1 || o.MaxValue > longestValue:
		return o, invalid("Options.MaxValue", o.MaxValue,
			fmt.Sprintf("it must be from 1 to %d bytes", longestValue))
	case o.LocalKeys < 1:
		return o, invalid("Options.LocalKeys", o.LocalKeys, "it must be above 0, or 0 for the default")
	case o.MaxLocal < 1:
		return o, invalid("Options.MaxLocal", o.MaxLocal, "it must be above 0, or 0 for no limit")
	case o.Codec.Encode == nil || o.Codec.Decode == nil:
		return o, invalid("Options.Codec", "incomplete", "it needs both Encode and Decode")
	case locks != "" && strings.HasPrefix(prefix, locks) || strings.HasPrefix(prefix, node.Reserved):
		return o, invalid("Options.Name and Version", strconv.Quote(prefix),
			"all entries would be at keys of locks, or at those that are reserved for flightlock")
	case len(prefix) > longestName || !utf8.ValidString(prefix) || strings.ContainsAny(prefix, "{}"):
		return o, invalid("Options.Name and Version", fmt.Sprintf("%.*q", 2*longestName, prefix),
			fmt.Sprintf("they must be UTF-8 without braces, of %d bytes at most", longestName))
	case o.Version != "" && !(isVersion(o.Version) && !strings.Contains(o.Version, ":")):
		return o, invalid("Options.Version", strconv.Quote(o.Version),
			`it must be as "v2": v, a digit, and no colon`)
	case isVersion(o.Name[strings.LastIndexByte(o.Name, ':')+1:]):
		return o, invalid("Options.Name", strconv.Quote(o.Name), "its last part is for Options.Version")
	}
	for _, d := range []struct {
		name               string
		value, least, most time.Duration
	}{
		{"Fresh", o.Fresh, time.Millisecond, longest},
		{"Stale", o.Stale, 0, longest},
		{"NotFoundFor", o.NotFoundFor, 0, longest},
		{"Local", o.Local, 0, 24 * time.Hour},
		{"LockTTL", o.LockTTL, 10 * time.Millisecond, c.MaxTTL()},
	} {
		if d.value < d.least || d.value > d.most {
			return o, invalid("Options."+d.name, d.value, fmt.Sprintf("it must be from %v to %v", d.least, d.most))
		}
	}
	return o, nil
}

// isVersion reports whether s begins as a Version does: "v" and a digit. That is all that tells a Version
// from the first part of a key, so that no entry is that of two Caches of one Name.
func isVersion(s string) bool { return len(s) > 1 && s[0] == 'v' && s[1] >= '0' && s[1] <= '9' }

// prefix is what stands before each key.
func (o *Options[V]) prefix() (prefix string) {
	for _, part := range []string{o.Name, o.Version} {
		if part != "" {
			prefix += part + ":"
		}
	}
	return prefix
}

// fetch are those of the Fetcher.
func (o *Options[V]) fetch() fetch.Options {
	return fetch.Options{
		TTL: o.LockTTL, LoadTimeout: o.LoadTimeout, WaitTimeout: o.WaitTimeout, FailClosed: o.FailClosed,
		MaxLoads: o.MaxLoads, FleetLoads: o.FleetLoads, MaxUnlockedLoads: o.MaxUnlockedLoads, MaxBatch: o.MaxBatch,
		ErrorHold: o.ErrorHold, StaleWait: o.StaleWait, LookupTimeout: o.LookupTimeout, BareContext: o.BareContext,
		OnError: o.OnError, Name: cmp.Or(strings.TrimSuffix(o.prefix(), ":"), "rediscache"),
	}
}

// tombstoneTime is how long a tombstone stays: longer than a load and its store.
func (o *Options[V]) tombstoneTime() time.Duration {
	return min(min(o.LoadTimeout, longestTombstone)+o.LockTTL+o.LookupTimeout, longestTombstone)
}

// checkServer reports clients that may read an entry which is not the latest, or do not hear of changes where
// local asks for that.
func checkServer(rdb redis.UniversalClient, local time.Duration) error {
	if rdb == nil || reflect.ValueOf(rdb).Kind() == reflect.Pointer && reflect.ValueOf(rdb).IsNil() {
		return invalid("rdb", "nil", "the values need a server")
	}
	switch rdb := rdb.(type) {
	case *redis.Ring:
		return invalid("rdb", "a *redis.Ring",
			"a Ring moves keys to other shards when one fails, and back: "+
				"what was invalidated meanwhile would come back, too")
	case *redis.ClusterClient:
		if o := rdb.Options(); o.ReadOnly || o.RouteByLatency || o.RouteRandomly {
			return invalid("rdb", "a *redis.ClusterClient with ReadOnly, RouteByLatency or RouteRandomly",
				"a replica may still have what was invalidated: reads must go to the masters")
		}
	}
	if _, one := rdb.(*redis.Client); local > time.Second && !one {
		return invalid("Options.Local", local, fmt.Sprintf(
			"above 1s it needs a *redis.Client, whose server tells of all changes, and rdb is a %T: set 1s or less",
			rdb))
	}
	return nil
}
