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
// that time a lane takes nothing but releases, which have to come after it. A probe that is answered
// ends that, too: what the lanes have sent or dialled long before it is given up.
//
// That goroutine would be late for a lock that is about to be lost: it pauses, and its dial may hang until
// a packet is sent again. So each refresh that had too few votes has the servers without an answer probed at
// once (ProbeNow), beside that goroutine, and so has one that waits for a dial. The refresh fails
// nevertheless: the next one, of which there is one soon before the lock ends, finds the server back.
// However many locks there are, a server gets probeSpacing such probes in each NodeTimeout at most, each on a
// connection of its own that ends after probeTime.
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

// Of probes for a refresh: a probe that hangs does not delay the next.
const (
	probeSpacing = 4 // NodeTimeout divided by it is how far they are apart at least
	probeTime    = 2 // times NodeTimeout is how long each may take
)

// suspension is the time during which a server is suspended.
type suspension struct {
	err    error
	ctx    context.Context    // of the goroutine that probes the server; ends with the node
	isBack context.CancelFunc // ends ctx, because the server has answered another probe
}

// allows reports whether r is sent all the same: connections that were let in before logins were refused
// may continue, and what is held is refreshed on them.
func (state *suspension) allows(r *request) bool {
	return !r.op.votes() && errors.Is(state.err, conn.ErrLogin)
}

// errSuspended is what all say that was not sent to a suspended server.
var errSuspended = errors.New("circuit open: suspended, probing every 250ms")

// suspendedFor is the error for requests to a server that is suspended for that reason.
func suspendedFor(why error) error { return fmt.Errorf("%w: %w", errSuspended, why) }

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
	if s.n.closing.Load() || s.Suspended() {
		return
	}
	if errors.Is(why, io.EOF) {
		why = fmt.Errorf("it closed the connection: %w", why)
	}
	ctx, isBack := context.WithCancel(s.n.life)
	state := &suspension{suspendedFor(why), ctx, isBack}
	if !s.suspended.CompareAndSwap(nil, state) || !s.n.begin() {
		isBack()
		return
	}
	go s.probe(state, why)
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
func (s *Server) probe(state *suspension, why error) {
	defer s.n.wg.Done()
	defer state.isBack()
	told := conn.TimedOut(why)
	if told {
		s.n.reportState(why)
	}
	for wait := s.mayProbeIn(); ; wait = probePause { // at once, unless it was back just now
		select {
		case <-state.ctx.Done():
		case <-time.After(max(1, wait)): // one that is due already would run in here, in a synctest bubble
		}
		if s.n.life.Err() != nil {
			return
		}
		if s.dropped.Load() { // it stays suspended: what still comes to it fails at once
			if told {
				s.n.reportState(nil)
			}
			s.n.debts.hurry()
			return
		}
		err := s.answers(state.ctx, s.n.ExchangeTime(), s.singleDials)
		switch {
		case s.n.life.Err() != nil:
			return
		case state.ctx.Err() != nil: // another probe was answered
			err = nil
		}
		if errors.Is(err, conn.ErrLogin) && !errors.Is(why, conn.ErrLogin) {
			why, told = err, false
			state = &suspension{suspendedFor(why), state.ctx, state.isBack}
			s.suspended.Store(state)
		}
		if !told {
			s.n.reportState(why)
			told = true
		}
		if err == nil {
			s.resume(why)
			return
		}
		if !errors.Is(err, conn.ErrLogin) { // its slots may have another master by now
			s.Unreachable()
		}
	}
}

// mayProbeIn is how long a server that was back just now is left alone when it is suspended again: it, or what
// is in front of it, may answer probes only.
func (s *Server) mayProbeIn() time.Duration {
	letIn := s.letIn.Load()
	if letIn == 0 {
		return 0
	}
	return probePause - time.Duration(int64(s.n.now())-letIn)
}

// answers is one probe, on a connection of its own: nil, or why not. Others may have been let in
// before logins were refused.
func (s *Server) answers(ctx context.Context, limit time.Duration, dials conn.Limit) error {
	if ctx.Err() != nil { // nothing is dialled for it
		return ctx.Err()
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	err := conn.Probe(ctx, s.from, s.n.timeout, dials)
	if err == nil {
		s.hasAnswered(time.Since(began))
		for i := range s.lanes {
			s.lanes[i].watchdog.overtaken(began)
		}
	}
	return err
}

// ProbeNow has the servers that are suspended, or whose answers are overdue, probed at once, for a refresh
// that had too few votes.
func (n *Node) ProbeNow() {
	n.mu.Lock()
	var silent []*Server
	for _, s := range n.servers {
		if s.Suspended() || s.stalled() {
			silent = append(silent, s)
		}
	}
	n.mu.Unlock()
	for _, s := range silent {
		s.probeNow()
	}
}

// probeNow sends a probe for a refresh, unless the last one was just now. A server that refuses logins has
// answered, and is not asked more often.
func (s *Server) probeNow() {
	state := s.suspended.Load()
	if state != nil && errors.Is(state.err, conn.ErrLogin) || s.mayProbeIn() > 0 {
		return
	}
	now, last := int64(s.n.now()), s.probedAt.Load()
	if last != 0 && now-last < int64(s.n.timeout/probeSpacing) || !s.probedAt.CompareAndSwap(last, now) || !s.n.begin() {
		return
	}
	go func() {
		defer s.n.wg.Done()
		if s.answers(s.n.life, probeTime*s.n.timeout, s.urgentDials) != nil {
			return
		}
		if state := s.suspended.Load(); state != nil {
			state.isBack()
		}
	}()
}

// stalled reports whether the answers of a lane are overdue.
func (s *Server) stalled() bool {
	for i := range s.lanes {
		if s.lanes[i].isStalled() {
			return true
		}
	}
	return false
}

// resume ends the suspension for that reason, because a probe was answered.
func (s *Server) resume(why error) {
	if !conn.TimedOut(why) { // which takes its time
		s.letIn.Store(int64(s.n.now()))
	}
	s.failed.Store(0)
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
