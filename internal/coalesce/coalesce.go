// Package coalesce runs a function once for all callers that request its result at the same time.
//
// golang.org/x/sync/singleflight is not sufficient: its callers share the ctx of the first one,
// cannot leave, and hang or crash when the function panics or calls Goexit.
package coalesce

import (
	"context"
	"sync"

	"github.com/flightlock/flightlock/internal/list"
)

// Group holds the runs for the keys, each with a result V, and with Data D of the function's own. At most
// one run per key can be joined. It is safe for concurrent use.
type Group[V, D any] struct {
	none func(key string) error // of callers whose run has ended without a result

	mu         sync.Mutex // guards what follows
	closed     bool
	open       map[string]*Run[V, D]            // the runs that can be joined
	all        list.List[Run[V, D], *Run[V, D]] // those that are not Done
	running    int                              // the length of all
	goroutines int
	idle       chan struct{} // closed when the group is closed, and has no run and no goroutine
}

// New makes a Group. none is the error of callers whose run ends without a result.
func New[V, D any](none func(key string) error) *Group[V, D] {
	return &Group[V, D]{none: none, open: map[string]*Run[V, D]{}, idle: make(chan struct{})}
}

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
type Run[V, D any] struct {
	Data D

	g      *Group[V, D]
	key    string
	ctx    context.Context
	cancel context.CancelCauseFunc

	// delivered is closed when v, err and scope are set. They do not change after that.
	delivered chan struct{}
	v         V
	err       error
	scope     Scope

	// guarded by g.mu
	callers     int
	background  bool // runs without callers. After Background, only the function's goroutine writes it
	committed   bool
	isDelivered bool
	links       list.Links[Run[V, D]] // in g.all
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
func (r *Run[V, D]) ListLinks() *list.Links[Run[V, D]] { return &r.links }

// JoinOpen adds a caller to the run of key. ok is false if there is none that can be joined.
func (g *Group[V, D]) JoinOpen(key string) (r *Run[V, D], ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	r = g.open[key]
	if g.closed || r == nil {
		return nil, false
	}
	r.callers++
	return r, true
}

// Join is JoinOpen, or begins a run if there is none: then first is true. Its Context has the values of ctx,
// and does not end with it. Whoever begins a run calls Done for it. ok is false after Close.
func (g *Group[V, D]) Join(ctx context.Context, key string) (r *Run[V, D], first, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, false, false
	}
	r = g.open[key]
	if first = r == nil; first {
		r = g.beginLocked(ctx, key)
	}
	r.callers++
	return r, first, true
}

// Background begins a run without callers; it continues at least until it calls Wanted. ok is false
// if there is a run for key already, and after Close.
func (g *Group[V, D]) Background(ctx context.Context, key string) (r *Run[V, D], ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed || g.open[key] != nil {
		return nil, false
	}
	r = g.beginLocked(ctx, key)
	r.background = true
	return r, true
}

func (g *Group[V, D]) beginLocked(ctx context.Context, key string) *Run[V, D] {
	r := &Run[V, D]{g: g, key: key, delivered: make(chan struct{})}
	r.ctx, r.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	g.open[key] = r
	g.all.PushBack(r)
	g.running++
	return r
}

// Done ends a run, after its function has returned. Callers that have no result by then get the error of New.
func (r *Run[V, D]) Done() {
	g := r.g
	r.cancel(nil)
	g.mu.Lock()
	defer g.mu.Unlock()
	r.endLocked()
	g.all.Remove(r)
	g.running--
	g.idleLocked()
}

// Go runs f on a goroutine that the group counts. Only a goroutine of the group's, and whoever has begun a
// run that is not Done, may call it: so there is none once the group is idle.
func (g *Group[V, D]) Go(f func()) {
	g.mu.Lock()
	g.goroutines++
	g.mu.Unlock()
	go func() {
		defer func() { // also after Goexit
			g.mu.Lock()
			defer g.mu.Unlock()
			g.goroutines--
			g.idleLocked()
		}()
		f()
	}()
}

func (g *Group[V, D]) idleLocked() {
	if g.closed && g.running == 0 && g.goroutines == 0 {
		select {
		case <-g.idle:
		default:
			close(g.idle)
		}
	}
}

