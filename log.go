package flightlock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/check"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/node"
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
	line := slog.NewRecord(time.Now(), slog.LevelWarn, "flightlock: lines are missing here: the log is too slow", 0)
	line.Add("count", n)
	c.writeLine(line)
}

// manyLog logs what may happen to many locks at once: when the nodes fail, a process may lose a
// hundred thousand in a second. So one line reports the first with its key, and a second later one
// line reports the number of the others.
type manyLog struct {
	c           *Client
	one, others string // the messages

	mu    sync.Mutex  // guards what follows
	timer *time.Timer // set from the first on for a second
	more  int         // how many since that one
	last  string      // key of the latest
}

const manyPause = time.Second

// of logs that it has happened to the lock of key, if there is a Logger. Of lost locks it is called by
// the flights, without their locks.
func (l *manyLog) of(key string, args ...any) {
	if l.c.opts.Logger == nil {
		return
	}
	l.mu.Lock()
	first := l.timer == nil
	if first {
		l.timer = time.AfterFunc(manyPause, l.flush)
	} else {
		l.more, l.last = l.more+1, key
	}
	l.mu.Unlock()
	if first {
		l.c.log(slog.LevelWarn, l.one, append([]any{"key", key}, args...)...)
	}
}

// flush logs the number of those that were not logged one by one.
func (l *manyLog) flush() {
	l.mu.Lock()
	more, last := l.more, l.last
	if l.timer != nil {
		l.timer.Stop()
	}
	l.timer, l.more = nil, 0
	l.mu.Unlock()
	if more > 0 {
		l.c.log(slog.LevelWarn, l.others, "count", more, "last_key", last)
	}
}

// lost is called for every lock that was lost.
func (c *Client) lost(key string, w *flight.Watch, why error) {
	if c.watching != nil {
		c.watching.lost(key, w, why)
	}
	if named := (lossError{}); errors.As(why, &named) {
		why = fmt.Errorf("flightlock: %w", named.why) // the line has the key already
	}
	c.loss.of(key, "err", why)
}

// nodeIs is called when a node has no vote any more, for the reason err, or with nil when it has one again: that is
// logged, and who waits for the one or the other is notified.
func (c *Client) nodeIs(name string, err error, without, with string, args ...any) {
	args = append([]any{"node", name}, args...)
	if err == nil {
		c.log(slog.LevelInfo, with, args...)
		return
	}
	c.tasks.Go(func() {
		if c.away() { // callers that fail fast end their wait
			c.flights.Recheck()
			c.fetches.Recheck()
		}
	})
	c.log(slog.LevelWarn, without, append(args, "err", err)...)
}

// onSuspended is called when a node was suspended, or is back.
func (c *Client) onSuspended(name string, err error) {
	if errors.Is(err, conn.ErrLogin) {
		c.nodeIs(name, err, "flightlock: node suspended: login refused", "", "fix", c.check.FixLogin(name, err))
	} else {
		c.nodeIs(name, err, "flightlock: node suspended: it does not answer", "flightlock: node is back")
	}
}

// onUnverified is called when a node refuses to report whether it lost data, or has done so.
func (c *Client) onUnverified(name string, err error) {
	c.nodeIs(name, err, "flightlock: node unverified", "flightlock: node is verified again")
}

// onQuarantine is called when a node has entered quarantine, or has left it.
func (c *Client) onQuarantine(i int, s quorum.Quarantined) {
	if name := c.nodes[i].Name(); s.Until.IsZero() {
		c.nodeIs(name, nil, "", "flightlock: node is out of quarantine")
	} else {
		c.nodeIs(name, &s, "flightlock: node quarantined: its votes do not count", "", "until", s.Until.Round(0))
	}
}

// onUnnamed is called when a node refuses names for connections.
func (c *Client) onUnnamed(name string, err error) {
	c.log(slog.LevelWarn, "flightlock: connections have no name: the node refuses CLIENT SETNAME", "node", name,
		"err", err)
}

// onNoInfo is called when node i does not report its process.
func (c *Client) onNoInfo(i int, why error) {
	reason := "its INFO does not identify the process"
	if errors.Is(why, node.ErrInfoRefused) {
		reason = "the right to INFO is missing (ACL SETUSER ... +info)"
	}
	c.log(slog.LevelWarn, "flightlock: a node that restarts with old data, or fails over, may go undetected: "+reason,
		"node", c.nodes[i].Name(), "err", why)
}

// onApart is called when it was found that scripts on a node may not access keys of two hash slots, or that they may by
// now.
func (c *Client) onApart(i int, why error) {
	name := c.nodes[i].Name()
	if why != nil {
		c.log(slog.LevelWarn, "flightlock: quarantine is off: its scripts access keys of two hash slots, which this "+
			"node refuses; if a node loses data, it may grant a lock that is held", "node", name, "err", why,
			"fix", check.FixApart)
	} else {
		c.log(slog.LevelInfo, "flightlock: scripts on the node may access keys of two hash slots, as the "+
			"quarantine needs", "node", name)
	}
}
