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
	// TTL is the ttl of the lock, which is refreshed while a load runs: so long do others wait for a process that dies.
	// 10ms to flightlock.Options.MaxTTL. Default 10s, or MaxTTL if that is less.
	TTL time.Duration

	// LoadTimeout is how long a load may run before its ctx ends. Default 30s.
	LoadTimeout time.Duration

	// WaitTimeout is how long a miss waits for another process's load before it loads without a lock (see FailClosed), and
	// how long for its turn among MaxLoads or MaxUnlockedLoads before its callers get an error. Default LoadTimeout + TTL.
	WaitTimeout time.Duration

	// FailClosed has a miss fail without a majority of the nodes, when the Store fails, and after WaitTimeout.
	// Otherwise it loads without a lock then: once per key and process, and at most MaxUnlockedLoads at a time.
	FailClosed bool

	// MaxLoads is how many loads may run at once in this Fetcher; one for many keys is one load. Others wait in order,
	// without locks, at most for WaitTimeout. A Get with the ctx of a load that runs does not wait. Default 0: no limit.
	MaxLoads int

	// FleetLoads is how many loads may run at once in all Fetchers of this Name, in all processes: 0 to 1,000. Each has a
	// permit of package semaphore. Others wait with their locks, at most for WaitTimeout, and then fail; a refresh
	// without callers does not wait. Fetchers with another FleetLoads are counted apart: while it is being changed, the
	// limit is the sum. Without a majority of the nodes there are no permits, and a miss loads without one.
	//
	// Let no load get keys of this Fetcher, nor of one whose loads do: it may wait for its own permit, until LoadTimeout
	// ends that. Default 0: no limit.
	FleetLoads int

	// MaxUnlockedLoads is how many loads without a lock may run at once in this Fetcher. Others
	// wait, as for MaxLoads, and lock within a second once the nodes answer again. Default 16.
	MaxUnlockedLoads int

	// MaxBatch is how many keys one call of the Store or the Loader has. Default 500.
	MaxBatch int

	// ErrorHold is how long misses of this process get the error of a failed load, as *HeldError, instead of loading
	// again, unless the entry has changed since: for the latest 10,000 keys or more. That a key does not exist is not
	// held. A stale value is still served, and refreshed after ErrorHold, or a second. Default 1s; negative: the next miss
	// loads.
	ErrorHold time.Duration

	// StaleWait is how long a caller that has found a stale value waits for the new one, before it is
	// served the stale one. Default 0: it does not wait.
	StaleWait time.Duration

	// LookupTimeout limits each lookup for all callers of a key: when it is locked, and while another process loads it. A
	// caller's own lookup has that caller's ctx. Default 1s; at most LoadTimeout counts.
	LookupTimeout time.Duration

	// BareContext gives the Loader and the Store none of the values of a caller's ctx. By default a load has
	// those of the caller that began it (trace ids, a tenant), though others get its result, too.
	BareContext bool

	// Name is that of the values: Fetchers of one Name, in all processes, load a key once. Its locks are at
	// "flightlock:fetch:", the Client's KeyPrefix, Name, ":" and the key; it is also the label in metrics and the log.
	// UTF-8 of at most 128 bytes, without braces. Default "fetch".
	Name string

	// OnError is called for each failure of the Store and the Loader; op is "lookup", "load" or "store". That of a
	// load behind a stale value is reported only here and in Stats. Calls come one after the other, on a goroutine that
	// the Client's Close waits for. When 128 wait, the next ones are dropped, and the log has their number.
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
