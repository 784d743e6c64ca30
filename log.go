package flightlock

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// log queues a line, if there is a Logger. What is logged happens on goroutines that others wait
// for: the reader of a node's replies, the timer that ends locks, the probe of a node. A log that
// hangs, on a pipe that nobody reads, must not keep a lock's Context from ending. So lines pass
// through a queue.
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

func (l *manyLog) init(c *Client, one, others string) { l.c, l.one, l.others = c, one, others }

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
