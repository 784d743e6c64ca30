package flightlock

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// logQueue is the way to Options.Logger. Whatever there is to log happens where others wait: on the
// goroutine that reads a node's answers, on one that ends locks whose time is up, on one that probes
// a node. A log that hangs, on a pipe that nobody reads, must not keep a lock's Context from
// ending. So lines are queued, and one goroutine writes them while there are any. When too many wait,
// they are counted instead.
type logQueue struct {
	mu      sync.Mutex // guards what follows
	lines   []slog.Record
	writing bool // the goroutine lives
	dropped int  // lines that found the queue full
}

const maxLines = 128

// log queues a line, unless nobody wants to know.
func (c *Client) log(level slog.Level, msg string, args ...any) {
	if c.opts.Logger == nil {
		return
	}
	line := slog.NewRecord(time.Now(), level, msg, 0)
	line.Add(args...)
	q := &c.logs
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.lines) >= maxLines {
		q.dropped++
		return
	}
	q.lines = append(q.lines, line)
	if !q.writing { // after Close nobody writes
		q.writing = c.tasks.run(func() { q.write(c.opts.Logger.Handler()) })
	}
}

// write writes what is queued until nothing is.
func (q *logQueue) write(h slog.Handler) {
	ctx := context.Background()
	for {
		lines := q.take()
		if lines == nil {
			return
		}
		for _, line := range lines {
			if h.Enabled(ctx, line.Level) {
				_ = h.Handle(ctx, line)
			}
		}
	}
}

// take empties the queue. nil says that nothing was there, and that the goroutine ends.
func (q *logQueue) take() []slog.Record {
	q.mu.Lock()
	defer q.mu.Unlock()
	lines := q.lines
	if q.dropped > 0 {
		line := slog.NewRecord(time.Now(), slog.LevelWarn, "flightlock: lines are missing here: the log is too slow", 0)
		line.Add("count", q.dropped)
		lines = append(lines, line)
	}
	q.lines, q.dropped = nil, 0
	q.writing = lines != nil
	return lines
}
