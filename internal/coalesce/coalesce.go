// Package coalesce runs a function once for all callers that request its result at the same time.
//
// golang.org/x/sync/singleflight is not sufficient: its callers share the ctx of the first one,
// cannot leave, and hang or crash when the function panics or calls Goexit.
package coalesce

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/flightlock/flightlock/internal/list"
)

// Group holds the runs of one function. At most one run per key can be joined.
type Group[V any, E Embedder[V]] struct {
	newRun func() E
	do     func(E)

	runs[V]
}

// NewGroup makes a Group. newRun returns an Embedder whose run has not begun; do is the function,
// which delivers its result by Deliver or Finish.
func NewGroup[V any, E Embedder[V]](newRun func() E, do func(E)) *Group[V, E] {
	g := &Group[V, E]{newRun: newRun, do: do}
	g.open, g.goroutines.idle = map[string]*Run[V]{}, make(chan struct{})
	return g
}

// Embedder is a pointer to a struct that embeds a Run and has the function's own data.
type Embedder[V any] interface{ run() *Run[V] }

// Run is one run of the function, for the callers of one key.
//
//	open -> committed -> finished    the function runs to its end, even if all callers leave
//	 | +---------------> finished    without having been committed
//	 +-> canceled                    when the last caller leaves, or by Close
//
// Invariants, both decided under the group's mutex:
//
//   - A run can be joined until it is finished or canceled, and removes only itself from its key.
//     So no caller waits for a run that is over.
//   - Commit and cancellation exclude each other: only Abort cancels a committed run.
type Run[V any] struct {
	steps
	Worker Worker // for code that may block, panic or call Goexit; its goroutine ends with the run's

	g    *runs[V]
	self any // the Embedder
	key  string

	// delivered is closed when v and err are set. They do not change after that.
	delivered chan struct{}
	v         V
	err       error

	scope Scope // of v and err; as them

	// guarded by g.mu
	callers     int
	background  bool // runs without callers. After Background, only the function's goroutine writes it
	committed   bool
	isDelivered bool
	links       list.Links[Run[V]] // in g.all
}

// A Scope says for which callers a result is good. The zero Scope is all.
//
// A result is that of a request to somewhere else, so it says nothing about what has happened since
// that request was sent. A caller that came later, after a change of which it may know, must not get
// what was there before. It may if it has a Stamp of its own: then nothing has changed since.
type Scope struct {
	Limited bool
	Before  uint64 // callers that came before this request
	Stamp   string // and callers that have this stamp; "" is none
}

// Includes reports whether a result with this scope is good for a caller. came is the number of the
// last request that was sent when it came.
func (s *Scope) Includes(came uint64, stamp string) bool {
	return !s.Limited || came < s.Before || stamp != "" && stamp == s.Stamp
}

// ListLinks is for package list.
func (r *Run[V]) ListLinks() *list.Links[Run[V]] { return &r.links }

func (r *Run[V]) run() *Run[V] { return r }

// runs is the part of a Group that does not depend on the type of Embedder.
type runs[V any] struct {
	// Waits says what the run of a key waits for, for the caller that is about to leave it; nil if it is nothing
	// of interest. It is set before the first run, or nil.
	Waits func(key string) error

	goroutines goroutines

	mu      sync.Mutex // guards what follows
	closed  bool
	open    map[string]*Run[V]         // the runs that can be joined
	all     list.List[Run[V], *Run[V]] // the runs whose function has not returned
	running int                        // the length of all
}

// Join adds a caller to the run of key. If first is true, the run is new, and the caller sets it up
// and calls Start or Refuse. ok is false after Close.
func (g *Group[V, E]) Join(key string) (e E, first, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return e, false, false
	}
	r := g.open[key]
	if first = r == nil; first {
		r = g.beginLocked(key, g.newRun())
	}
	r.callers++
	return r.self.(E), first, true
}

