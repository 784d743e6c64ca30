package flightlock

import (
	"container/list"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/coalesce"
)

const (
	maxErrorHold = 30 * time.Second      // what doubling leads to
	minRefresh   = time.Second           // between a refresh that failed and the next, at least
	firstRefresh = 10 * time.Millisecond // between one that found the lock in use and the next, at first
	maxFailures  = 10_000
)

// failures are the keys of a Fetcher whose last load failed. A record is a few words, and there
// are maxFailures at most, so the oldest ones are forgotten when an origin fails for very many
// keys: their next callers load. Holding the run itself would cost its contexts for as long,
// without a bound.
//
// Newcomers get the error until held, those with a stale value begin no refresh until refresh.
// Both double with each failure of the key that follows another one. A success removes the record. They end
// by either clock: while the machine sleeps, the origin may recover.
type failures struct {
	hold    time.Duration // FetchOptions.ErrorHold
	stamped bool          // the Source has stamps

	mu    sync.Mutex // guards what follows
	keys  map[string]*failure
	order list.List // of *failure, the one that failed longest ago first
}

type failure struct {
	key           string
	stamp         string // of the entry when the load began; "" if that is not known
	err           error
	count         int // in a row
	blamed        int // of these, those in which no other key may have been to blame
	held, refresh time.Time
	pause         time.Duration // before refresh, if others have the lock
	at            *list.Element
}

// failed notes that a load of key failed, which began when the entry had the stamp.
func (fs *failures) failed(key, stamp string, err error, now time.Time) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	x := fs.noteLocked(key, now)
	x.blamed = min(x.blamed+1, 64)
	fs.holdLocked(x, stamp, err, now.Add(doubled(fs.hold, x.blamed)))
}

// failedWithOthers is failed for a load of many keys of which any may be to blame. What is held for that does not
// double.
func (fs *failures) failedWithOthers(key, stamp string, err error, now time.Time) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.holdLocked(fs.noteLocked(key, now), stamp, err, now.Add(fs.hold))
}

func (fs *failures) holdLocked(x *failure, stamp string, err error, until time.Time) {
	x.err, x.stamp = err, strings.Clone(stamp) // which may be a part of the entry: a record must not keep the old value
	if fs.hold > 0 {
		x.held = until
	}
}

// notStored notes that a value of key was loaded, and is not in the cache: the next stale hit
// would load again.
func (fs *failures) notStored(key string, now time.Time) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.noteLocked(key, now).held = time.Time{}
}

// inUse notes that another process has the lock of key: it refreshes the value, mostly. Until it has, each stale hit
// would try the lock once more. The pauses double up to minRefresh, and are short again after as long without one.
func (fs *failures) inUse(key string, now time.Time) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	x := fs.keys[key]
	if x == nil {
		x = fs.addLocked(key, now)
	}
	if x.pause *= 2; x.pause == 0 || now.After(x.refresh.Add(minRefresh)) {
		x.pause = firstRefresh
	}
	x.pause = min(x.pause, minRefresh)
	if next := now.Add(x.pause); next.After(x.refresh) {
		x.refresh = next
	}
}

func (fs *failures) addLocked(key string, now time.Time) *failure {
	x := &failure{key: key}
	if fs.keys == nil {
		fs.keys = map[string]*failure{}
	}
	fs.keys[key], x.at = x, fs.order.PushBack(x)
	fs.trimLocked(now)
	return x
}

func (fs *failures) noteLocked(key string, now time.Time) *failure {
	x := fs.keys[key]
	switch {
	case x == nil:
		x = fs.addLocked(key, now)
	case now.After(x.refresh.Add(maxErrorHold)): // no load was tried for so long
		x.count, x.blamed = 0, 0
		fallthrough
	default:
		fs.order.MoveToBack(x.at)
	}
	x.count = min(x.count+1, 64)
	x.refresh = now.Add(doubled(max(fs.hold, minRefresh), x.count))
	return x
}

// trimLocked removes the oldest record if there are too many, and one or two that say nothing any
// more.
func (fs *failures) trimLocked(now time.Time) {
	for range 2 {
		if x := fs.order.Front().Value.(*failure); len(fs.keys) > maxFailures || x.at != fs.order.Back() &&
			now.After(x.refresh.Add(maxErrorHold)) {
			fs.removeLocked(x)
		}
	}
}

// succeeded notes that key was loaded and stored.
func (fs *failures) succeeded(key string) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if x := fs.keys[key]; x != nil {
		fs.removeLocked(x)
	}
}

func (fs *failures) removeLocked(x *failure) {
	delete(fs.keys, x.key)
	fs.order.Remove(x.at)
}

// of is the error for a newcomer that found the stamp, if the last one still counts, and for whom
// else that error is.
//
// With another stamp the origin has changed since, so that the error may be out of date. Without one,
// as in an outage of the cache, nothing is known: then an error counts, so that an origin that fails
// is left alone, but not ErrNotFound, which is as good as a value.
func (fs *failures) of(key, stamp string, now time.Time) (error, coalesce.Scope) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	x := fs.keys[key]
	if x == nil || clock.Passed(now, x.held) {
		return nil, coalesce.Scope{}
	}
	held := &HeldError{Err: x.err, Until: x.held}
	same := stamp != "" && x.stamp == stamp
	switch {
	case !fs.stamped:
		return held, coalesce.Scope{}
	case same:
		return held, coalesce.Scope{Limited: true, Stamp: stamp}
	case stamp != "" && x.stamp != "", errors.Is(x.err, ErrNotFound):
		return nil, coalesce.Scope{}
	}
	return held, coalesce.Scope{}
}

// allowRefresh reports whether a stale value may be loaded again.
func (fs *failures) allowRefresh(key string, now time.Time) bool {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	x := fs.keys[key]
	return x == nil || clock.Passed(now, x.refresh)
}

// doubled is d, doubled for each failure after the first, up to maxErrorHold or d itself.
func doubled(d time.Duration, count int) time.Duration {
	for ; count > 1 && d < maxErrorHold; count-- {
		d = min(2*d, maxErrorHold)
	}
	return d
}
