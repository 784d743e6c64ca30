// Package semaphore lets at most N goroutines of all processes do something at a time.
//
// A permit is a lock on one of the keys name:0, name:1 and so on, so it is as exclusive as a lock. Processes
// that wait get permits in turns, as for a lock.
package semaphore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"time"
	"weak"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/redis/go-redis/v9"
)

// maxPermits is a limit, because who waits does so for all permits.
const maxPermits = 1000

// Semaphore has a number of permits. It is safe for concurrent use. A process needs one for each name:
// callers of several overtake each other.
type Semaphore struct {
	c        *flightlock.Client
	inside   seam.Client
	name     string
	slots    []slot
	waiting  atomic.Int32 // callers at the gate, or on their way through it
	free     atomic.Int32 // where to look for a free slot first
	agreedAt atomic.Int64 // when the nodes confirmed the number of permits, in Unix nanoseconds; 0: not yet
	attends  atomic.Bool  // attend is due
}

// slot is one permit.
type slot struct {
	key  string
	last atomic.Pointer[weak.Pointer[flightlock.Lock]] // that this process had on it
}

// held reports whether this process has the slot.
func (s *slot) held() bool {
	if p := s.last.Load(); p != nil {
		l := p.Value()
		return l != nil && l.Err() == nil
	}
	return false
}

// New makes a Semaphore of 1 to 1,000 permits, and sends nothing. name has at most 4,091 bytes. The keys
// name:gate, name:0 and so on are those of locks, and nobody else may use them.
//
// All clients of the nodes must give name the same number. The nodes keep it while clients acquire or have a
// permit, and afterwards for Options.MaxTTL, a minute at least: then it may be another one.
func New(c *flightlock.Client, name string, permits int) (*Semaphore, error) {
	inside := seam.Of(c)
	switch {
	case inside == nil:
		return nil, fmt.Errorf("semaphore: %w: c is the zero Client: use New or Open", flightlock.ErrInvalid)
	case permits < 1 || permits > maxPermits:
		return nil, fmt.Errorf("semaphore: %w: permits is %d: it must be 1 to %d", flightlock.ErrInvalid, permits,
			maxPermits)
	}
	if err := cmp.Or(inside.CheckKey(name), inside.CheckKey(name+":gate")); err != nil {
		return nil, err
	}
	s := &Semaphore{c: c, inside: inside, name: name, slots: make([]slot, permits)}
	for i := range s.slots {
		s.slots[i].key = name + ":" + strconv.Itoa(i)
	}
	s.free.Store(rand.Int32N(int32(permits))) // processes begin at different ones
	return s, nil
}

// Acquire waits for a permit until retry gives up or ctx ends. The permit is a Lock, whose Release gives it
// back, and which is refreshed and lost as any other. Its tokens cannot be compared with those of another
// permit. A ctx made by its Context gives no nested permit: each call takes one of its own.
//
// ttl, retry and the errors are as in Client.SingleFlightLock. ErrNotAcquired: others have all permits.
// ErrInvalid also: other clients use name with another number of permits. ErrUnavailable also: no majority
// confirms ours. A permit that was detached, and attached by any Client, is a permit as before, but does not
// have the nodes keep their number.
func (s *Semaphore) Acquire(ctx context.Context, ttl time.Duration, retry flightlock.RetryStrategy) (
	*flightlock.Lock, error) {
	began := time.Now()
	ctx = s.inside.Bare(ctx)
	return s.agreed(ctx, func() (*flightlock.Lock, error) { return s.acquire(ctx, ttl, retry, began) })
}

// acquire has callers of all processes served in the order of a lock:
//
//	nobody of this process waits -> one attempt at a slot that this process does not have -> a permit
//	otherwise -> the gate, name:gate -> wait for all slots at once, keep the first -> a permit
//
// The gate is a lock that its holder passes on with the first slot it gets: so one contender at a time waits
// for slots. It is no part of the limit: if its holder loses it, two wait. That each waits for one slot of
// its choice was rejected: it would miss the others when they become free. To count votes instead of holders
// would be wrong: of three nodes each pair can admit a pair of holders, three for a limit of two.
func (s *Semaphore) acquire(ctx context.Context, ttl time.Duration, retry flightlock.RetryStrategy,
	began time.Time) (*flightlock.Lock, error) {
	if s.waiting.Load() == 0 { // otherwise it would overtake who waits
		if l, err := s.try(ctx, s.choose(), ttl); err == nil {
			return l, nil
		}
	}
	s.waiting.Add(1)
	defer s.waiting.Add(-1)
	gate, err := s.c.SingleFlightLock(ctx, s.name+":gate", ttl, retry)
	if err != nil {
		return nil, fmt.Errorf("semaphore %q: %w", s.name, err)
	}
	defer gate.ReleaseAsync()
	_ = gate.AutoRefresh(ctx, flightlock.RefreshPolicy{}) // a gate that is lost is no error
	return s.first(ctx, ttl, rest(retry, time.Since(began)))
}

