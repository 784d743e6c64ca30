package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/redis/go-redis/v9"
)

// A server that does not answer is suspended, so that nothing piles up behind it: no
// goroutine, no queued command, no memory.
//
//	answering --a lane's exchange timed out, or two in a row had no answer--> suspended
//	suspended --a probe was answered--> answering
//	suspended --a Cluster names it no more--> dropped
//
// While it is suspended, what would ask it fails at once and releases become debts; one
// goroutine probes it. An exchange may hang for seconds before it has timed out: during
// that time a lane takes nothing but releases, which have to come after it.

// ErrStalled is why a request was not sent to a server whose answers are overdue.
var ErrStalled = errors.New("not sent: the requests before it have had no answer for too long")

// probePause is the time between two probes of a suspended server.
const probePause = 250 * time.Millisecond

// suspension is the time during which a server is suspended.
type suspension struct{ err error }

// Suspended reports whether the node is, or a part of it if it is a Cluster.
func (n *Node) Suspended() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, s := range n.servers {
		if s.suspended.Load() != nil {
			return true
		}
	}
	return false
}

// heard notes how a lane's exchange went, and how long it took. err is why it had no answer,
// refused the error that it was answered with. The lane is busy.
func (s *server) heard(err, refused error, took time.Duration) {
	s.felt(err, refused, took)
	switch {
	case err == nil:
		s.failures.Store(0)
	case isReply(err), errors.Is(err, redis.ErrPoolTimeout):
		// A refused handshake is an answer, and a pool that has run dry is our own doing.
	case s.failures.Add(1) >= 2 || timedOut(err):
		s.suspend(err)
	}
}

// felt notes how any exchange went, a caller's own included. A caller waits for so short a
// time that its timeout alone is no reason to suspend anybody: the next request takes a
// lane, which finds out.
func (s *server) felt(err, refused error, took time.Duration) {
	s.n.heard(err)
	if err != nil {
		refused = err
	}
	s.observe(took, refused)
	s.prompt.Store(err == nil && took < s.n.timeout/2)
	s.n.late.Store(took > s.n.timeout)
	if err != nil && s.unreachable != nil {
		s.unreachable(s)
	}
}

// observe tells who watches the node how an exchange went.
func (s *server) observe(took time.Duration, err error) {
	if s.n.Observe != nil {
		s.n.Observe(took, err)
	}
}

func timedOut(err error) bool {
	var ne net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &ne) && ne.Timeout()
}

// suspend has the server left alone until it answers a probe. The lane that calls it is
// busy, so its goroutine has not ended and the node still counts goroutines.
func (s *server) suspend(why error) {
	state := &suspension{fmt.Errorf("suspended until it answers a probe: %w", why)}
	if s.n.closing.Load() || !s.suspended.CompareAndSwap(nil, state) {
		return
	}
	s.n.wg.Add(1)
	go s.probe(why)
}

// probe ends the suspension when the server answers, and itself then, or with the server or the node.
func (s *server) probe(why error) {
	defer s.n.wg.Done()
	s.n.tell(why)
	for wait := time.Duration(0); ; wait = probePause {
		select {
		case <-s.n.life.Done():
			return
		case <-time.After(wait):
		}
		if s.dropped.Load() || s.answers() { // dropped, it stays suspended: what still comes to it fails at once
			break
		}
		if s.unreachable != nil { // its slots may have another master by now
			s.unreachable(s)
		}
	}
	s.n.tell(nil)
	s.n.debts.hurry()
}

// answers makes a probe, and ends the suspension if it was answered.
func (s *server) answers() bool {
	ctx, cancel := context.WithTimeout(context.Background(), s.n.exchangeTime())
	defer cancel()
	if err := s.client.Ping(ctx).Err(); err != nil && !isReply(err) {
		return false
	}
	s.failures.Store(0)
	s.suspended.Store(nil)
	s.n.heard(nil)
	return true
}

// tell passes on that the node was suspended for err, or is back.
func (n *Node) tell(err error) {
	if n.Changed != nil {
		n.Changed(n.name, err)
	}
}
