package flightlock

import (
	"context"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/flightlock/flightlock/internal/clock"
)

// Policy says what to do where Redis cannot say who loads.
type Policy uint8

// The policies.
const (
	// LoadLocally loads without a lock: still once per key and process at a time, and
	// MaxUnlockedLoads at a time in all.
	LoadLocally Policy = iota
	// FailClosed gives the error to the callers.
	FailClosed
)

// FetchOptions say how a Fetcher goes about it. The zero value of each field is its default, and
// none but ErrorHold may be below 0. But for TTL and LookupTimeout there is no upper limit:
// math.MaxInt64 means for ever.
type FetchOptions struct {
	// TTL of the lock, which is refreshed while Load runs; so it is how long others wait
	// for a process that died while it loaded. Default 10s, or Options.MaxTTL if that is
	// less. 10ms to Options.MaxTTL.
	TTL time.Duration

	// LoadTimeout is when the ctx of a Load ends. Default 30s.
	LoadTimeout time.Duration

	// LookupTimeout bounds the ctx of each Lookup that the Fetcher makes for all callers of a key:
	// when it has the lock, and while it waits for another process. A Lookup that takes longer has
	// failed, but the cache may only be busy: while the Fetcher waits, OnUnavailable applies after
	// three such Lookups in a row.
	//
	// It does not bound a caller's own Lookup, which has that caller's ctx. But when very many
	// callers make theirs at once, some of them wait for their turn, so that a Lookup takes no more
	// than a twentieth of LookupTimeout, or a fifth if the cache is slow even without load. A
	// caller that waits gets no turn when none of these Lookups was answered for LookupTimeout.
	//
	// Default 1s; one above LoadTimeout counts as LoadTimeout.
	LookupTimeout time.Duration

	// WaitTimeout is how long a miss waits for another process's load, before
	// OnUnavailable applies, and how long for a place to load itself, before its callers get an
	// error. Default LoadTimeout + TTL.
	WaitTimeout time.Duration

	// OnUnavailable applies when so many nodes cannot be reached that no majority is left, when
	// Lookup fails, and after WaitTimeout. One attempt without an answer is made again, and that
	// another process has the lock is no reason by itself. Default LoadLocally.
	OnUnavailable Policy

	// MaxUnlockedLoads is how many loads without a lock may run at once, in this Fetcher.
	// Others wait, WaitTimeout at most, and lock as soon as the nodes answer again. A load that
	// another load waits for does not count. Default 16.
	MaxUnlockedLoads int

	// MaxLoads is how many loads may run at once, in this Fetcher and process, with locks and
	// without. Others wait, WaitTimeout at most and without holding their locks. A load that
	// another load waits for does not count, if that one calls Fetch with its own ctx or one
	// derived from it. Default 0: no limit.
	MaxLoads int

	// ErrorHold is how long a failed load's error is served, as a *HeldError, to who misses the key
	// in this process after it, instead of another load. It doubles with each failure of the key
	// that follows another, up to 30s, or ErrorHold if that is more. It holds for 10,000 keys at most,
	// the latest. Default 1s; below 0: those who were waiting get the error, and the next one loads.
	//
	// A stale value whose refresh failed is served on, and loaded anew no sooner than ErrorHold
	// allows, nor within a second.
	ErrorHold time.Duration

	// Name of this Fetcher in metrics, where it is a label, and in the log. Fetchers of one Client
	// with the same name count as one there. Default "fetch".
	Name string

	// OnError hears of each failure of Lookup, Load and Store; op is "lookup", "load" or "store". A load
	// for nobody, behind a stale value, is heard of only here and in the counters. It is called on one
	// goroutine for all, which nothing waits for but the Client's Close. When it is so slow that 128
	// failures wait for it, further ones are not told, and the log says how many. A panic of it is
	// logged. Default nil.
	OnError func(key, op string, err error)

	// Values gives the ctx whose values Lookup, Load and Store see when they run for many
	// callers: trace ids, a tenant. It gets the ctx of the first of them, and is called at most
	// once per caller, on that caller's goroutine, whose its panic is. Its result's end does not
	// matter, and a lock that it carries is not visible. Default nil: no values, because one
	// request's must not leak into the work for others.
	Values func(caller context.Context) context.Context
}

func (o FetchOptions) validated(c *Client) (FetchOptions, error) {
	setDefault(&o.TTL, min(10*time.Second, c.opts.MaxTTL))
	setDefault(&o.LoadTimeout, 30*time.Second)
	setDefault(&o.LookupTimeout, time.Second)
	setDefault(&o.WaitTimeout, clock.Add(o.LoadTimeout, o.TTL))
	setDefault(&o.MaxUnlockedLoads, 16)
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
	case !utf8.ValidString(o.Name) || len(o.Name) > maxName:
		return o, invalid("FetchOptions.Name", fmt.Sprintf("%.*q", 2*maxName, o.Name), fmt.Sprintf("it must be UTF-8, of %d bytes at most", maxName))
	}
	o.LookupTimeout = min(o.LookupTimeout, o.LoadTimeout)
	return o, nil
}

const maxName = 128 // of a Fetcher: it is a label in metrics