// TryAcquire makes one attempt at each permit that this process does not have, one after the other, until one
// succeeds. Otherwise the error is ErrNotAcquired, or another one of Acquire.
func (s *Semaphore) TryAcquire(ctx context.Context, ttl time.Duration) (*flightlock.Lock, error) {
	ctx = s.inside.Bare(ctx)
	return s.agreed(ctx, func() (*flightlock.Lock, error) { return s.tryAll(ctx, ttl) })
}

func (s *Semaphore) tryAll(ctx context.Context, ttl time.Duration) (*flightlock.Lock, error) {
	from := s.choose() + len(s.slots) - 1
	for i := 1; ; i++ {
		l, err := s.try(ctx, (from+i)%len(s.slots), ttl)
		if err == nil || !errors.Is(err, flightlock.ErrNotAcquired) || i == len(s.slots) {
			return l, err
		}
	}
}

// choose is the slot where the last attempt succeeded, or the next one that this process does not have.
func (s *Semaphore) choose() int {
	from := int(s.free.Load())
	for i := range s.slots {
		if n := (from + i) % len(s.slots); !s.slots[n].held() {
			return n
		}
	}
	return from
}

// try makes one attempt at a slot. After a failure the next attempt begins at another one, chosen at random.
func (s *Semaphore) try(ctx context.Context, n int, ttl time.Duration) (*flightlock.Lock, error) {
	l, err := s.c.TryLock(ctx, s.slots[n].key, ttl)
	if err != nil {
		s.free.Store(rand.Int32N(int32(len(s.slots))))
		return nil, fmt.Errorf("semaphore %q: %w", s.name, err)
	}
	s.got(n, l)
	return l, nil
}

func (s *Semaphore) got(n int, l *flightlock.Lock) {
	p := weak.Make(l) // a Lock that its owner drops must not stay in use
	s.slots[n].last.Store(&p)
	s.free.Store(int32(n))
	s.attendLater()
}

// keep is how long the nodes keep the number of permits.
func (s *Semaphore) keep() time.Duration { return max(time.Minute, s.inside.MaxTTL()) }

// attend has the nodes keep the number of permits while this process has one, though nobody acquires. It ends
// with the last permit.
func (s *Semaphore) attend() {
	s.attends.Store(false) // before it looks: a permit that comes later has it called again
	for i := range s.slots {
		if s.slots[i].held() {
			_, _ = s.agree(context.Background())
			s.attendLater()
			return
		}
	}
}

func (s *Semaphore) attendLater() {
	if s.attends.CompareAndSwap(false, true) {
		age := time.Duration(time.Now().UnixNano() - s.agreedAt.Load())
		time.AfterFunc(min(max(s.keep()/3-age, s.keep()/30), s.keep()/3), s.attend)
	}
}

// first waits for all slots, and keeps the first. It returns when nobody waits any more: what it was granted
// besides is on its way back then, and this process's next attempt at it waits for that. A panic of the
// user's code, as in an Observer, is the caller's, and its runtime.Goexit an error.
func (s *Semaphore) first(ctx context.Context, ttl time.Duration, retry flightlock.RetryStrategy) (
	l *flightlock.Lock, why error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		n        int
		l        *flightlock.Lock
		err      error
		panicked any
	}
	results := make(chan result, len(s.slots))
	for n := range s.slots {
		go func() {
			r := result{n: n, err: errGoexit} // unless it returns
			defer func() {
				r.panicked = recover()
				results <- r
			}()
			r.l, r.err = s.c.SingleFlightLock(ctx, s.slots[n].key, ttl, retry)
		}()
	}
	var panicked any
	for range s.slots {
		r := <-results
		switch {
		case r.err == nil && l == nil:
			l = r.l
			s.got(r.n, l)
		case r.err == nil: // it was granted in the same moment
			r.l.ReleaseAsync()
		case r.err == errGoexit:
			if why = r.err; r.panicked != nil {
				panicked = r.panicked
			}
		case why == nil || errors.Is(why, flightlock.ErrNotAcquired): // rather what is not simply in use
			why = r.err
		}
		if l != nil || why == errGoexit {
			cancel()
		}
	}
	switch {
	case panicked == nil && l != nil:
		return l, nil
	case l != nil:
		l.ReleaseAsync()
	}
	if panicked != nil {
		panic(panicked)
	}
	return nil, fmt.Errorf("semaphore %q: %w", s.name, why)
}

