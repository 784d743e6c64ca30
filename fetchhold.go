package flightlock

import (
	"container/list"
	"fmt"
	"strings"
	"time"
)

// HeldError is what newcomers get for a key whose load failed not long ago, instead of another load:
// see FetchOptions.ErrorHold.
type HeldError struct {
	Err   error     // what those got who waited for that load
	Until time.Time // the next Fetch after it loads again
}

// Error is one line.
func (e *HeldError) Error() string {
	return fmt.Sprintf("flightlock: a load that failed is not repeated before %s: %s", e.Until.Format("15:04:05.000"), oneLine(e.Err))
}

// Unwrap gives Err.
func (e *HeldError) Unwrap() error { return e.Err }

// oneLine is what there is to say of v, for logs that take a line for an entry.
func oneLine(v any) string { return strings.ReplaceAll(fmt.Sprint(v), "\n", "; ") }

const (
	maxErrorHold = 30 * time.Second // what doubling leads to
	minRefresh   = time.Second      // between a refresh that failed and the next, at least
	maxFailures  = 10_000
)

// failures are the keys of a Fetcher whose last load failed. A record is a few words, and there are
// maxFailures at most, so the oldest ones are forgotten when an origin fails for very many keys: their next
// callers load. Holding the flight itself would cost its contexts for as long, without a bound.
//
// Newcomers get the error until held, those with a stale value begin no refresh until refresh.
// Both double with each failure of the key that follows another one. A success removes the record.
//
// Guarded by Fetcher.mu.
type failures struct {
	hold  time.Duration // FetchOptions.ErrorHold
	keys  map[string]*failure
	order list.List // of *failure, the one that failed longest ago first
}

type failure struct {
	key           string
	err           error
	count         int // in a row
	held, refresh time.Time
	at            *list.Element
}

// failed notes that a load of key failed.
func (fs *failures) failed(key string, err error, now time.Time) {
	x := fs.note(key, now)
	x.err = err
	if fs.hold > 0 {
		x.held = now.Add(doubled(fs.hold, x.count))
	}
}

// notStored notes that a value of key was loaded, and is not in the cache: the next stale hit
// would load again.
func (fs *failures) notStored(key string, now time.Time) { fs.note(key, now).held = time.Time{} }

func (fs *failures) note(key string, now time.Time) *failure {
	x := fs.keys[key]
	switch {
	case x == nil:
		x = &failure{key: key}
		if fs.keys == nil {
			fs.keys = map[string]*failure{}
		}
		fs.keys[key], x.at = x, fs.order.PushBack(x)
		fs.trim(now)
	case now.After(x.refresh.Add(maxErrorHold)): // nobody has tried for so long
		x.count = 0
		fallthrough
	default:
		fs.order.MoveToBack(x.at)
	}
	x.count = min(x.count+1, 64)
	x.refresh = now.Add(doubled(max(fs.hold, minRefresh), x.count))
	return x
}

// trim removes the oldest record if there are too many, and one or two that say nothing any more.
func (fs *failures) trim(now time.Time) {
	for range 2 {
		if x := fs.order.Front().Value.(*failure); len(fs.keys) > maxFailures || x.at != fs.order.Back() && now.After(x.refresh.Add(maxErrorHold)) {
			fs.remove(x)
		}
	}
}

// succeeded notes that key was loaded and stored.
func (fs *failures) succeeded(key string) {
	if x := fs.keys[key]; x != nil {
		fs.remove(x)
	}
}

func (fs *failures) remove(x *failure) {
	delete(fs.keys, x.key)
	fs.order.Remove(x.at)
}

// of is the error for a newcomer, if the last one still counts.
func (fs *failures) of(key string, now time.Time) error {
	if x := fs.keys[key]; x != nil && now.Before(x.held) {
		return &HeldError{Err: x.err, Until: x.held}
	}
	return nil
}

// allowRefresh reports whether a stale value may be loaded anew.
func (fs *failures) allowRefresh(key string, now time.Time) bool {
	x := fs.keys[key]
	return x == nil || !now.Before(x.refresh)
}

// doubled is d, doubled for each failure after the first, up to maxErrorHold or d itself.
func doubled(d time.Duration, count int) time.Duration {
	for ; count > 1 && d < maxErrorHold; count-- {
		d = min(2*d, maxErrorHold)
	}
	return d
}
