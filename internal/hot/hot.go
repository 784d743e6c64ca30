// Package hot keeps values in memory for moments.
package hot

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// Tier has the values of keys for a short time each. It is safe for concurrent use. A nil one is empty.
//
// The age of a value begins when its reader began to read it from elsewhere, and not when it comes
// here: what has changed in between is not known. For the same reason a value does not enter if a
// key was removed since its reader began; that is counted per shard, so that removing a key may keep
// a few others out, which then come with their next reader.
//
// It is counted by the monotonic and by the wall clock, and the greater age counts: while the machine
// sleeps the former stands still, and the values elsewhere change.
//
// A value is served for unheard at most, unless the changes that are made elsewhere are heard of: then it is
// removed by these, and served as long as its ttl says. Who hears of them says as of when all have been heard
// (Heard), and no value is served that was current longer ago than unheard, whatever has become of who hears.
//
// Many readers share a value. Shortly before it is over, one of them is sent to renew it, and the
// others continue with it: else all of them would be sent at once when it is over.
//
// Values live for so short a time that it does not matter much which ones make room for others: of a
// few that a map's iteration happens to begin with, the oldest one.
type Tier[V any] struct {
	ttl   time.Duration
	used  uint64 // shards, the first ones
	most  int    // values in a shard
	bytes int    // in a shard
	seed  maphash.Seed
	heard atomic.Pointer[time.Time] // see Heard; nil: nothing is heard
	shard [shards]shard[V]
}

type shard[V any] struct {
	removed atomic.Uint64 // how many times a key was; written under mu

	mu     sync.RWMutex
	values map[string]*value[V]
	bytes  int // of all of them

	_ [64]byte // a shard per cache line
}

type value[V any] struct {
	v       V
	from    time.Time // when its reader began
	ttl     time.Duration
	size    int
	renewed atomic.Bool // somebody was sent
}

const (
	shards  = 16
	sampled = 5 // values that are considered to make room

	unheard = time.Second
)

// New makes a Tier of at most so many keys and bytes, at least one, with a ttl for each value. Each shard has
// its part of both, and what is larger than that of the bytes is not kept.
func New[V any](ttl time.Duration, keys, bytes int) *Tier[V] {
	used := min(shards, keys)
	t := &Tier[V]{ttl: ttl, used: uint64(used), most: keys / used, bytes: bytes / used, seed: maphash.MakeSeed()}
	for i := range t.shard {
		t.shard[i].values = map[string]*value[V]{}
	}
	return t
}

// Reading is the beginning of a read from elsewhere: see Put.
type Reading struct {
	from    time.Time
	removed uint64
}

// age is how old at now is what was begun at from, by the clock that says more.
func age(now, from time.Time) time.Duration { return -clock.Left(now, from) }

func (t *Tier[V]) of(key string) *shard[V] {
	return &t.shard[maphash.String(t.seed, key)%t.used]
}

// Get returns the value of key, which is not to be modified. Without one, and if this reader is the one to
// renew it, it is nil: then the reader reads the value from elsewhere, and calls Put with r.
func (t *Tier[V]) Get(key string) (v *V, r Reading) {
	if t == nil {
		return nil, r
	}
	s := t.of(key)
	now := clock.Now()
	s.mu.RLock()
	x := s.values[key]
	s.mu.RUnlock()
	if x != nil {
		age, ttl := age(now, x.from), x.ttl
		if ttl > unheard && !t.hears(now) {
			ttl = unheard
		}
		if age < ttl && (age < ttl-ttl/8 || x.renewed.Load() || x.renewed.Swap(true)) {
			return &x.v, r
		}
	}
	return nil, Reading{now, s.removed.Load()}
}

// Heard says that every value is removed, or kept out, that had changed elsewhere by then. The first time,
// and after changes were missed, it follows a Clear since which they are heard of.
func (t *Tier[V]) Heard(then time.Time) { t.heard.Store(&then) }

// Hears reports whether changes are heard of.
func (t *Tier[V]) Hears() bool { return t != nil && t.hears(clock.Now()) }

func (t *Tier[V]) hears(now time.Time) bool {
	heard := t.heard.Load()
	return heard != nil && age(now, *heard) < unheard
}

// Put enters a value of so many bytes that was read from elsewhere since r, to be served for most at most.
func (t *Tier[V]) Put(key string, v V, r Reading, most time.Duration, size int) {
	if t == nil {
		return
	}
	s, ttl := t.of(key), min(t.ttl, most)
	now := clock.Now()
	if age(now, r.from) >= ttl || size > t.bytes {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.values[key]
	if s.removed.Load() != r.removed || old != nil && old.from.After(r.from) {
		return
	}
	if old != nil {
		s.removeLocked(key)
	}
	for len(s.values) >= t.most || s.bytes+size > t.bytes {
		s.makeRoomLocked(now)
	}
	s.values[key] = &value[V]{v: v, from: r.from, ttl: ttl, size: size}
	s.bytes += size
}

func (s *shard[V]) removeLocked(key string) {
	if x := s.values[key]; x != nil {
		s.bytes -= x.size
		delete(s.values, key)
	}
}

// makeRoomLocked removes what is over among a few values, or the oldest of them.
func (s *shard[V]) makeRoomLocked(now time.Time) {
	n, removed := 0, false
	oldest, from := "", time.Time{}
	for key, x := range s.values {
		if age(now, x.from) >= x.ttl {
			s.removeLocked(key)
			removed = true
		} else if oldest == "" || x.from.Before(from) {
			oldest, from = key, x.from
		}
		if n++; n == sampled {
			break
		}
	}
	if !removed {
		s.removeLocked(oldest)
	}
}

// Remove removes key. What was read before does not enter any more.
func (t *Tier[V]) Remove(key string) {
	if t == nil {
		return
	}
	s := t.of(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.removed.Add(1)
	s.removeLocked(key)
}

// Clear removes all keys, as Remove does.
func (t *Tier[V]) Clear() {
	if t == nil {
		return
	}
	for i := range t.shard {
		s := &t.shard[i]
		s.mu.Lock()
		s.removed.Add(1)
		clear(s.values)
		s.bytes = 0
		s.mu.Unlock()
	}
}
