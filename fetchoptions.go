package flightlock

import (
	"context"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/flightlock/flightlock/internal/clock"
)

// Policy decides what happens when Redis cannot determine who loads.
type Policy uint8

// The policies.
const (
	// LoadLocally loads without a lock: still once per key and process at a time, and at most
	// MaxUnlockedLoads at a time in all.
	LoadLocally Policy = iota
	// FailClosed returns the error to the callers.
	FailClosed
)

// FetchOptions configure a Fetcher. The zero value of each field means its default, and no field
// except ErrorHold may be negative. Except for TTL and LookupTimeout there are no upper limits:
// math.MaxInt64 means forever.
type FetchOptions struct {
	// TTL is the ttl of the lock, which is refreshed while Load runs. So it is how long other processes
	// wait if a process dies while it loads. Default 10s, or Options.MaxTTL if that is less. 10ms to
	// Options.MaxTTL.
	TTL time.Duration

	// LoadTimeout is how long a Load may run before its ctx ends. Default 30s.
	LoadTimeout time.Duration

	// LookupTimeout limits each Lookup that the Fetcher makes on behalf of all callers of a key:
	// when it has the lock, and while it waits for another process. A Lookup that takes longer, or
	// returns a timeout of its own, has failed, but the cache may only be busy: while the Fetcher waits,
	// OnUnavailable applies after three such Lookups in a row.
	//
	// It does not limit a caller's own Lookup, which has that caller's ctx. But when very many
	// callers make theirs at once, some of them wait for a permit, so that a Lookup takes no longer
	// than a twentieth of LookupTimeout, or a fifth if the cache is slow even without load. A
	// waiting caller gets no permit if none of these Lookups was answered for LookupTimeout.
	//
	// Default 1s; a value above LoadTimeout is reduced to LoadTimeout.
	LookupTimeout time.Duration

	// WaitTimeout is how long a miss waits for another process's load before OnUnavailable applies,
	// and how long it waits for a slot to load itself before its callers get an error. Default
	// LoadTimeout + TTL.
	WaitTimeout time.Duration

	// OnUnavailable applies when so many nodes cannot be reached that there is no majority, when
	// Lookup fails, and after WaitTimeout. A single attempt without an answer is repeated, and a
	// lock held by another process is not a reason by itself. Default LoadLocally.
	OnUnavailable Policy

	// MaxUnlockedLoads is how many loads without a lock may run at once in this Fetcher. Others
	// wait, at most for WaitTimeout, and lock as soon as the nodes answer again. A load that
	// another load waits for does not count. Default 16.
	MaxUnlockedLoads int

	// MaxLoads is how many loads may run at once in this Fetcher and process, with and without
	// locks. Others wait, at most for WaitTimeout and without holding their locks. A load that
	// another load waits for does not count, if that other load calls Fetch with its own ctx or one
	// derived from it. Default 0: no limit.
	MaxLoads int

	// ErrorHold is how long later misses of the key in this process get the error of a failed load,
	// as a *HeldError, instead of loading again. It doubles with each consecutive failure of the
	// key, up to 30s, or ErrorHold if that is more. Errors are kept for at most 10,000 keys, the
	// latest ones. Default 1s. With a negative value only the callers that were already waiting get
	// the error, and the next miss loads.
	//
	// A stale value whose refresh failed is still served, and refreshed again no sooner than
	// ErrorHold allows, and not within a second.
	ErrorHold time.Duration

	// MaxBatch is how many keys FetchMany passes to one call of LookupMany, LoadMany and StoreMany.
	// Default 500.
	MaxBatch int

	// StaleWait is how long a caller that has found a stale value waits for the new one, before it is
	// served the stale one. Default 0: it does not wait.
	StaleWait time.Duration

	// Name identifies this Fetcher in metrics, where it is a label, and in the log. Fetchers of one
	// Client with the same name are counted together. UTF-8 of at most 128 bytes. Default "fetch".
	Name string

	// OnError is called for each failure of Lookup, Load and Store; op is "lookup", "load" or
	// "store". The failure of a background load, behind a stale value, is reported only here and in
	// the counters. All calls are made on one goroutine, for which only the Client's Close waits.
	// If OnError is so slow that 128 failures wait for it, further ones are dropped and the log
	// reports their number. A panic in OnError is logged. Default nil.
	OnError func(key, op string, err error)

	// Values returns the ctx whose values Lookup, Load and Store see when they run for many
	// callers: trace ids, a tenant. It gets the ctx of the first of these callers. It is called at
	// most once per caller, or once more each time that the caller looks up again because the entry was
	// changed meanwhile, on that caller's goroutine, and a panic in it is that caller's. The end of the
	// returned ctx is ignored, and a lock that it carries is not visible. Default nil: no
	// values, because those of one request must not leak into work for others.
	Values func(caller context.Context) context.Context
}

func (o FetchOptions) validated(c *Client) (FetchOptions, error) {
	setDefault(&o.TTL, min(10*time.Second, c.opts.MaxTTL))
	setDefault(&o.LoadTimeout, 30*time.Second)
	setDefault(&o.LookupTimeout, time.Second)
	setDefault(&o.WaitTimeout, clock.Add(o.LoadTimeout, o.TTL))
	setDefault(&o.MaxUnlockedLoads, 16)
	setDefault(&o.MaxBatch, 500)
	setDefault(&o.ErrorHold, time.Second)
	setDefault(&o.Name, "fetch")
	const positive = "it must be above 0, or 0 for the default"
	switch {
	case o.TTL < minTTL:
		return o, invalid("FetchOptions.TTL", o.TTL, fmt.Sprintf("it must be %v or more", minTTL))
	case o.TTL > c.opts.MaxTTL:
		return o, invalid("FetchOptions.TTL", o.TTL, fmt.Sprintf("Options.MaxTTL is %v", c.opts.MaxTTL))
	case o.LoadTimeout < 0:
		return o, invalid("FetchOptions.LoadTimeout", o.LoadTimeout, positive)
	case o.LookupTimeout < 0:
		return o, invalid("FetchOptions.LookupTimeout", o.LookupTimeout, positive)
	case o.WaitTimeout < 0:
		return o, invalid("FetchOptions.WaitTimeout", o.WaitTimeout, positive)
	case o.OnUnavailable > FailClosed:
		return o, invalid("FetchOptions.OnUnavailable", o.OnUnavailable, "there are LoadLocally and FailClosed")
	case o.MaxUnlockedLoads < 0:
		return o, invalid("FetchOptions.MaxUnlockedLoads", o.MaxUnlockedLoads, positive)
	case o.MaxLoads < 0:
		return o, invalid("FetchOptions.MaxLoads", o.MaxLoads, "it must be above 0, or 0 for no limit")
	case o.MaxBatch < 0:
		return o, invalid("FetchOptions.MaxBatch", o.MaxBatch, positive)
	case o.StaleWait < 0:
		return o, invalid("FetchOptions.StaleWait", o.StaleWait, "it must be above 0, or 0 to serve stale values at once")
	case !utf8.ValidString(o.Name) || len(o.Name) > maxName:
		return o, invalid("FetchOptions.Name", fmt.Sprintf("%.*q", 2*maxName, o.Name),
			fmt.Sprintf("it must be UTF-8, of %d bytes at most", maxName))
	}
	o.LookupTimeout = min(o.LookupTimeout, o.LoadTimeout)
	return o, nil
}

const maxName = 128 // of a Fetcher: it is a label in metrics