// JoinOpen is Join, unless there is no run of key that can be joined: then ok is false.
func (g *Group[V, E]) JoinOpen(key string) (e E, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	r := g.open[key]
	if g.closed || r == nil {
		return e, false
	}
	r.callers++
	return r.self.(E), true
}

// Background begins a run without callers; it continues at least until it calls Wanted. ok is false
// if there is a run for key already, and after Close. The caller sets it up and calls Start.
func (g *Group[V, E]) Background(key string) (e E, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed || g.open[key] != nil {
		return e, false
	}
	e = g.newRun()
	g.beginLocked(key, e).background = true
	return e, true
}

func (g *runs[V]) beginLocked(key string, e Embedder[V]) *Run[V] {
	r := e.run()
	r.g, r.self, r.key, r.delivered = g, e, key, make(chan struct{})
	r.Worker.group = &g.goroutines
	g.open[key] = r
	g.all.PushBack(r)
	g.running++
	g.goroutines.add()
	return r
}

// Start runs the function on a new goroutine.
func (g *Group[V, E]) Start(e E) { go g.work(e) }

func (g *Group[V, E]) work(e E) {
	defer e.run().returned()
	g.do(e)
}

// Done ends a run that was not started, because its function was executed elsewhere, together with
// those of other runs. Its result was given.
func (g *Group[V, E]) Done(e E) { e.run().returned() }

// Refuse ends a run that was not started. All callers that have joined it get err.
func (g *Group[V, E]) Refuse(e E, err error) {
	var none V
	r := e.run()
	r.Finish(none, err)
	r.returned()
}

// returned cleans up after the function has returned, or if it was never called.
func (r *Run[V]) returned() {
	g := r.g
	g.mu.Lock()
	r.forgetLocked()
	g.all.Remove(r)
	g.running--
	g.mu.Unlock()
	r.cancel(nil)
	r.Worker.Close()
	g.goroutines.done()
}

// Open reports whether there is a run for key that can be joined, or the group is closed.
func (g *runs[V]) Open(key string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.closed || g.open[key] != nil
}

// Idle is closed when the group is closed and has no goroutine left.
func (g *runs[V]) Idle() <-chan struct{} { return g.goroutines.idle }

// Enter counts a goroutine of the caller's as one of the group, until Exit. It reports false, and counts nothing, if
// the group is closed.
func (g *runs[V]) Enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.goroutines.add()
	return true
}

// Exit ends what Enter has begun.
func (g *runs[V]) Exit() { g.goroutines.done() }

// Goroutines returns the number of the group's goroutines.
func (g *runs[V]) Goroutines() int { return int(g.goroutines.n.Load()) }

// Running returns the number of runs whose function has not returned.
func (g *runs[V]) Running() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.running
}

// Close refuses new runs, and cancels those that are not committed; their callers get the error
// that closed returns for the key.
func (g *runs[V]) Close(cause error, closed func(key string) error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return
	}
	g.closed = true
	for key, r := range g.open {
		if !r.committed {
			var none V
			r.deliverLocked(none, closed(key))
			r.forgetLocked()
			r.cancel(cause)
		}
	}
	g.goroutines.close()
}

// Abort cancels all runs.
func (g *runs[V]) Abort(cause error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for r := g.all.Front(); r != nil; r = g.all.Next(r) {
		r.cancel(cause)
	}
}

var errNoCallers = errors.New("coalesce: all callers left")

// Key returns the key of the run.
func (r *Run[V]) Key() string { return r.key }

// Wait returns the result to a caller. left reports that ctx ended first, and that the caller has
// left the run: then err is what the run waits for, of Waits.
//
// In a stampede a thousand goroutines call Wait at once, many of them with a stack of 2 KB, a
// quarter of which select needs. So Wait's frame is small, and it should be called from a shallow
// stack: growing a stack costs more time than everything else that a caller does.
func (r *Run[V]) Wait(ctx context.Context) (v V, err error, left bool) {
	select {
	case <-r.delivered: // callers that wait for many runs find most of them so
		return r.v, r.err, false
	default:
	}
	select {
	case <-r.delivered:
		return r.v, r.err, false
	case <-ctx.Done():
		return r.quit()
	}
}

