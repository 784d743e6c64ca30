package fetch

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/errtext"
	"github.com/flightlock/flightlock/internal/queue"
	"github.com/flightlock/flightlock/internal/seam"
)

// seen is what a Fetcher reports: OnError, log lines, metrics. Code of the user's runs where nothing waits
// for it.
type seen struct {
	c        seam.Client
	name     string
	onError  func(key, op string, err error) // may be nil
	reports  queue.Queue[failed]
	observer seam.Fetcher // nil: nobody observes loads and misses
	// for a Fetcher that was closed, and has counted for the last time; it may be called again
	end      func()
	unlocked *atomic.Uint64 // how many loads without a lock there were
	refusal  atomic.Int64   // when refused last reported a key, in nanoseconds

	mu             sync.Mutex  // guards what follows
	unlockedEnd    *time.Timer // set as long as there are such loads
	unlockedBefore uint64      // how many there were before
}

type failed struct {
	key, op string
	err     error
}

// failed reports a failure to OnError.
func (s *seen) failed(key, op string, err error) {
	if s.onError != nil {
		s.reports.Put(failed{key, op, err}, s.c.Go, s.report, s.dropped)
	}
}

// refused reports a key that cannot be locked: one of all each second, for stale values are found often.
func (s *seen) refused(key string, err error) {
	now, last := time.Now().UnixNano(), s.refusal.Load()
	if now-last >= int64(time.Second) && s.refusal.CompareAndSwap(last, now) {
		s.failed(key, "load", err)
	}
}

func (s *seen) report(x failed) {
	returned := false
	defer func() {
		if v := recover(); !returned {
			s.c.Log(slog.LevelError, "flightlock: Options.OnError of a Fetcher panicked", "fetcher", s.name,
				"panic", errtext.OneLine(v))
		}
	}()
	s.onError(x.key, x.op, x.err)
	returned = true
}

func (s *seen) dropped(n int) {
	s.c.Log(slog.LevelWarn,
		"flightlock: Options.OnError of a Fetcher is too slow: some failures were not passed to it",
		"fetcher", s.name, "count", n)
}

// waited observes a key that has its result, if its caller has waited since began.
func (s *seen) waited(ctx context.Context, key string, began time.Time, err error) {
	if s.observer != nil && !began.IsZero() {
		if errors.Is(err, ErrNotFound) {
			err = nil
		}
		s.observer.MissEnded(ctx, key, time.Since(began), err)
	}
}

// loading is ctx for a load that is observed from now on. ended is called when it is over, or not waited for
// any more.
func (s *seen) loading(ctx context.Context,
	keys []string) (_ context.Context, ended func(err error, over bool)) {
	if s.observer == nil {
		return ctx, func(error, bool) {}
	}
	began := time.Now()
	ctx = s.observer.LoadStarted(ctx, keys)
	return ctx, func(err error, over bool) {
		outcome, panicked := flightlock.LoadLoaded, (*flightlock.PanicError)(nil)
		switch {
		case !over, errors.Is(err, context.DeadlineExceeded):
			outcome = flightlock.LoadTimedOut
		case errors.As(err, &panicked):
			outcome = flightlock.LoadPanicked
		case err != nil:
			outcome = flightlock.LoadFailed
		}
		s.observer.LoadEnded(ctx, keys, time.Since(began), string(outcome), err)
	}
}

// quiet is for how long there must be no load without a lock before the log says that they have ended.
const quiet = 10 * time.Second

// withoutLocks is called before each load without a lock, for the log: it says when they begin, and when
// there were none for a while. why is the reason. It is not if the load of another process has failed:
// nothing is amiss then.
func (s *seen) withoutLocks(why error) {
	if s.c.Why(why) == seam.FailedElsewhere {
		return
	}
	text := errtext.OneLine(why) // a Store's error may be code of the user's
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unlockedEnd != nil {
		s.unlockedEnd.Reset(quiet)
		return
	}
	s.unlockedBefore = s.unlocked.Load()
	s.unlockedEnd = time.AfterFunc(quiet, s.withLocksAgain)
	s.c.Log(slog.LevelWarn, "flightlock: loading without locks", "fetcher", s.name, "err", text)
}

func (s *seen) withLocksAgain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unlockedEnd != nil {
		s.unlockedEnd.Stop()
		s.unlockedEnd = nil
		s.c.Log(slog.LevelInfo, "flightlock: no loads without locks any more", "fetcher", s.name,
			"loads", s.unlocked.Load()-s.unlockedBefore)
	}
}
