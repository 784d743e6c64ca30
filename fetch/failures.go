package fetch

import (
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

const (
	minRefresh  = time.Second            // between a refresh that failed and the next, at least
	usePause    = 100 * time.Millisecond // between one that found the lock in use and the next
	maxFailures = 10_000
)

// failures are the keys of a Fetcher whose last load has left nothing that is served. A record is a few
// words, and the latest maxFailures are there, and at most as many others: when an origin fails for very many
// keys, the next callers of the oldest ones load. They end by either clock: while the machine sleeps, the
// origin may recover.
type failures struct {
	hold time.Duration // Options.ErrorHold

	mu       sync.Mutex // guards what follows
	new, old map[string]failure
}

type failure struct {
	stamp   string // of the entry when the load began; "" if that is not known
	err     error
	held    time.Time // until then newcomers get err
	refresh time.Time // no refresh of a stale value begins before
}

// failed notes that a load of key failed, which began when the entry had the stamp. err is nil if the value
// is not in the store, though it was loaded: then no newcomer has an error, but the next stale hit would load
// again.
func (fs *failures) failed(key, stamp string, err error, now time.Time) {
	hold := minRefresh
	if err != nil {
		hold = max(fs.hold, minRefresh)
	}
	fs.mu.Lock()
	defer fs.mu.Unlock()
	x := fs.findLocked(key)
	x.err, x.held, x.refresh = err, now.Add(fs.hold), clock.Later(x.refresh, now.Add(hold))
	x.stamp = strings.Clone(stamp) // which may be a part of the entry: a record must not keep the old value
	fs.noteLocked(key, x)
}

// inUse notes that another process has the lock of key, mostly to refresh it: each stale hit would try the
// lock again.
func (fs *failures) inUse(key string, now time.Time) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	x := fs.findLocked(key)
	x.refresh = clock.Later(x.refresh, now.Add(usePause))
	fs.noteLocked(key, x)
}

// findLocked is the record of key. The zero one is none.
func (fs *failures) findLocked(key string) failure {
	if x, ok := fs.new[key]; ok {
		return x
	}
	return fs.old[key]
}

func (fs *failures) noteLocked(key string, x failure) {
	if fs.new == nil || len(fs.new) >= maxFailures {
		fs.new, fs.old = map[string]failure{}, fs.new
	}
	fs.new[key] = x
}

// succeeded notes that key was loaded and stored.
func (fs *failures) succeeded(key string) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	delete(fs.new, key)
	delete(fs.old, key)
}

// of is the error for a newcomer that found the stamp, if the last one still counts. known says that it also
// counts for no others than those with the same stamp: with another one the origin has changed since, so that
// the error may be out of date. Without one, as in an outage of the store, an error counts, so that an origin
// that fails is left alone.
func (fs *failures) of(key, stamp string, now time.Time) (err error, known bool) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	x := fs.findLocked(key)
	if x.err == nil || clock.Passed(now, x.held) || x.stamp != "" && stamp != "" && x.stamp != stamp {
		return nil, false
	}
	return &HeldError{Err: x.err, Until: x.held}, x.stamp != ""
}

// allowRefresh reports whether a stale value may be loaded again.
func (fs *failures) allowRefresh(key string, now time.Time) bool {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return clock.Passed(now, fs.findLocked(key).refresh)
}
