package flightlock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// doing is a Lock for as long as Do has it, besides how it is refreshed: Do's ctx bounds it, and nothing else does
// unless the caller says so. A Lock under a ctx without end may be held for ever by an fn that hangs, so the longest are
// made visible: in Stats, in the metrics, and in the log after an hour.
//
// Most calls of Do are over before their first refresh is due, and cost nothing for that: a Lock is listed when its first
// refresh is, and so a lock that is too young for one is not seen.
//
//	unlisted --first refresh--> listed --Do ends--> ended
//	   +------------------------Do ends--------------->
type doing struct {
	ctx   context.Context // Do's
	since time.Duration   // on the Client's clock

	last   bool // the refresh under way, or the one before, was sent after ctx had ended: written by Due, read by refreshed
	warned bool // as last

	listed atomic.Int32 // unlisted, listed or ended; from unlisted to listed under the mu of the list
}

const (
	unlisted = iota
	listed
	ended
)

// doings are the locks that Do holds and that were to be refreshed once. The zero value is ready for use.
type doings struct {
	mu  sync.Mutex // guards all
	all map[*doing]*Lock
}

func (ds *doings) add(d *doing, l *Lock) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	if !d.listed.CompareAndSwap(unlisted, listed) {
		return
	}
	if ds.all == nil {
		ds.all = map[*doing]*Lock{}
	}
	ds.all[d] = l
}

// end follows the end of Do. It takes no mutex for a lock that is not listed.
func (ds *doings) end(d *doing) {
	if d.listed.Swap(ended) != listed {
		return
	}
	ds.mu.Lock()
	defer ds.mu.Unlock()
	delete(ds.all, d)
}

// oldest is since when the oldest lock is held; ok is false if there is none.
func (ds *doings) oldest() (since time.Duration, ok bool) {
	type held struct {
		since time.Duration
		l     *Lock
	}
	ds.mu.Lock()
	all := make([]held, 0, len(ds.all))
	for d, l := range ds.all {
		all = append(all, held{d.since, l})
	}
	ds.mu.Unlock()
	slices.SortFunc(all, func(a, b held) int { return int(a.since - b.since) })
	for _, h := range all {
		if h.l.Err() == nil { // else fn goes on without it
			return h.since, true
		}
	}
	return 0, false
}

// tooLong is how long Do holds a lock before the log tells.
const tooLong = time.Hour

// refreshing is called when a refresh of l is due.
func (d *doing) refreshing(l *Lock) {
	if d.listed.Load() == unlisted {
		l.c.doings.add(d, l)
	}
	if age := time.Since(l.c.began) - d.since; !d.warned && age >= tooLong && !l.insideDo() {
		d.warned = true
		l.c.log(slog.LevelWarn, "flightlock: Do has held a lock for an hour and goes on until its function returns", "key", l.Key())
	}
	d.last = d.ctx.Err() != nil
}

// insideDo reports whether l is nested in a lock that Do holds, which the log is told of itself.
func (l *Lock) insideDo() bool {
	n := l.nest.Load()
	if n == nil || n == gone || n.outermost == l {
		return false
	}
	a := n.outermost.auto.Load()
	return a != nil && a.do != nil
}

// stopped is why a lock is not refreshed any more after the last time.
func (d *doing) stopped() error {
	err, cause := d.ctx.Err(), context.Cause(d.ctx)
	if errors.Is(cause, err) {
		return fmt.Errorf("its ctx ended, and the function went on for another ttl: %w", cause)
	}
	return fmt.Errorf("its ctx ended, and the function went on for another ttl: %w: %w", err, cause)
}
