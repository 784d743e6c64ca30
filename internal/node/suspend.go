package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
)

// A server that does not answer, or that lets nobody in, is suspended, so that nothing piles up
// behind it: no goroutine, no queued command, no memory, and no connection that each request would
// dial again to have it refused.
//
//	answering --no answer for suspendAfter of NodeTimeout (see watchdog)--> suspended
//	answering --no answer to a step of a dial (see conn.Conn)--> suspended
//	answering --two exchanges had no answer, the second begun after the first had ended--> suspended
//	answering --a login was refused, or a command was because nobody is logged in--> suspended
//	suspended --a probe was let in and answered--> answering
//	suspended --a Cluster names it no more--> dropped
//
// While it is suspended, what would ask it fails at once and releases become debts; one
// goroutine probes it. An exchange may hang for seconds before it has timed out: during
// that time a lane takes nothing but releases, which have to come after it.
//
// One refused login is enough, although connections that were let in before may continue: as long as
// some succeed it would never be two in a row. They continue to be used for what is held: refreshes and
// releases are sent, which are few. A lane that has no connection any more does not dial for them either: there may
// be tens of thousands of debts.

// ErrStalled is why a request was not sent to a server whose answers are overdue.
var ErrStalled = errors.New("not sent: connection stalled, the requests before this one have no answer")

// errLate is what all say that have had none in their time.
var errLate = errors.New("no answer within")

// errMute is why a server is suspended that has not answered anything.
var errMute error = silence{}

type silence struct{}

func (silence) Error() string { return "no answer to anything for three times NodeTimeout" }

// Timeout makes it a net.Error that is one.
func (silence) Timeout() bool { return true }

// Temporary is for net.Error.
func (silence) Temporary() bool { return true }

// probePause is the time between two probes of a suspended server.
const probePause = 250 * time.Millisecond

// suspension is the time during which a server is suspended.
type suspension struct{ err error }

// allows reports whether r is sent all the same: connections that were let in before logins were refused
// may continue, and what is held is refreshed on them.
func (state *suspension) allows(r *request) bool {
	return !r.op.votes() && errors.Is(state.err, conn.ErrLogin)
}

// errSuspended is what all say that was not sent to a suspended server.
var errSuspended = errors.New("circuit open: suspended, probing every 250ms")

func suspendedFor(why error) *suspension {
	return &suspension{fmt.Errorf("%w: %w", errSuspended, why)}
}

// Away reports whether err, for which a node has no vote, is more than one answer that did not come: the
// node is suspended, cannot be dialled, or refuses. Asking it again at once will hardly help.
func Away(err error) bool {
	var dial *net.OpError
	if _, dialling := conn.NoMaster(err); dialling {
		return true
	}
	return errors.Is(err, errSuspended) || conn.IsReply(err) || errors.As(err, &dial) && dial.Op == "dial"
}

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

// SuspendedFor is why the node is suspended. nil: it is not, or it is a Cluster, of which only a part may be.
func (n *Node) SuspendedFor() error {
	if n.router != nil {
		return nil
	}
	if state := n.server.suspended.Load(); state != nil {
		return state.err
	}
	return nil
}

// LoginRefused is why the node is suspended, or the server of it at that address if it is a Cluster,
// as long as that is because it lets nobody in; else nil. Connections of before may still answer.
func (n *Node) LoginRefused(addr string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, s := range n.servers {
		state := s.suspended.Load()
		if state != nil && errors.Is(state.err, conn.ErrLogin) && (n.router == nil || s.addr == addr) {
			return state.err
		}
	}
	return nil
}

// heard notes how a lane's exchange went that began then, and how long it took. err is why it had
// no answer, refused the error that it was answered with. The lane is busy.
func (s *Server) heard(err, refused error, began time.Time, took time.Duration) {
	s.recordExchange(err, refused, took)
	s.judge(err, refused, began)
}

// judge suspends the server if that is how an exchange went. The caller is a goroutine that the
// node counts, and so is a busy lane.
func (s *Server) judge(err, refused error, began time.Time) {
	switch {
	case conn.IsReply(conn.Said(err)): // to the handshake, for nothing else was written
		s.suspend(conn.LoginRefused(conn.Said(err)))
	case conn.NotLoggedIn(refused):
		s.suspend(conn.LoginRefused(refused))
	case err == nil:
		s.failed.Store(0)
	case conn.TimedOut(err):
		s.silent.CompareAndSwap(0, int64(s.n.at(began)))
		if s.silentFor(clock.Instant(s.silent.Load())) {
			s.suspend(err)
		}
	case s.failsAgain(began):
		s.suspend(err)
	}
}

