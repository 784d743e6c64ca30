package flightlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/check"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/quorum"
)

// log queues a line, if there is a Logger. What is logged happens on goroutines that others wait for: the
// reader of a node's replies, the timer that ends locks, the probe of a node. A log that hangs, on a pipe
// that nobody reads, must not keep a lock's Context from ending. So lines pass through a queue.
func (c *Client) log(level slog.Level, msg string, args ...any) {
	if c.opts.Logger == nil {
		return
	}
	line := slog.NewRecord(time.Now(), level, msg, 0)
	line.Add(args...)
	c.logs.Put(line, c.tasks.Go, c.writeLine, c.linesMissing)
}

func (c *Client) writeLine(line slog.Record) {
	ctx := context.Background()
	if h := c.opts.Logger.Handler(); h.Enabled(ctx, line.Level) {
		_ = h.Handle(ctx, line)
	}
}

func (c *Client) linesMissing(n int) {
	line := slog.NewRecord(time.Now(), slog.LevelWarn,
		"flightlock: lines are missing here: the log is too slow", 0)
	line.Add("count", n)
	c.writeLine(line)
}

// What may happen many times a second has a burst of lines: when the nodes fail, a process may lose a hundred
// thousand locks, and a node may come and go for hours. So the first ones have lines of their own, and what
// follows has one line for each pause, with its number, until there is a pause in which nothing happens.
const (
	burstFree  = 2 // of a node a change, and the next one, which is mostly that it is over
	burstPause = 5 * time.Second
)

// bursts are those that have begun. The zero value has none.
type bursts struct {
	mu    sync.Mutex        // guards what follows
	about map[string]*begun // by what happens
}

type begun struct {
	timer *time.Timer    // ends the pause
	n     int            // how many there were
	line  func(more int) // logs the last one: by itself (0), or for so many
}

// often has line called for what has happened, by itself or for all in a pause, if there is a Logger.
func (c *Client) often(about string, line func(more int)) {
	if c.opts.Logger == nil {
		return
	}
	l := &c.bursts
	l.mu.Lock()
	b := l.about[about]
	if b == nil {
		if l.about == nil {
			l.about = map[string]*begun{}
		}
		b = &begun{timer: time.AfterFunc(burstPause, func() { l.pauseOver(about, false) })}
		l.about[about] = b
	}
	b.n, b.line = b.n+1, line
	free := b.n <= burstFree
	l.mu.Unlock()
	if free {
		line(0)
	}
}

// pauseOver logs what was not logged so far. No pause follows the last one.
func (l *bursts) pauseOver(about string, last bool) {
	l.mu.Lock()
	b := l.about[about]
	if b == nil {
		l.mu.Unlock()
		return
	}
	more, line := b.n-burstFree, b.line
	if more > 0 && !last {
		b.n = burstFree
		b.timer.Reset(burstPause)
	} else {
		b.timer.Stop()
		delete(l.about, about)
	}
	l.mu.Unlock()
	if more > 0 {
		line(more)
	}
}

// flush logs what was not logged so far, and ends all pauses.
func (l *bursts) flush() {
	l.mu.Lock()
	all := slices.Sorted(maps.Keys(l.about))
	l.mu.Unlock()
	for _, about := range all {
		l.pauseOver(about, true)
	}
}

// many logs what may happen to many locks at once, of which this is the one of key.
func (c *Client) many(one, others, key string, args ...any) {
	c.often(one, func(more int) {
		if more == 0 {
			c.log(slog.LevelWarn, one, slices.Concat([]any{"key", key}, args)...)
		} else {
			c.log(slog.LevelWarn, others, "count", more, "last_key", key)
		}
	})
}

// changed logs a change of a node.
func (c *Client) changed(about string, level slog.Level, msg string, args ...any) {
	c.often(about, func(more int) {
		if more > 0 {
			args = append(args, "changes", more)
		}
		c.log(level, msg, args...)
	})
}

// lost is called for every lock that was lost.
func (c *Client) lost(key string, w *flight.Watch, why error) {
	if c.watching != nil {
		c.watching.lost(key, w, why)
	}
	if named := (lossError{}); errors.As(why, &named) {
		why = fmt.Errorf("flightlock: %w", named.why) // the line has the key already
	}
	c.many("flightlock: lock lost", "flightlock: more locks lost", key, "err", why)
}

// nodeIs is called when a node has no vote any more, or refuses something so that locks are worse, for the
// reason err, or with nil when that is over. It is logged, with more about err, and who waits for votes is
// notified. A change and its end have the same with.
func (c *Client) nodeIs(name string, err error, without, with string, more ...any) {
	about := name + " " + cmp.Or(with, without)
	if err == nil {
		c.changed(about, slog.LevelInfo, with, "node", name)
		return
	}
	c.tasks.Go(func() {
		if c.away() { // callers that fail fast end their wait
			c.flights.Recheck()
			c.reads.flights.Recheck()
			c.fetches.Recheck()
		}
	})
	c.changed(about, slog.LevelWarn, without, slices.Concat([]any{"node", name}, more, []any{"err", err})...)
}

// on has nodeIs called for a node, with what is the matter or nil.
func (c *Client) on(without, with string) func(name string, err error) {
	return func(name string, err error) { c.nodeIs(name, err, without, with) }
}

const isBack = "flightlock: node is back"

// onSuspended is called when a node was suspended, or is back.
func (c *Client) onSuspended(name string, err error) {
	if errors.Is(err, conn.ErrLogin) {
		c.nodeIs(name, err, "flightlock: node suspended: login refused", isBack, "fix", c.check.FixLogin(name, err))
	} else {
		c.nodeIs(name, err, "flightlock: node suspended: it does not answer", isBack)
	}
}

// onQuarantine is called when a node has entered quarantine, or has left it.
func (c *Client) onQuarantine(i int, s quorum.Quarantined) {
	var err error
	if !s.Until.IsZero() {
		err = &s
	}
	c.nodeIs(c.nodes[i].Name(), err, "flightlock: node quarantined: its votes do not count",
		"flightlock: node is out of quarantine", "until", s.Until.Round(0))
}

// onApart is called when it was found that scripts on a node may not access keys of two hash slots, or that
// they may by now.
func (c *Client) onApart(i int, why error) {
	c.nodeIs(c.nodes[i].Name(), why,
		"flightlock: quarantine is off: its scripts access keys of two hash slots, which "+
			"this node refuses; if a node loses data, it may grant a lock that is held",
		"flightlock: scripts on the node may access keys of two hash slots, as the quarantine needs", "fix",
		check.FixApart)
}
