package node

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/link"
	"github.com/redis/go-redis/v9"
)

// Server is one Redis process that answers requests: a standalone server, or one master
// of a Cluster.
type Server struct {
	n    *Node
	of   *redis.Options // of the connections
	link *link.Link

	epoch    atomic.Pointer[Epoch]        // of the votes requested. Written by boot, and before any request
	verified atomic.Pointer[verification] // the last one
	missing  atomic.Uint32                // ops whose scripts the server does not know: the next boot loads them
	texts    atomic.Pointer[asTexts]      // scripts are sent as texts; nil: by their names
	boots    boots
	refused  atomic.Pointer[bootRefusal]  // nil: the last boot was not
	votes    atomic.Pointer[link.Session] // the one on which boot has succeeded last, and none was tried since

	early    earlyVotes // that have come since it boots again
	refusals refusals   // of the user

	topics map[string]*topic // that were asked for on the link. Guarded by the node's topics' mu
	barred time.Time         // until then the server is asked for none. Guarded as these
	pulse  time.Time         // when attend has called the link's Pulse. For attend

	// refusedSlot is one more than the hash slot of a request that was refused last because its script
	// accessed keys of two hash slots; 0: none was.
	refusedSlot atomic.Int32

	unnamed bool        // a Cluster's map did not name this master when it was met, so that of is the node's own
	dropped atomic.Bool // a Cluster names it no more. Set for good, before its link is closed
	strikes int         // towards that: see gone.go
	down    bool        // changed was called with an error last; for it, and when the link has ended

	master atomic.Pointer[string] // which one they have named last; nil: none
	start  sync.Once              // starts what asks them, with the first request
}

func newServer(n *Node, of *redis.Options) *Server {
	s := &Server{n: n, of: of}
	s.epoch.Store(anyEpoch)
	s.link = link.New(link.Options{
		Of: of, Timeout: n.timeout, CallersRead: n.alone && !n.IsCluster(), Boot: s.boot,
		Pushed: s.pushed, Attend: s.attend, Ended: s.ended,
		Changed: s.changed, Failed: s.lost, Unnamed: n.reportUnnamed,
	})
	return s
}

// Master is the address of the master that the Sentinels have named last; "" if there are no Sentinels, or
// they have named none so far.
func (s *Server) Master() string {
	if addr := s.master.Load(); addr != nil {
		return *addr
	}
	return ""
}

// Suspended reports whether the server is suspended: it does not answer, or lets nobody in. What would ask it
// fails at once, releases become debts, and its link dials it. See package link.
func (s *Server) Suspended() bool { return s.link.Err() != nil }

// push sends r. If that is not possible, r is completed at once.
func (s *Server) push(r *request) {
	s.start.Do(s.follows)
	if r.op.votes() {
		s.bootRefused()
	}
	r.s = s
	s.link.Do(r, r.inline && s.n.alone)
}

// changed is called when the server was suspended for err, or with nil when it is back.
func (s *Server) changed(err error) {
	n := s.n
	s.down = err != nil
	n.heard(err)
	n.reportState(err)
	if err != nil {
		s.boots.fail(s.link.Err())
	} else {
		n.debts.hurry()
	}
}

// answered notes that the server has answered a request, in that time, maybe by an error.
func (s *Server) answered(took time.Duration, refused error) {
	n := s.n
	n.heard(nil)
	n.took.Store(int64(took))
	n.observe(took, refused)
}

// unanswered notes that a request has lost its connection, after that time.
func (s *Server) unanswered(took time.Duration, err error) {
	s.n.heard(err)
	s.n.observe(took, err)
	if took > s.n.timeout {
		took = unanswered
	}
	s.n.took.Store(int64(took))
	s.invalidate()
	s.lost()
}

// lost has the slots of a Cluster's master looked up again, because the master could not be
// reached: a replica may have taken its place.
func (s *Server) lost() {
	if s.n.router != nil {
		s.n.router.forget(s)
	}
}

// follows has the node follow the master that Sentinels name.
func (s *Server) follows() {
	if conn.IsSentinelManaged(s.of) {
		s.n.wg.Go(s.follow)
	}
}

// open waits until the link is there, and returns why it cannot be.
func (s *Server) open(ctx context.Context) error {
	s.start.Do(s.follows)
	ready := make(chan error, 1)
	s.link.Open(func(err error) { ready <- err })
	select {
	case err := <-ready:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// boots are what others want of the next boot: that it establishes an epoch, and to hear what it has
// reported.
type boots struct {
	mu        sync.Mutex // guards what follows
	establish string
	waiting   []func(Epoch, error)
}

// take returns what is wanted.
func (b *boots) take() (establish string, waiting []func(Epoch, error)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	establish, waiting = b.establish, b.waiting
	b.establish, b.waiting = "", nil
	return establish, waiting
}

func (b *boots) want(establish string, done func(Epoch, error)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if establish != "" {
		b.establish = establish
	}
	b.waiting = append(b.waiting, done)
}

// fail is for those who wait while there is no boot.
func (b *boots) fail(err error) {
	_, waiting := b.take()
	for _, done := range waiting {
		done(Epoch{}, err)
	}
}

// A bootRefusal is how a server has refused boot.lua, and when.
type bootRefusal struct {
	err error
	at  time.Time
}

// bootRefused has a server boot again that has refused to, unless that was just now.
func (s *Server) bootRefused() {
	r := s.refused.Load()
	if r == nil {
		return
	}
	pause := refusedPause
	if isLasting(r.err) {
		pause = finalAfter
	}
	if now := time.Now(); now.Sub(r.at) >= pause && s.refused.CompareAndSwap(r, &bootRefusal{r.err, now}) {
		s.link.Reboot()
	}
}

// close ends the link at once.
func (s *Server) close() {
	s.link.Close()
	s.boots.fail(ErrClosed)
}

// drain waits until the requests that the server has were answered, or have failed, or ctx ends.
func (s *Server) drain(ctx context.Context) error {
	select {
	case <-s.link.Shut():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("requests without an answer: %w", ctx.Err())
	}
}
