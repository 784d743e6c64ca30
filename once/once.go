// Package once runs the job of a tick, such as the report of a night, once in all processes that have a
// timer.
//
// A lock alone does not do that: a process whose timer is late finds it free, and runs the job again. So each
// tick has a record on a Redis server, and there are two ways to use it:
//
//	RecordLast:  lock -> no record -> fn -> record -> release    a crash is taken over: may run twice
//	RecordFirst: lock -> record, if there is none -> fn -> release    a crash loses the tick: never runs twice
//
// The lock has the name of the job, so its ticks do not overlap, and later ones have larger tokens. Ticks
// older than keep/2 are not run, because their record may have expired; a tick may be recorded 15 s ahead.
package once

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/redis/go-redis/v9"
)

const (
	ahead    = 15 * time.Second     // a call may come so long before its tick: timers are early, clocks differ
	minKeep  = 4 * ahead            // half of it is more than ahead by 15 s: clocks may differ by that
	maxKeep  = 366 * 24 * time.Hour // for so long each tick has a key: more is a mistake in the unit
	ttl      = 10 * time.Second     // of the lock, or MaxTTL
	patience = 5 * time.Second      // with rdb, when fn has succeeded
)

// RecordLast runs fn unless it has succeeded for this tick, and then records that. A job is never missed as
// long as somebody calls RecordLast for its tick in time: callers wait while one of them runs fn, and the
// next one runs it if that one crashes, loses the lock or gets an error. Then what it had done by that time
// may be done twice.
//
// ran reports whether this call has called fn. If not, a nil error means that the job was done, and any other
// that somebody has to call again: ErrInvalid, those of Client.SingleFlightLock, and of rdb. If so, the error
// is as in Client.Do: fn's own, unchanged, or ErrLockLost, or both. fn's nil is recorded even if ctx has
// ended or the lock was lost, so fn must return an error if it has not finished. If the record cannot be
// stored within some five seconds, the error is that, and the next caller runs fn again.
//
// name is the key of the lock. It is refreshed while fn runs, as in Do, and has a ttl of 10 s, or
// Options.MaxTTL if that is less, after which a process that died is replaced. fn's ctx is the lock's
// Context.
//
// tick is the nominal time of the job, the same on all machines, in any time zone: what the schedule says, or
// now truncated to the period. It must be at most keep/2 ago by this machine's clock, also when the wait for
// the lock is over, and at most 15 s ahead. keep is how long a record lasts: 1 minute to 366 days, the same
// in all callers. All clocks, that of rdb too, may be apart, or jump, by keep/2 less 15 s together.
//
// rdb has the records, in keys that begin with "flightlock:once:", for which its user needs +get and +set. It
// is one of the lock's nodes or another server, Sentinel-managed master or Cluster, and reads are not sent to
// replicas. If it loses what it has acknowledged, by eviction (use noeviction), a restart or a failover,
// ticks run again.
func RecordLast(ctx context.Context, c *flightlock.Client, rdb redis.UniversalClient, name string,
	tick time.Time, keep time.Duration, fn func(ctx context.Context, lock *flightlock.Lock) error) (ran bool,
	err error) {
	r, err := recordOf(c, rdb, name, tick, keep, fn == nil)
	if err != nil {
		return false, err
	}
	err = c.Do(ctx, name, r.ttl, nil, func(ctx context.Context, l *flightlock.Lock) error {
		switch err := r.rdb.Get(ctx, r.key).Err(); {
		case err == nil: // it was done
			return nil
		case !errors.Is(err, redis.Nil):
			return r.failed(err)
		}
		if err := r.inTime(); err != nil { // after the read: until now a record would not have expired
			return err
		}
		ran = true
		if err := fn(ctx, l); err != nil {
			return err
		}
		return r.write(ctx, valueOf(l))
	})
	return ran, err
}