// quit returns the outcome of Wait for a caller whose ctx has ended.
func (r *Run[V]) quit() (v V, err error, left bool) {
	if r.g.Waits != nil { // before Leave: the last one to leave cancels the run
		err = r.g.Waits(r.key)
	}
	if r.Leave() {
		return r.v, r.err, false
	}
	return v, err, true
}

// Leave removes a caller from the run. When the last one leaves, a run that is not committed is
// canceled and can no longer be joined. delivered reports whether there was a result before: a
// result that follows is that of the cancellation, which is not for this caller.
func (r *Run[V]) Leave() (delivered bool) {
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	if r.callers--; r.callers == 0 && !r.committed && !r.background {
		r.forgetLocked()
		r.cancel(errNoCallers)
	}
	return r.isDelivered
}

// Commit makes the run continue to its end, even if all callers leave. It returns false if the run
// was canceled before.
func (r *Run[V]) Commit() bool {
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	if r.Err() == nil {
		r.committed = true
	}
	return r.committed
}

// Wanted is called by the function before it waits for something, and reports whether the run
// should continue. A background run that has callers by now becomes an ordinary run, which ends when
// they leave. A background run without callers should end, and can no longer be joined.
func (r *Run[V]) Wanted() bool {
	if !r.background { // nearly always: the callers of a stampede are at mu now
		return true
	}
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	if r.callers == 0 {
		r.forgetLocked()
		return false
	}
	r.background = false
	return true
}

// InBackground reports whether the run continues without callers. Only the function may call it.
func (r *Run[V]) InBackground() bool { return r.background }

// Limit sets the scope of the result that is delivered next. It is for the function. A result that
// the Group itself delivers, when it is closed, is an error, which a caller out of scope gets from
// its next Join.
func (r *Run[V]) Limit(s Scope) {
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	if !r.isDelivered {
		r.scope = s
	}
}

// For reports whether the result is good for a caller: see Scope. It is for callers that have the
// result. If it is not, the run cannot be joined from now on: the caller joins another one, and what
// the function has still to do continues.
func (r *Run[V]) For(came uint64, stamp string) bool {
	if r.scope.Includes(came, stamp) {
		return true
	}
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	r.forgetLocked()
	return false
}

// Deliver returns the result to the callers, including those that join later. Only the first result
// counts.
func (r *Run[V]) Deliver(v V, err error) {
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	r.deliverLocked(v, err)
}

// Finish returns the result to the callers, unless they have one. Later callers begin a new run.
func (r *Run[V]) Finish(v V, err error) {
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	r.deliverLocked(v, err)
	r.forgetLocked()
}

func (r *Run[V]) deliverLocked(v V, err error) {
	if !r.isDelivered {
		r.isDelivered = true
		r.v, r.err = v, err
		close(r.delivered)
	}
}

func (r *Run[V]) forgetLocked() {
	if r.g.open[r.key] == r {
		delete(r.g.open, r.key)
	}
}

// goroutines counts the goroutines of a group: one for each run, and those of the runs' Workers.
type goroutines struct {
	n      atomic.Int64
	closed atomic.Bool // no further run begins; Workers of present runs may start goroutines
	idle   chan struct{}
	once   sync.Once // closes idle
}

func (c *goroutines) add() { c.n.Add(1) }

func (c *goroutines) done() {
	if c.n.Add(-1) == 0 && c.closed.Load() {
		c.once.Do(func() { close(c.idle) })
	}
}

func (c *goroutines) close() {
	c.closed.Store(true)
	if c.n.Load() == 0 {
		c.once.Do(func() { close(c.idle) })
	}
}
