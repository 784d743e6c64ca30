package fetch

import (
	"cmp"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/flightlock/flightlock/internal/clock"
)

// Options configure a Fetcher. Zero values mean the defaults. Only ErrorHold may be negative. math.MaxInt64
// means no limit, except in TTL and LookupTimeout.
type Options struct {
	// TTL is the ttl of the lock, which is refreshed while a load runs: how long others wait for a process that
	// dies. 10ms to flightlock.Options.MaxTTL. Default 10s, or MaxTTL if that is less.
	TTL time.Duration
	// LoadTimeout is how long a load may run before its ctx ends. Default 30s.
	LoadTimeout time.Duration
	// WaitTimeout is how long a miss waits for another process's load before it loads without a lock (see
	// FailClosed), or for a slot to load itself before it fails. Default LoadTimeout + TTL.
	WaitTimeout time.Duration
	// FailClosed has a miss fail without a majority of the nodes, when the Store fails, and after WaitTimeout.
	// By default it loads without a lock then, once per key and process.
	FailClosed bool

	// MaxLoads is how many loads may run at once in this Fetcher; one for many keys is one load. Others wait in
	// order, without locks, at most for WaitTimeout. Default 0: no limit.
	MaxLoads int
	// FleetLoads is how many loads may run at once in all Fetchers of this Name, in all processes, while a
	// majority of the nodes answers: 0 to 1,000. Others wait, as for MaxLoads, but with their locks. No load may
	// get keys of this Fetcher, nor of one whose loads do: see docs/caches.md. Default 0: no limit.
	FleetLoads int
	// MaxUnlockedLoads is how many loads without a lock may run at once in this Fetcher. Others wait, as for
	// MaxLoads, and lock once the nodes answer again. Default 16.
	MaxUnlockedLoads int
	// MaxBatch is how many keys one call of the Store or the Loader has. Default 500.
	MaxBatch int

	// ErrorHold is how long misses of this process get the error of a failed load, as *HeldError, unless the
	// entry has changed. Stale values are served meanwhile. Default 1s; negative: the next miss loads.
	ErrorHold time.Duration
	// StaleWait is how long a caller that has found a stale value waits for the new one. Default 0: it does not.
	StaleWait time.Duration
	// LookupTimeout limits each lookup for all callers of a key; a caller's own lookup has that caller's ctx.
	// Default 1s; at most LoadTimeout counts.
	LookupTimeout time.Duration
	// BareContext gives loads none of the values of a caller's ctx. By default a load has those of the caller
	// that began it (trace ids, a tenant), though others get its result, too.
	BareContext bool

	// Name is that of the values, and the label in metrics and the log. Fetchers of one Name, in all processes,
	// load a key once; their locks are at "flightlock:fetch:", the Client's KeyPrefix, Name, ":" and the key.
	// UTF-8 of at most 128 bytes, without braces. Default "fetch".
	Name string
	// OnError is called for each failure of the Store and the Loader, one at a time, on a goroutine of the
	// Client's; op is "lookup", "load" or "store". When 128 calls wait, further ones are dropped.
	OnError func(key, op string, err error)
}

const (
	minTTL  = 10 * time.Millisecond
	maxName = 128 // it is a label in metrics
)

// validated fills in the defaults, and reports a field that is out of range. maxTTL is the Client's.
func (o Options) validated(maxTTL time.Duration) (Options, error) {
	o.TTL = cmp.Or(o.TTL, min(10*time.Second, maxTTL))
	o.LoadTimeout = cmp.Or(o.LoadTimeout, 30*time.Second)
	o.LookupTimeout = cmp.Or(o.LookupTimeout, time.Second)
	o.WaitTimeout = cmp.Or(o.WaitTimeout, clock.Add(o.LoadTimeout, o.TTL))
	o.MaxUnlockedLoads = cmp.Or(o.MaxUnlockedLoads, 16)
	o.MaxBatch = cmp.Or(o.MaxBatch, 500)
	o.ErrorHold = cmp.Or(o.ErrorHold, time.Second)
	o.Name = cmp.Or(o.Name, "fetch")
	var err error
	check := func(field string, value any, ok bool, limit string) {
		if !ok && err == nil {
			err = invalid("Options."+field, value, limit)
		}
	}
	const positive = "it must be above 0, or 0 for the default"
	check("TTL", o.TTL, o.TTL >= minTTL, fmt.Sprintf("it must be %v or more", minTTL))
	check("TTL", o.TTL, o.TTL <= maxTTL, fmt.Sprintf("MaxTTL of the Client is %v", maxTTL))
	check("LoadTimeout", o.LoadTimeout, o.LoadTimeout > 0, positive)
	check("LookupTimeout", o.LookupTimeout, o.LookupTimeout > 0, positive)
	check("WaitTimeout", o.WaitTimeout, o.WaitTimeout > 0, positive)
	check("MaxUnlockedLoads", o.MaxUnlockedLoads, o.MaxUnlockedLoads > 0, positive)
	check("MaxLoads", o.MaxLoads, o.MaxLoads >= 0, "it must be above 0, or 0 for no limit")
	check("FleetLoads", o.FleetLoads, o.FleetLoads >= 0 && o.FleetLoads <= maxFleetLoads,
		fmt.Sprintf("it must be from 1 to %d, or 0 for no limit", maxFleetLoads))
	check("MaxBatch", o.MaxBatch, o.MaxBatch > 0, positive)
	check("StaleWait", o.StaleWait, o.StaleWait >= 0, "it must be above 0, or 0 to serve stale values at once")
	check("Name", fmt.Sprintf("%.*q", 2*maxName, o.Name),
		utf8.ValidString(o.Name) && len(o.Name) <= maxName && !strings.ContainsAny(o.Name, "{}"),
		fmt.Sprintf("it must be UTF-8 without braces, of %d bytes at most", maxName))
	o.LookupTimeout = min(o.LookupTimeout, o.LoadTimeout)
	return o, err
}
