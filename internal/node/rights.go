package node

import (
	"errors"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
)

// A server may refuse a user for a moment only, while a password changes or rights are given. So that is
// final only if it was refused a second before as well, with the credentials of then: a login that is refused
// is tried every 250ms. When a command is refused, and the client's options have a provider of credentials,
// who may name another user by now, the link is made anew. Else it is kept: rights that are given count on it
// at once, and what is held may depend on it.
const (
	finalAfter = time.Second

	// forgottenAfter is how long after the last refusal the next one is a first one again.
	forgottenAfter = 5 * time.Second
)

// refusals are when a server has refused the user.
type refusals struct {
	mu          sync.Mutex // guards what follows
	first, last time.Time
}

// note notes a refusal. isFirst says that there was none before, for long, and final that there was one a
// second ago.
func (r *refusals) note(now time.Time) (isFirst, final bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if isFirst = now.Sub(r.last) > forgottenAfter; isFirst {
		r.first = now
	}
	r.last = now
	return isFirst, now.Sub(r.first) >= finalAfter
}

// lasting is a refusal that is final.
type lasting struct{ error }

// Unwrap returns the refusal.
func (l lasting) Unwrap() error { return l.error }

// Final reports whether asking the same node again cannot help: somebody has to change the data or the rights
// first. The error is one of a Reply, or of SuspendedFor.
func Final(err error) bool { return conn.Says(err, conn.AboutKey) || isLasting(err) }

func isLasting(err error) bool {
	var l lasting
	return errors.As(err, &l)
}

// judge returns err, the server's answer to anything, as one that is final if it refuses the user for so
// long. It must not be called by an Encode.
func (s *Server) judge(err error) error {
	if !conn.Says(err, conn.Rights) || isLasting(err) {
		return err
	}
	isFirst, final := s.refusals.note(time.Now())
	if isFirst && s.link.Err() == nil && conn.HasProvider(s.of) {
		s.link.Moved(err)
	}
	if final {
		return lasting{err}
	}
	return err
}
