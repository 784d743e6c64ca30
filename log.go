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

// changeLog logs how nodes change. One may go and come back many times a second, for hours: what is logged of that is
// the first change, the next one, which is mostly that it is over, and from then on every few seconds the last one with
// the number of those before it.
type changeLog struct {
	mu    sync.Mutex          // guards what follows
	about map[string]*changes // by the node, and what has changed about it
}

// changes are those of the last changesPause.
type changes struct {
	timer *time.Timer // ends the pause
	n     int         // how many: the first freeChanges have lines of their own
	level slog.Level  // the last one
	msg   string
	args  []any
}

const (
	changesPause = 5 * time.Second
	freeChanges  = 2
)

func (l *changeLog) of(c *Client, about string, level slog.Level, msg string, args ...any) {
	if c.opts.Logger == nil {
		return
	}
	l.mu.Lock()
	last := l.about[about]
	if last == nil {
		if l.about == nil {
			l.about = map[string]*changes{}
		}
		last = &changes{timer: time.AfterFunc(changesPause, func() { l.pauseOver(c, about) })}
		l.about[about] = last
	}
	last.n, last.level, last.msg, last.args = last.n+1, level, msg, args
	free := last.n <= freeChanges
	l.mu.Unlock()
	if free {
		c.log(level, msg, args...)
	}
}

// pauseOver logs what was not logged so far. Changes that follow are counted again, until there are none for a pause.
func (l *changeLog) pauseOver(c *Client, about string) {
	l.mu.Lock()
	last := l.about[about]
	if last == nil || last.n <= freeChanges {
		delete(l.about, about)
		l.mu.Unlock()
		return
	}
	level, msg, args := last.level, last.msg, slices.Concat(last.args, []any{"changes", last.n - freeChanges})
	last.n = freeChanges
	last.timer.Reset(changesPause)
	l.mu.Unlock()
	c.log(level, msg, args...)
}

// flush logs what was not logged so far, and ends all pauses.
func (l *changeLog) flush(c *Client) {
	l.mu.Lock()
	all := slices.Sorted(maps.Keys(l.about))
	l.mu.Unlock()
	for _, about := range all {
		l.pauseOver(c, about)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, last := range l.about {
		last.timer.Stop()
	}
	l.about = nil
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

// nodeIs is called when a node has no vote any more, or refuses something so that locks are worse, for the reason err,
// or with nil when that is over. It is logged, with more about err, and who waits for votes is notified. A change and
// its end have the same with.
func (c *Client) nodeIs(name string, err error, without, with string, more ...any) {
	about := name + " " + cmp.Or(with, without)
	if err == nil {
		c.changes.of(c, about, slog.LevelInfo, with, "node", name)
		return
	}
	c.tasks.Go(func() {
		if c.away() { // callers that fail fast end their wait
			c.flights.Recheck()
			c.reads.flights.Recheck()
			c.fetches.Recheck()
		}
	})
	c.changes.of(c, about, slog.LevelWarn, without, slices.Concat([]any{"node", name}, more, []any{"err", err})...)
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

// onUnverified is called when a node does not report whether it lost data, or does again.
func (c *Client) onUnverified(name string, err error) {
	c.nodeIs(name, err, "flightlock: node unverified", "flightlock: node is verified again")
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

// onMode is called when it was found how a node is used, and when that is another way than before.
func (c *Client) onMode(name, mode string) {
	c.changes.of(c, name+" mode", slog.LevelInfo, "flightlock: node is in use", "node", name, "mode", mode)
}

// onUnnamed is called when a node refuses names for connections.
func (c *Client) onUnnamed(name string, err error) {
	c.nodeIs(name, err, "flightlock: connections have no name: the node refuses CLIENT SETNAME", "")
}

// onUnheard is called when a node sends no messages, or does again.
func (c *Client) onUnheard(name string, err error) {
	c.nodeIs(name, err, "flightlock: node sends no notices: who waits polls", "flightlock: node sends notices again")
}

// onApart is called when it was found that scripts on a node may not access keys of two hash slots, or that they may by
// now.
func (c *Client) onApart(i int, why error) {
	c.nodeIs(c.nodes[i].Name(), why, "flightlock: quarantine is off: its scripts access keys of two hash slots, which "+
		"this node refuses; if a node loses data, it may grant a lock that is held",
		"flightlock: scripts on the node may access keys of two hash slots, as the quarantine needs", "fix", check.FixApart)
}
