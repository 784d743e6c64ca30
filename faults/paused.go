//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fenced"
	"github.com/redis/go-redis/v9"
)

// The paused-holder test, as Jepsen ran it against the locks of etcd 3.4.3 (jepsen.io, January 2020):
// processes add elements to a list, each by reading it and writing it back under a lock with
// a ttl of 2 s, while the process that holds the lock is stopped for 5 s again and again.
// They do not look whether they still hold it, which would make the hole smaller and not close it.
//
// Every holder does it to two lists at once: a plain one, with GET and SET, and a fenced one,
// with the token. An element that was acknowledged and is not in the list in the end is a lost update.

const (
	pausedKey  = "paused"
	plainList  = "list:plain"
	fencedList = "list:fenced"

	pausedWork = 30 * time.Millisecond // between reading and writing
)

// added is an element, and whether its two writes were acknowledged.
type added struct {
	Element       string
	Plain, Fenced bool
}

// workPaused adds elements until ctx ends.
func (c *child) workPaused(ctx context.Context) {
	for n := 0; ctx.Err() == nil; n++ {
		lock, err := c.client.SingleFlightLock(ctx, pausedKey, c.TTL, nil)
		if err != nil {
			continue
		}
		a := added{Element: fmt.Sprintf("%d.%d", c.Proc, n)}
		if err := c.add(&a, lock); err != nil {
			c.emit(event{Fatal: err.Error()})
			return
		}
		_ = lock.Release(ctx)
		c.emit(event{Append: &a})
	}
}

// add reads both lists, works, and writes both.
func (c *child) add(a *added, lock *flightlock.Lock) error {
	ctx := context.Background()
	plain, err := c.register.Get(ctx, plainList).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return err
	}
	list, err := fenced.Get(ctx, c.register, fencedList, lock.Fence())
	stale := errors.Is(err, fenced.ErrStale)
	if err != nil && !stale && !errors.Is(err, redis.Nil) {
		return err
	}
	c.emit(event{Working: true})
	time.Sleep(pausedWork)
	if err := c.register.Set(ctx, plainList, plain+a.Element+" ", 0).Err(); err != nil {
		return err
	}
	a.Plain = true
	if stale {
		return nil
	}
	err = fenced.Set(ctx, c.register, fencedList, list+a.Element+" ", lock.Fence(), 0)
	a.Fenced = err == nil
	if errors.Is(err, fenced.ErrStale) {
		return nil
	}
	return err
}

// lostUpdates is the result of the paused-holder test.
type lostUpdates struct {
	pauses                  int
	plainAcked, plainLost   int
	fencedAcked, fencedLost int
	refused                 int // writes and reads with a token that was too old
}

// runPaused stops holders for so long each, until the given time is over, at least once.
func runPaused(ctx context.Context, set setup, pauseFor, atLeast time.Duration) (r lostUpdates, err error) {
	set.Paused = true
	c, err := newCell(ctx, set, 5, 3)
	if err != nil {
		return r, err
	}
	defer c.close()
	for end := time.Now().Add(atLeast); r.pauses == 0 || time.Now().Before(end); r.pauses++ {
		if err := c.stopOne(ctx, pauseFor, c.working, inTime); err != nil {
			return r, err
		}
	}
	h, err := c.finish()
	if err != nil {
		return r, err
	}
	store := c.clientOf(c.store)
	plain, fencedOnes := store.Get(ctx, plainList).Val(), store.Get(ctx, fencedList).Val()
	for _, a := range h.appends {
		if a.Plain {
			r.plainAcked++
			r.plainLost += missing(plain, a.Element)
		}
		if a.Fenced {
			r.fencedAcked++
			r.fencedLost += missing(fencedOnes, a.Element)
		} else {
			r.refused++
		}
	}
	return r, nil
}

// missing is 1 if the element is not in the list.
func missing(list, element string) int {
	if strings.Contains(" "+list, " "+element+" ") {
		return 0
	}
	return 1
}

func (r lostUpdates) print(out io.Writer) {
	fmt.Fprintf(out, "%d pauses\n\n", r.pauses)
	fmt.Fprintln(out, "| | acknowledged | lost | refused |")
	fmt.Fprintln(out, "|---|---|---|---|")
	fmt.Fprintf(out, "| GET, SET | %d | %d | 0 |\n", r.plainAcked, r.plainLost)
	fmt.Fprintf(out, "| fenced.Get, fenced.Set | %d | %d | %d |\n", r.fencedAcked, r.fencedLost, r.refused)
}
