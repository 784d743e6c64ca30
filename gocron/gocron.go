// Package gocron has a Locker and an Elector for schedulers of github.com/go-co-op/gocron/v2 on several
// machines. A job does not learn that its lock, or the leadership, was lost while it runs. One that must not
// be missed, or not be run twice, rather calls once.RecordLast or once.RecordFirst of flightlock.
package gocron

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/election"
	gocron "github.com/go-co-op/gocron/v2"
)

// A Locker has one of several schedulers run a job that all of them start at about the same time. It is safe
// for concurrent use.
type Locker struct {
	c     *flightlock.Client
	splay time.Duration
}

// NewLocker makes a Locker. splay is by how much the timers of the schedulers may differ, and must be less
// than the time between two runs of a job: a lock is held until the job has ended, and for splay at least. It
// is also the ttl of the lock, which is refreshed, so it has the limits of one: Options.MaxTTL, a minute by
// default.
func NewLocker(c *flightlock.Client, splay time.Duration) (*Locker, error) {
	if splay <= 0 {
		return nil, fmt.Errorf("gocron: %w: splay is %v: it must be more than 0", flightlock.ErrInvalid, splay)
	}
	return &Locker{c, splay}, nil
}

// Lock makes one attempt at the lock key, the name of a job. The errors are those of Client.TryLock: with any
// of them the scheduler does not run the job. Unlock returns at once, and always nil.
func (l *Locker) Lock(ctx context.Context, key string) (gocron.Lock, error) {
	began := time.Now()
	lock, err := l.c.TryLock(ctx, key, l.splay)
	if err != nil {
		return nil, err
	}
	// Not with ctx: a scheduler that shuts down ends it, and then waits for the job.
	if err := lock.AutoRefresh(context.WithoutCancel(ctx), flightlock.RefreshPolicy{}); err != nil {
		lock.ReleaseAsync()
		return nil, err
	}
	return unlock(func() { time.AfterFunc(l.splay-time.Since(began), lock.ReleaseAsync) }), nil
}

type unlock func()

func (u unlock) Unlock(context.Context) error { u(); return nil }

// ErrNotLeader reports that another scheduler leads, or none.
var ErrNotLeader = errors.New("gocron: this scheduler does not lead")

// An Elector has one of several schedulers run all jobs. It is safe for concurrent use.
type Elector struct {
	lock   atomic.Pointer[flightlock.Lock] // of the last term
	cancel context.CancelFunc
	ended  chan struct{} // closed when the campaign has ended
	err    error         // why
}

// NewElector begins a campaign, as election.Campaign with these arguments does, until Close.
func NewElector(c *flightlock.Client, name, value string, ttl time.Duration) *Elector {
	ctx, cancel := context.WithCancel(context.Background())
	e := &Elector{cancel: cancel, ended: make(chan struct{})}
	go func() {
		defer close(e.ended)
		e.err = election.Campaign(ctx, c, name, value, ttl, func(ctx context.Context, l *flightlock.Lock) error {
			e.lock.Store(l)
			<-ctx.Done()
			return nil
		})
	}()
	return e
}

// IsLeader is nil if this scheduler leads now. Otherwise it is ErrNotLeader, or why the campaign has ended:
// flightlock.ErrInvalid or ErrClosed.
func (e *Elector) IsLeader(context.Context) error {
	select {
	case <-e.ended:
		return errors.Join(ErrNotLeader, e.err)
	default:
	}
	if l := e.lock.Load(); l == nil || l.Err() != nil {
		return ErrNotLeader
	}
	return nil
}

// Close ends the campaign, so that another scheduler leads. Shut the scheduler down before.
func (e *Elector) Close() {
	e.cancel()
	<-e.ended
}