// RecordFirst records the tick, and runs fn if nobody had recorded it. fn never runs twice for a tick: if it
// fails, or its process crashes after the record, the tick is lost. It may also be lost if the lock is lost
// at the record, or the outcome of that is in doubt: then fn does not run, and there is an error.
//
// ran reports whether this call has called fn. If not, a nil error means that another call has recorded the
// tick, whatever became of it; after an error it is safe to call again. All else is as in RecordLast. A job
// uses one of both.
func RecordFirst(ctx context.Context, c *flightlock.Client, rdb redis.UniversalClient, name string,
	tick time.Time, keep time.Duration, fn func(ctx context.Context, lock *flightlock.Lock) error) (ran bool,
	err error) {
	r, err := recordOf(c, rdb, name, tick, keep, fn == nil)
	if err != nil {
		return false, err
	}
	err = c.Do(ctx, name, r.ttl, nil, func(ctx context.Context, l *flightlock.Lock) error {
		if first, err := r.claim(ctx, valueOf(l)); !first || err != nil {
			return err
		}
		if err := errors.Join(r.inTime(), context.Cause(ctx)); err != nil { // the server may have been slow
			return err
		}
		ran = true
		return fn(ctx, l)
	})
	return ran, err
}

// A record is one key, whose value is of one call.
type record struct {
	rdb  redis.UniversalClient
	key  string
	tick time.Time
	keep time.Duration
	ttl  time.Duration // of the lock
}

func recordOf(c *flightlock.Client, rdb redis.UniversalClient, name string, tick time.Time,
	keep time.Duration, noFn bool) (r record, err error) {
	inside := seam.Of(c)
	_, ring := rdb.(*redis.Ring) // a key moves to another server when one fails
	cluster, _ := rdb.(*redis.ClusterClient)
	switch {
	case inside == nil:
		return r, invalid("c is the zero Client: use New or Open")
	case rdb == nil, ring, cluster != nil && cluster.Options().ReadOnly: // also if reads are routed
		return r, invalid("rdb is %T: records need a server, or a Cluster whose masters are read", rdb)
	case keep < minKeep || keep > maxKeep:
		return r, invalid("keep is %v: it must be from %v to %v", keep, minKeep, maxKeep)
	case noFn:
		return r, invalid("fn is nil: it is the function to run")
	}
	key := "flightlock:once:" + inside.KeyPrefix() + name + ":" + tick.UTC().Format(time.RFC3339Nano)
	r = record{rdb, key, tick.Round(0).UTC(), keep, min(ttl, inside.MaxTTL())} // without a monotonic reading
	if err := inside.CheckKey(name); err != nil {
		return r, err
	}
	return r, r.inTime()
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("once: %w: %s", flightlock.ErrInvalid, fmt.Sprintf(format, args...))
}

func (r record) inTime() error {
	if age := time.Now().Round(0).Sub(r.tick); age > r.keep/2 || age < -ahead {
		return invalid("tick is %v, %v ago: it must be at most %v ago, half of keep, and %v ahead",
			r.tick.Format(time.RFC3339Nano), age, r.keep/2, ahead)
	}
	return nil
}

// valueOf says whose the record is. Calls that are nested have the same lock, so the last part tells calls
// apart.
func valueOf(l *flightlock.Lock) string {
	return l.Owner() + " " + strconv.FormatInt(l.Fence(), 10) + " " + rand.Text()
}

func (r record) write(ctx context.Context, value string) (err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	for range 3 { // connections of the pool may have died, and rdb may not repeat anything
		if err = r.rdb.Set(ctx, r.key, value, r.keep).Err(); err == nil {
			return nil
		}
	}
	return r.failed(err)
}

// claim stores the record if there is none, and reports whether there was none. go-redis may repeat a command
// whose reply was lost, so after a refusal or an error what the server has counts. If that is nothing, it may
// get it later.
func (r record) claim(ctx context.Context, value string) (first bool, err error) {
	first, err = r.rdb.SetNX(ctx, r.key, value, r.keep).Result()
	if first && err == nil {
		return true, nil
	}
	stored, lost := r.rdb.Get(ctx, r.key).Result()
	if lost != nil {
		return false, r.failed(fmt.Errorf("in doubt, so fn does not run: %w", errors.Join(err, lost)))
	}
	return stored == value, nil
}

func (r record) failed(err error) error { return fmt.Errorf("once: record %q: %w", r.key, err) }
