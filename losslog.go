package flightlock

import (
	"errors"
	"log/slog"
	"sync"
	"time"
)

// lossLog logs lost locks. When the nodes fail, a process may lose a hundred thousand locks in a
// second. So one line reports the first loss with its key and reason, and a second later one line
// reports the number of the others.
type lossLog struct {
	c *Client

	mu    sync.Mutex  // guards what follows
	timer *time.Timer // set from the first loss on for a second
	more  int         // losses since that one
	last  string      // key of the latest
}

const lossPause = time.Second

// lost is called by the flights, without their locks.
func (l *lossLog) lost(key string, why error) {
	if errors.Is(why, ErrClosed) {
		return // Close was called to end them
	}
	l.mu.Lock()
	first := l.timer == nil
	if first {
		l.timer = time.AfterFunc(lossPause, l.flush)
	} else {
		l.more, l.last = l.more+1, key
	}
	l.mu.Unlock()
	if first {
		l.c.log(slog.LevelWarn, "flightlock: lock lost", "key", key, "err", why)
	}
}

// flush logs the number of the losses that were not logged one by one.
func (l *lossLog) flush() {
	l.mu.Lock()
	more, last := l.more, l.last
	if l.timer != nil {
		l.timer.Stop()
	}
	l.timer, l.more = nil, 0
	l.mu.Unlock()
	if more > 0 {
		l.c.log(slog.LevelWarn, "flightlock: more locks lost", "count", more, "last_key", last)
	}
}
