package node

import (
	"errors"
	"net"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/link"
)

// ErrStalled is why a request was not sent to a server whose answers are overdue.
var ErrStalled = link.ErrLate

// ErrSuspended is why a request was not sent to a server that cannot be reached.
var ErrSuspended = link.ErrSuspended

// errLate is what all say that have had no answer in their time.
var errLate = errors.New("no answer within")

// IsLate reports whether err, for which a node has no vote, says that its answers take too long.
func IsLate(err error) bool {
	return errors.Is(err, errLate) || errors.Is(err, ErrStalled)
}

// Away reports whether err, for which a node has no vote, is more than one answer that did not come: the
// node is suspended, cannot be dialled, or refuses. Asking it again at once will hardly help.
func Away(err error) bool {
	var dial *net.OpError
	if _, dialling := conn.NoMaster(err); dialling {
		return true
	}
	return errors.Is(err, link.ErrSuspended) || conn.IsReply(err) || errors.As(err, &dial) && dial.Op == "dial"
}

// each calls f with each of the node's servers.
func (n *Node) each(f func(*Server)) {
	n.mu.Lock()
	servers := append([]*Server(nil), n.servers...)
	n.mu.Unlock()
	for _, s := range servers {
		f(s)
	}
}

// Suspended reports whether the node is, or a part of it if it is a Cluster.
func (n *Node) Suspended() (is bool) {
	n.each(func(s *Server) { is = is || s.Suspended() })
	return is
}

// SuspendedFor is why the node is suspended. nil: it is not, or it is a Cluster, of which only a part may be.
func (n *Node) SuspendedFor() error {
	if n.router != nil {
		return nil
	}
	return n.server.judge(n.server.link.Err())
}

// LoginRefused is why the node is suspended, or the server of it at that address if it is a Cluster,
// as long as that is because it lets nobody in; else nil.
func (n *Node) LoginRefused(addr string) (refused error) {
	n.each(func(s *Server) {
		if err := s.link.Err(); errors.Is(err, conn.ErrLogin) && (n.router == nil || s.of.Addr == addr) {
			refused = err
		}
	})
	return refused
}

// ProbeNow has the servers that are suspended dialled at once, for a refresh that had too few votes: the lock
// may be lost before the next time. One that refuses logins has answered, and is not asked more often.
func (n *Node) ProbeNow() {
	n.each(func(s *Server) {
		if !errors.Is(s.link.Err(), conn.ErrLogin) {
			s.link.Hurry()
		}
	})
}

// observe reports how a request went.
func (n *Node) observe(took time.Duration, err error) {
	if n.Observe != nil {
		n.Observe(took, err)
	}
}

// reportState reports that the node was suspended for err, or is back.
func (n *Node) reportState(err error) {
	if n.Changed != nil {
		n.Changed(n.name, err)
	}
}
