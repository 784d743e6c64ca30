package flightlock

import (
	"context"
	"log/slog"
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
	c.logs.put(line, c.tasks.Go, c.writeLine, c.linesMissing)
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
