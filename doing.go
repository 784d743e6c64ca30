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

// doing is a lock held by Do, in addition to how it is refreshed. By default only Do's ctx limits
// how long it is held. Under a ctx that never ends, an fn that hangs holds the lock forever, so the
// locks held longest are made visible: in Stats, in the metrics, and in the log after an hour.
//
// Most calls of Do end before their first refresh is due, and cost nothing for that: a lock is
// listed when its first refresh is due, so a younger lock is not visible.
//
//	unlisted --first refresh--> listed --Do ends--> ended
//	   +------------------------Do ends--------------->
type doing struct {
	ctx   context.Context // Do's
	since time.Duration   // on the Client's clock

	last   bool // the latest refresh was sent after ctx had ended: written by Due, read by refreshed
	warned bool // as last

	listed atomic.Int32 // unlisted, listed or ended; from unlisted to listed under the mu of the list
}

const (
	unlisted = iota
	listed
	ended
)

// doings are the locks held by Do whose first refresh was due. The zero value is ready for use.
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

// end is called at the end of Do. It takes no mutex for a lock that is not listed.
func (ds *doings) end(d *doing) {
	if d.listed.Swap(ended) != listed {
		return
	}
	ds.mu.Lock()
	defer ds.mu.Unlock()
	delete(ds.all, d)
}

// oldest returns when the oldest lock was acquired; ok is false if there is none.
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
		if h.l.Err() == nil { // otherwise fn continues without it
			return h.since, true
		}
	}
	return 0, false
}

// tooLong is how long Do holds a lock before a warning is logged.
const tooLong = time.Hour

// refreshing is called when a refresh of l is due.
func (d *doing) refreshing(l *Lock) {
	if d.listed.Load() == unlisted {
		l.c.doings.add(d, l)
	}
	if age := time.Since(l.c.began) - d.since; !d.warned && age >= tooLong && !l.insideDo() {
		d.warned = true
		l.c.log(slog.LevelWarn, "flightlock: Do has held a lock for an hour, and keeps it until its function returns", "key", l.Key())
	}
	d.last = d.ctx.Err() != nil
}

// insideDo reports whether l is nested in a lock held by Do, which logs its own warning.
func (l *Lock) insideDo() bool {
	n := l.reentry.Load()
	if n == nil || n == notShared || n.outermost == l {
		return false
	}
	a := n.outermost.auto.Load()
	return a != nil && a.do != nil
}

// stopped is the reason why a lock is not refreshed any more after the last refresh.
func (d *doing) stopped() error {
	err, cause := d.ctx.Err(), context.Cause(d.ctx)
	if errors.Is(cause, err) {
		return fmt.Errorf("its ctx ended, and the function ran for another ttl: %w", cause)
	}
	return fmt.Errorf("its ctx ended, and the function ran for another ttl: %w: %w", err, cause)
}