// failsAgain notes an exchange without an answer that began then, and says whether another one had
// failed before it began, and none has succeeded since. A server that ends takes what all lanes had
// in progress with it: that is once.
func (s *Server) failsAgain(began time.Time) bool {
	last := s.failed.Swap(int64(s.n.now()))
	return last != 0 && int64(s.n.at(began)) >= last
}

// recordExchange notes how any exchange went, a caller's own included. A caller waits for so short a
// time that its timeout alone is no reason to suspend anybody: the next request takes a
// lane, which finds out.
func (s *Server) recordExchange(err, refused error, took time.Duration) {
	s.n.heard(err)
	if err != nil {
		refused = err
	}
	s.observe(took, refused)
	if err == nil {
		s.hasAnswered(took)
		if s.n.debts.answered() && s.n.begin() {
			go func() {
				defer s.n.wg.Done()
				s.n.debts.hurry()
			}()
		}
	}
	s.fast.Store(err == nil && took < s.n.timeout/2)
	s.n.late.Store(took > s.n.timeout)
	if err != nil {
		s.Unreachable()
	}
}

// observe reports how an exchange went.
func (s *Server) observe(took time.Duration, err error) {
	if s.n.Observe != nil {
		s.n.Observe(took, err)
	}
}

// suspend has the server left alone until it answers a probe.
func (s *Server) suspend(why error) {
	if errors.Is(why, io.EOF) {
		why = fmt.Errorf("it closed the connection: %w", why)
	}
	if s.n.closing.Load() || !s.suspended.CompareAndSwap(nil, suspendedFor(why)) || !s.n.begin() {
		return
	}
	go s.probe(why)
}

// silentFor reports whether the server, which has not answered a request of that time, has answered
// nothing else for suspendAfter of NodeTimeout.
func (s *Server) silentFor(t clock.Instant) bool {
	t = max(t, clock.Instant(s.answered.Load())) // another lane may have had an answer since
	return time.Duration(s.n.now()-t) >= suspendAfter*s.n.timeout
}

// hasAnswered notes that the server has answered what it was asked so long ago.
func (s *Server) hasAnswered(ago time.Duration) {
	now := s.n.now()
	s.silent.Store(0)
	s.answered.Store(int64(now))
	s.asked.Store(max(s.asked.Load(), int64(now)-int64(ago))) // of two that are noted at once either will do
}

// probe ends the suspension when the server answers, and itself then, or with the server or the
// node. Who watches is given the reason: a timeout at once, anything else after the first probe,
// which may see a refusal where a lane saw only that the connection had ended. A refusal that shows
// later is reported as well, as of a server that comes back with another password.
func (s *Server) probe(why error) {
	defer s.n.wg.Done()
	told := conn.TimedOut(why)
	if told {
		s.n.reportState(why)
	}
	for wait := probePause - time.Since(s.letIn); ; wait = probePause { // at once, unless it was back just now
		select {
		case <-s.n.life.Done():
			return
		case <-time.After(max(1, wait)): // one that is due already would run in here, in a synctest bubble
		}
		if s.dropped.Load() { // it stays suspended: what still comes to it fails at once
			if told {
				s.n.reportState(nil)
			}
			s.n.debts.hurry()
			return
		}
		began := time.Now()
		err := s.answers()
		if errors.Is(err, conn.ErrLogin) && !errors.Is(why, conn.ErrLogin) {
			why, told = err, false
			s.suspended.Store(suspendedFor(why))
		}
		if !told {
			s.n.reportState(why)
			told = true
		}
		if err == nil {
			s.resume(why, time.Since(began))
			return
		}
		if !errors.Is(err, conn.ErrLogin) { // its slots may have another master by now
			s.Unreachable()
		}
	}
}

// answers is one probe, on a connection of its own: nil, or why not. Others may have been let in
// before logins were refused.
func (s *Server) answers() error {
	ctx, cancel := context.WithTimeout(context.Background(), s.n.ExchangeTime())
	defer cancel()
	return conn.Probe(ctx, s.from, s.n.timeout, s.singleDials)
}

// resume ends the suspension for that reason, because a probe was answered that took so long.
func (s *Server) resume(why error, took time.Duration) {
	if !conn.TimedOut(why) { // which takes its time
		s.letIn = time.Now()
	}
	s.failed.Store(0)
	s.hasAnswered(took)
	s.suspended.Store(nil)
	s.n.heard(nil)
	s.n.reportState(nil)
	if s.n.IsCluster() { // whose debts may be those of other servers
		s.n.debts.hurry()
	} else {
		s.n.debts.isBack()
	}
}

// reportState reports that the node was suspended for err, or is back.
func (n *Node) reportState(err error) {
	if n.Changed != nil {
		n.Changed(n.name, err)
	}
}
