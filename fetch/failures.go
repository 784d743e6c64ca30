package fetch

import (
	"container/list"
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

// failures are the keys of a Fetcher whose last load has left nothing that is served. A record is a few words, and
// there are maxFailures at most, so the oldest ones are forgotten when an origin fails for very many keys: their next
// callers load. They end by either clock: while the machine sleeps, the origin may recover.
type failures struct {
	hold time.Duration // Options.ErrorHold

	mu    sync.Mutex // guards what follows
	keys  map[string]*failure
	order list.List // of *failure, the one that was noted longest ago first
}

type failure struct {
	key     string
	stamp   string // of the entry when the load began; "" if that is not known
	err     error
	held    time.Time // until then newcomers get err
	refresh time.Time // no refresh of a stale value begins before
	at      *list.Element
}

// failed notes that a load of key failed, which began when the entry had the stamp. err is nil if the value is not in
// the store, though it was loaded: then no newcomer has an error, but the next stale hit would load again.
func (fs *failures) failed(key, stamp string, err error, now time.Time) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	x := fs.noteLocked(key, now.Add(minRefresh))
	x.err, x.stamp = err, strings.Clone(stamp) // which may be a part of the entry: a record must not keep the old value
	if err != nil {
		x.held = now.Add(fs.hold)
		x.refresh = clock.Later(x.refresh, x.held)
	}
}

// inUse notes that another process has the lock of key: it refreshes the value, mostly. Until it has, each stale hit
// would try the lock once more.
func (fs *failures) inUse(key string, now time.Time) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.noteLocked(key, now.Add(usePause))
}

// noteLocked is the record of key, the latest one.
func (fs *failures) noteLocked(key string, refresh time.Time) *failure {
	x := fs.keys[key]
	if x == nil {
		x = &failure{key: key}
		fs.keys[key], x.at = x, fs.order.PushBack(x)
		if len(fs.keys) > maxFailures {
			fs.removeLocked(fs.order.Front().Value.(*failure))
		}
	}
	fs.order.MoveToBack(x.at)
	x.refresh = clock.Later(x.refresh, refresh)
	return x
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

// of is the error for a newcomer that found the stamp, if the last one still counts. known says that it also counts for
// no others than those with the same stamp: with another one the origin has changed since, so that the error may be
// out of date. Without one, as in an outage of the store, an error counts, so that an origin that fails is left alone.
func (fs *failures) of(key, stamp string, now time.Time) (err error, known bool) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	x := fs.keys[key]
	if x == nil || x.err == nil || clock.Passed(now, x.held) || x.stamp != "" && stamp != "" && x.stamp != stamp {
		return nil, false
	}
	return &HeldError{Err: x.err, Until: x.held}, x.stamp != ""
}

// allowRefresh reports whether a stale value may be loaded again.
func (fs *failures) allowRefresh(key string, now time.Time) bool {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	x := fs.keys[key]
	return x == nil || clock.Passed(now, x.refresh)
}
