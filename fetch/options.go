package fetch

import (
	"cmp"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/flightlock/flightlock/internal/clock"
)

// Options configure a Fetcher. The zero value of each field means its default, and no field except ErrorHold may be
// negative. Except for TTL and LookupTimeout there are no upper limits: math.MaxInt64 means forever.
type Options struct {
	// TTL is the ttl of the lock, which is refreshed while a load runs. So it is how long other processes wait if a
	// process dies while it loads. Default 10s, or flightlock.Options.MaxTTL if that is less. 10ms to MaxTTL.
	TTL time.Duration

	// LoadTimeout is how long a load may run before its ctx ends. Default 30s.
	LoadTimeout time.Duration

	// WaitTimeout is how long a miss waits for another process's load before it loads without a lock (see FailClosed), and
	// how long for its turn among MaxLoads or MaxUnlockedLoads before its callers get an error. Default LoadTimeout + TTL.
	WaitTimeout time.Duration

	// FailClosed returns an error to the callers when so many nodes cannot be reached that there is no
	// majority, when the Store fails, and after WaitTimeout. Otherwise such a miss loads without a lock: still
	// once per key and process at a time, and at most MaxUnlockedLoads at a time in all. A single attempt
	// without an answer is repeated, and a lock held by another process is not a reason by itself.
	FailClosed bool

	// MaxLoads is how many loads may run at once in this Fetcher and process, with and without locks; one for
	// many keys is one load. Others wait, in the order of their arrival, at most for WaitTimeout and without
	// holding their locks. A load that another load waits for does not count, if that other one calls Get with
	// its own ctx or one derived from it. Default 0: no limit.
	MaxLoads int

	// FleetLoads is how many loads may run at once in all Fetchers of this Name, in all processes: 0 to 1,000; one for
	// many keys is one load. Each has a permit of package semaphore, with the ttl TTL, which is a lock at "fetch:", Name,
	// ":" and FleetLoads, below the Client's KeyPrefix. So those with another FleetLoads are counted apart: while it is
	// being changed, the limit is the sum. Other loads wait with their locks, at most for WaitTimeout, and then fail, with
	// and without FailClosed. (Refreshes without callers do not wait.) Without a majority of the nodes there are no
	// permits: a miss that loads without a lock loads without a permit, too, at most MaxUnlockedLoads in each process.
	//
	// A load that another load waits for does not count, as for MaxLoads, if this process has begun it. If another one
	// has, it may wait for the permit of the load that waits for it, until LoadTimeout ends that: so let no load get keys
	// of this Fetcher, nor of one whose loads get such keys. Default 0: no limit.
	FleetLoads int

	// MaxUnlockedLoads is how many loads without a lock may run at once in this Fetcher. Others
	// wait, as for MaxLoads, and lock within a second once the nodes answer again. Default 16.
	MaxUnlockedLoads int

	// MaxBatch is how many keys one call of the Store or the Loader has. Default 500.
	MaxBatch int

	// ErrorHold is how long later misses of the key in this process get the error of a failed load,
	// as *HeldError, instead of loading again; never that a key does not exist, and not where its entry has changed
	// since. Errors are kept for the latest 10,000 keys, and at most as many others. Default 1s. With a negative value
	// only the callers that were already waiting get the error, and the next miss loads.
	//
	// A stale value whose refresh failed is still served, and refreshed when ErrorHold allows, and not within a second.
	ErrorHold time.Duration

	// StaleWait is how long a caller that has found a stale value waits for the new one, before it is
	// served the stale one. Default 0: it does not wait.
	StaleWait time.Duration

	// LookupTimeout limits each lookup that the Fetcher makes on behalf of all callers of a key: when it has the
	// lock, and while it waits for another process. It does not limit a caller's own lookup, which has that
	// caller's ctx. Default 1s; a value above LoadTimeout is reduced to LoadTimeout.
	LookupTimeout time.Duration

	// BareContext gives the Loader and the Store none of the values of a caller's ctx. By default a load has
	// those of the caller that began it (trace ids, a tenant), though others get its result, too.
	BareContext bool

	// Name identifies this Fetcher: its locks are at "flightlock:fetch:", the Client's KeyPrefix, Name, ":" and the
	// key. So Fetchers of one Name load a key once, in all processes, and must have the same values. It is also the
	// label in metrics and the log. UTF-8 of at most 128 bytes, without braces. Default "fetch".
	Name string

	// OnError is called for each failure of the Store and the Loader; op is "lookup", "load" or "store". That a key does
	// not exist is none. The failure of a background load, behind a stale value, is reported only here and in the
	// counters. All calls are made on one goroutine, for which only the Client's Close waits. If OnError is so slow that
	// 128 failures wait for it, further ones are dropped and the log reports their number, as it does a panic.
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