// Idle is closed when the group is closed, and all its runs are done and its goroutines have ended.
func (g *Group[V, D]) Idle() <-chan struct{} { return g.idle }

// Count returns how many runs are not done, and how many goroutines have not ended.
func (g *Group[V, D]) Count() (running, goroutines int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.running, g.goroutines
}

// Close refuses new runs, and cancels those that are not committed; their callers get the error of New.
func (g *Group[V, D]) Close(cause error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return
	}
	g.closed = true
	for r := g.all.Front(); r != nil; r = g.all.Next(r) {
		if !r.committed {
			r.endLocked()
			r.cancel(cause)
		}
	}
	g.idleLocked()
}

// Abort cancels all runs.
func (g *Group[V, D]) Abort(cause error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for r := g.all.Front(); r != nil; r = g.all.Next(r) {
		r.cancel(cause)
	}
}

// Key returns the key of the run.
func (r *Run[V, D]) Key() string { return r.key }

// Context is the run's: it ends when the run is canceled or Done.
func (r *Run[V, D]) Context() context.Context { return r.ctx }

// Wait returns the result to a caller. left reports that ctx ended first, and that the caller has
// left the run.
//
// In a stampede a thousand goroutines call Wait at once, many of them with a stack of 2 KB, a
// quarter of which select needs. So Wait's frame is small, and it should be called from a shallow
// stack: growing a stack costs more time than everything else that a caller does.
func (r *Run[V, D]) Wait(ctx context.Context) (v V, err error, left bool) {
	select {
	case <-r.delivered: // callers that wait for many runs find most of them so
		return r.v, r.err, false
	default:
	}
	select {
	case <-r.delivered:
		return r.v, r.err, false
	case <-ctx.Done():
		if r.Leave() {
			return r.v, r.err, false
		}
		return v, nil, true
	}
}

// Leave removes a caller from the run. When the last one leaves, a run that is not committed is
// canceled and can no longer be joined. delivered reports whether there was a result before: a
// result that follows is that of the cancellation, which is not for this caller.
func (r *Run[V, D]) Leave() (delivered bool) {
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	if r.callers--; r.callers == 0 && !r.committed && !r.background {
		r.forgetLocked()
		r.cancel(nil)
	}
	return r.isDelivered
}

// Commit makes the run continue to its end, even if all callers leave. It returns false if the run
// was canceled before.
func (r *Run[V, D]) Commit() bool {
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	if r.ctx.Err() == nil {
		r.committed = true
	}
	return r.committed
}

// Wanted is called by the function before it waits for something, and reports whether the run
// should continue. A background run that has callers by now becomes an ordinary run, which ends when
// they leave. A background run without callers should end, and can no longer be joined.
func (r *Run[V, D]) Wanted() bool {
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

// Limit sets the scope of the result that is delivered next. It is for the function. A result that
// the Group itself delivers, when it is closed, is an error, which a caller out of scope gets from
// its next Join.
func (r *Run[V, D]) Limit(s Scope) {
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	if !r.isDelivered {
		r.scope = s
	}
}

// For reports whether the result is good for a caller: see Scope. It is for callers that have the
// result. If it is not, the run cannot be joined from now on: the caller joins another one, and what
// the function has still to do continues.
func (r *Run[V, D]) For(came uint64, stamp string) bool {
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
func (r *Run[V, D]) Deliver(v V, err error) {
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	r.deliverLocked(v, err)
}

// Finish returns the result to the callers, unless they have one. Later callers begin a new run.
func (r *Run[V, D]) Finish(v V, err error) {
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	r.deliverLocked(v, err)
	r.forgetLocked()
}

func (r *Run[V, D]) deliverLocked(v V, err error) {
	if !r.isDelivered {
		r.isDelivered = true
		r.v, r.err = v, err
		close(r.delivered)
	}
}

// endLocked ends a run that is over: it cannot be joined, and its callers have a result.
func (r *Run[V, D]) endLocked() {
	if !r.isDelivered {
		var none V
		r.deliverLocked(none, r.g.none(r.key))
	}
	r.forgetLocked()
}

func (r *Run[V, D]) forgetLocked() {
	if r.g.open[r.key] == r {
		delete(r.g.open, r.key)
	}
}
