package flightlock

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/queue"
)

// fetchSeen is what a Fetcher reports: OnError and log lines. Code of the user's that it
// calls runs on goroutines that nothing waits for.
type fetchSeen struct {
	c        *Client
	name     string
	onError  func(key, op string, err error) // may be nil
	reports  queue.Queue[fetchFailure]
	refusals atomic.Int64
	without  withoutLocks
}

type fetchFailure struct {
	key, op string
	err     error
}

func (s *fetchSeen) begin(c *Client, o FetchOptions, unlocked *atomic.Uint64) {
	s.c, s.name, s.onError = c, o.Name, o.OnError
	s.without.s, s.without.count = s, unlocked
}

// end is for a Fetcher that was closed.
func (s *fetchSeen) end() { s.without.stop() }

// failed reports a failure to OnError.
func (s *fetchSeen) failed(key, op string, err error) {
	if s.onError != nil {
		s.reports.Put(fetchFailure{key, op, err}, s.c.tasks.Go, s.report, s.dropped)
	}
}

func (s *fetchSeen) report(x fetchFailure) {
	returned := false
	defer func() {
		if v := recover(); !returned {
			s.c.log(slog.LevelError, "flightlock: FetchOptions.OnError panicked", "fetcher", s.name, "panic", oneLine(v))
		}
	}()
	s.onError(x.key, x.op, x.err)
	returned = true
}

func (s *fetchSeen) dropped(n int) {
	s.c.log(slog.LevelWarn, "flightlock: FetchOptions.OnError is too slow: some failures were not passed to it",
		"fetcher", s.name, "count", n)
}

// mayReportRefusal reports whether to report a key that cannot be locked: one each second, for a
// stale value is found often.
func (s *fetchSeen) mayReportRefusal() bool {
	now, last := time.Now().UnixNano(), s.refusals.Load()
	return now-last >= int64(time.Second) && s.refusals.CompareAndSwap(last, now)
}

// withoutLocks logs when loads without locks begin, and when there were none for a while.
type withoutLocks struct {
	s     *fetchSeen
	count *atomic.Uint64 // of them

	mu     sync.Mutex  // guards what follows
	timer  *time.Timer // set as long as they continue
	last   time.Time   // when the last one began
	before uint64      // how many there were before
}

// quiet is for how long there must be no load without a lock before the log says that they have
// ended.
const quiet = 10 * time.Second

// began is called before each load without a lock. why is the reason. There may be fewer loads: keys are loaded
// together, or have values by then.
func (w *withoutLocks) began(why error) {
	if w.s.c.opts.Logger == nil {
		return
	}
	w.mu.Lock()
	w.last = time.Now()
	first := w.timer == nil
	if first {
		w.before = w.count.Load()
		w.timer = time.AfterFunc(quiet, w.check)
	}
	w.mu.Unlock()
	if first {
		w.s.c.log(slog.LevelWarn, "flightlock: loading without locks", "fetcher", w.s.name, "err", oneLine(why))
	}
}

func (w *withoutLocks) check() {
	w.mu.Lock()
	if left := quiet - time.Since(w.last); w.timer != nil && left > 0 {
		w.timer.Reset(left)
		w.mu.Unlock()
		return
	}
	w.mu.Unlock()
	w.stop()
}

func (w *withoutLocks) stop() {
	w.mu.Lock()
	on, loads := w.timer != nil, uint64(0)
	if on {
		w.timer.Stop()
		loads = w.count.Load() - w.before
	}
	w.timer = nil
	w.mu.Unlock()
	if on {
		w.s.c.log(slog.LevelInfo, "flightlock: no loads without locks any more", "fetcher", w.s.name, "loads", loads)
	}
}
