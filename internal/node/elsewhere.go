package node

import (
	"context"
	"errors"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/redis/go-redis/v9"
)

// A connection leads to the process to which it was dialled for as long as it lives. When a node's
// address moves (a virtual IP, a name, a proxy), connections to the process that had it may survive, and
// that one may continue as a replica. It refuses writes, and what it is asked in the epoch of its
// successor it does not know. go-redis closes a connection on which READONLY was the first reply, so that
// the next one is dialled to where the address leads now. It does not close one that said NOSCRIPT or MASTERDOWN, or
// READONLY behind another reply, or within that of a batch. disconnect does.

// errElsewhere is why a connection is given up.
var errElsewhere = errors.New("the connection may lead to a server that had this address before")

// unwritable is an argument by which go-redis fails to write a command, and so closes the connection
// that it had taken for it.
type unwritable struct{}

func (unwritable) MarshalBinary() ([]byte, error) { return nil, errElsewhere }

// disconnect has l's connection closed.
func (l *lane) disconnect(ctx context.Context) {
	_ = l.client.Process(ctx, redis.NewCmd(ctx, "PING", unwritable{}))
}

// refusesAll reports whether err is the answer of a connection on which there will be no other, where a new one may do
// better: nobody is logged in on it; or it leads to a replica that has lost its master, as READONLY may.
func refusesAll(err error) bool { return conn.NotLoggedIn(err) || conn.HasCode(err, "MASTERDOWN") }

// elsewhere reports whether the last answers are those of a server that the address does not lead to
// any more, as far as they show: it does not know a script, although they were just loaded; or it is a
// replica, and go-redis does not see that; or nobody is logged in on the connection, as when the client
// had no password when it was dialled. A connection that just says NOSCRIPT is kept, also if it knows the
// script a moment later, because somebody else has loaded it: there may be no other, while logins are refused.
func (l *lane) elsewhere(loaded bool) bool {
	unknown := false
	for i, got := range l.answers {
		if got.err == nil {
			continue
		}
		var inBatch conn.ServerError
		switch {
		case conn.HasCode(got.err, "READONLY"):
			return i > 0 || errors.As(got.err, &inBatch)
		case refusesAll(got.err):
			return true
		case conn.HasCode(got.err, "NOSCRIPT"):
			unknown = true
		case !conn.IsReply(got.err):
			return false
		}
	}
	return unknown && loaded
}