var errGoexit = errors.New("code of the caller's called runtime.Goexit")

// rest is what is left of a strategy when elapsed has passed since the call began: how long it waits, and
// whether it fails fast. So no code of a user's runs on goroutines of ours.
func rest(retry flightlock.RetryStrategy, elapsed time.Duration) (left flightlock.RetryStrategy) {
	if retry == nil {
		return nil
	}
	if flight.TraitsOf(retry)&flight.FailFast != 0 {
		left = flightlock.FailFast(nil)
	}
	if patience := flight.Patience(retry); patience != flight.Forever {
		left = flightlock.Within(left, max(patience-elapsed, time.Millisecond))
	}
	return left
}

// agreed calls acquire, and gives the permit away only if a majority of the nodes has confirmed our number of
// permits, before or afterwards: they may have been out of reach, and a client that has another number may
// have the permits.
func (s *Semaphore) agreed(ctx context.Context,
	acquire func() (*flightlock.Lock, error)) (*flightlock.Lock, error) {
	confirmed, err := s.agree(ctx)
	if err != nil {
		return nil, err
	}
	l, err := acquire()
	if err != nil || confirmed {
		return l, err
	}
	if confirmed, err = s.agree(ctx); err == nil && !confirmed {
		err = fmt.Errorf("semaphore %q: its number of permits: %w", s.name,
			cmp.Or(ctx.Err(), flightlock.ErrUnavailable))
	}
	if err != nil {
		l.ReleaseAsync()
		return nil, err
	}
	return l, nil
}

// agree reports whether a majority of the nodes has our number of permits, and an ErrInvalid if it does not,
// and one has another. It asks them again each third of the time for which they keep it.
func (s *Semaphore) agree(ctx context.Context) (confirmed bool, err error) {
	keep := s.keep()
	if at := s.agreedAt.Load(); at != 0 && time.Duration(time.Now().UnixNano()-at).Abs() < keep/3 {
		return true, nil
	}
	limit := max(time.Second, 2*s.inside.NodeTimeout())
	asked, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	key, nodes := "flightlock:semaphore:"+s.inside.KeyPrefix()+s.name, s.inside.Nodes()
	answers := make(chan int, len(nodes)) // 0: none
	same, other := make(chan struct{}), 0 // closed: a majority has ours
	for _, node := range nodes {
		ours := func() {
			writing, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
			defer cancel()
			answers <- stored(writing, node, key, len(s.slots), keep)
			<-asked.Done()
			select {
			case <-same: // it lasts from now on, and replaces what a client that disagrees has left on a minority
				node.Set(writing, key, len(s.slots), keep)
			default:
			}
		}
		if !s.inside.Go(ours) {
			return false, fmt.Errorf("semaphore %q: %w", s.name, flightlock.ErrClosed)
		}
	}
	for n, all := 0, 0; all < len(nodes); all++ {
		got := 0
		select {
		case got = <-answers:
		case <-asked.Done():
		}
		if got == len(s.slots) {
			n++
		} else if got != 0 {
			other = got
		}
		if n > len(nodes)/2 {
			close(same)
			s.agreedAt.Store(time.Now().UnixNano())
			return true, nil
		}
	}
	if other != 0 {
		return false,
			fmt.Errorf("semaphore: %w: permits of %q is %d, and %d for other clients, until %v after they ended",
				flightlock.ErrInvalid, s.name, len(s.slots), other, keep)
	}
	return false, nil
}

// stored is how many permits a node knows: ours, if it knew none. 0 is no answer.
func stored(ctx context.Context, node redis.UniversalClient, key string, permits int,
	keep time.Duration) int {
	for range 3 { // connections of the pool may have died, and its client may not repeat anything
		if _, err := node.SetNX(ctx, key, permits, keep).Result(); err != nil {
			continue
		}
		if n, err := node.Get(ctx, key).Int(); err == nil {
			return n
		}
	}
	return 0
}
