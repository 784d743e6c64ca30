package flightlock

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// fetchSeen is what a Fetcher reports: OnError, log lines, metrics. Code of the user's that it
// calls runs on goroutines that nothing waits for.
type fetchSeen struct {
	c        *Client
	name     string
	onError  func(key, op string, err error) // may be nil
	reports  queue[fetchFailure]
	meter    *fetchMeter // nil without Options.Registerer
	refusals atomic.Int64
	without  withoutLocks
}

type fetchFailure struct {
	key, op string
	err     error
}

func (s *fetchSeen) begin(c *Client, o FetchOptions, stats func() FetchStats) {
	s.c, s.name, s.onError = c, o.Name, o.OnError
	s.without.s = s
	if c.metrics != nil {
		s.meter = c.metrics.fetchers.add(o.Name, stats)
	}
}

// end is for a Fetcher that was closed, and has counted last for the last time.
func (s *fetchSeen) end(last FetchStats) {
	s.without.stop()
	if s.meter != nil {
		s.c.metrics.fetchers.remove(s.meter, last)
	}
}

// failed reports a failure to OnError.
func (s *fetchSeen) failed(key, op string, err error) {
	if s.onError != nil {
		s.reports.put(fetchFailure{key, op, err}, s.c.tasks.Go, s.report, s.dropped)
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
	s *fetchSeen

	mu    sync.Mutex  // guards what follows
	timer *time.Timer // set as long as they continue
	last  time.Time   // when the last one began
	loads int
}

// quiet is for how long there must be no load without a lock before the log says that they have
// ended.
const quiet = 10 * time.Second

// began is called for each load without a lock. why is the reason.
func (w *withoutLocks) began(why error) {
	if w.s.c.opts.Logger == nil {
		return
	}
	w.mu.Lock()
	w.last, w.loads = time.Now(), w.loads+1
	first := w.timer == nil
	if first {
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
	on, loads := w.timer != nil, w.loads
	if on {
		w.timer.Stop()
	}
	w.timer, w.loads = nil, 0
	w.mu.Unlock()
	if on {
		w.s.c.log(slog.LevelInfo, "flightlock: no loads without locks any more", "fetcher", w.s.name, "loads", loads)
	}
}
