package node

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/link"
)

// Kind says what a node's reply means.
type Kind uint8

// The kinds of replies.
const (
	Pending  Kind = iota // no answer yet
	Failed               // no vote; Reply.Err says why
	Granted              // acquire: the key is ours, fresh
	Replayed             // acquire: this owner held the key already
	Renewed              // refresh: full ttl again
	Deleted              // release: our key is gone, by this request
	Missing              // refresh, release, attach: there is no such key, or it is free or kept for a turn
	Held                 // another owner has the key
)

// Reply is what one node answered to one request.
type Reply struct {
	Kind Kind
	// Granted, Replayed, Renewed: the fence counter afterwards; Renewed: 0 if it was out of reach
	Counter  int64
	Holder   string        // Held: the whole owner, or TurnOf and a contender
	Rival    string        // Renewed, Granted: the contender that waits longest, the next one; "": none known
	TTL      time.Duration // Held: the holder's, below 0 when unknown
	Rejoined bool          // Deleted: the contender waits again
	// Deleted: maybe by the release that was sent before this one, if the key ever was ours
	Presumed bool
	Verified bool  // Deleted: the node has found itself in the epoch of the script
	Err      error // Failed
	Lost     bool  // Failed: it was written, and its connection has ended since

	// Epoch is set for the answers of a guarded node. To an acquire: the epoch in which it was written, so that
	// in which it was granted. Renewed: the one that was known when the request was written; nil if the key was
	// put there in an epoch that was kept, and has been there since: that is a vote whatever the node has lost.
	// A client knows an epoch before the node makes a key its lease's in that: the scripts that do so have it in
	// their text, and an offer is granted in the epoch that it names only.
	Epoch *Epoch
}

// Errors of requests that the node never saw.
var (
	ErrClosed  = link.ErrClosed
	ErrBusy    = link.ErrFull
	ErrExpired = errors.New("not sent: the attempt ended while it was queued")
)

func failed(err error) Reply { return Reply{Kind: Failed, Err: err} }

// parse reads a script's reply; the .lua files say what each shape means.
func parse(op op, v *link.Value) Reply {
	switch v.Kind {
	case link.Error:
		return failed(v.Err())
	case link.Int:
		return number(op, v.N)
	case link.Array:
		if held, ok := holder(v.Items); ok {
			return held
		}
		seen, ok := renewed(v.Items)
		switch {
		case ok && op == opRefresh:
			return seen
		case ok && op == opAcquire && seen.Counter > 0:
			seen.Kind = Granted
			return seen
		}
	}
	return failed(fmt.Errorf("unexpected reply %s to %s", v, op))
}

func number(op op, v int64) Reply {
	switch {
	case op == opRelease && 1 <= v && v <= 3:
		return Reply{Kind: Deleted, Rejoined: v > 1, Verified: v == 3}
	case (!op.votes() || op == opAttach) && v == 0:
		return Reply{Kind: Missing}
	case op == opRefresh && v > 0:
		return Reply{Kind: Renewed, Counter: v}
	case op.votes() && v > 0:
		return Reply{Kind: Granted, Counter: v}
	case op.votes() && v < 0:
		return Reply{Kind: Replayed, Counter: -v}
	}
	return failed(fmt.Errorf("unexpected reply %d to %s", v, op))
}

func holder(v []link.Value) (Reply, bool) {
	if len(v) != 2 || v[0].Kind != link.String || v[1].Kind != link.Int {
		return Reply{}, false
	}
	return Reply{Kind: Held, Holder: string(v[0].Text), TTL: clock.Mul(v[1].N, time.Millisecond)}, true
}

// renewed reads a refresh that looked for rivals, or one that could not reach the counter.
func renewed(v []link.Value) (Reply, bool) {
	if len(v) != 2 || v[0].Kind != link.Int || v[1].Kind != link.String {
		return Reply{}, false
	}
	counter, rival := v[0].N, string(v[1].Text)
	return Reply{Kind: Renewed, Counter: counter, Rival: rival}, counter > 0 || counter == 0 && rival == ""
}

// neverRan reports whether a server's error proves that the script wrote nothing. What
// the server says of its own state is found out before the first write; rights and types
// are proof only when no command of the script met them.
func neverRan(err error) bool {
	return conn.Says(err, conn.Unwritten) ||
		conn.Says(err, conn.Unless) && !strings.Contains(err.Error(), "@user_script")
}

// refusal is err, but for what only says how or where to ask again.
func refusal(err error) error {
	if conn.Says(err, conn.Again) {
		return nil
	}
	return err
}

// errElsewhere is why a connection is given up. A connection leads to the process to which it was dialled for
// as long as it lives. When a node's address moves (a virtual IP, a name, a proxy), connections to the
// process that had it may survive, and that one may continue as a replica.
var errElsewhere = errors.New("the connection may lead to a server that had this address before")

// elsewhere is why a connection with such an answer is given up; nil: it is kept. There will be no other
// answer on it, and a new one may do better: the server is a replica; or nobody is logged in, as when the
// client had no password when it dialled; or it does not know a script, although they were just loaded.
func elsewhere(err error, unknown bool) error {
	switch {
	case conn.NotLoggedIn(err):
		return conn.LoginRefused(err)
	case unknown, conn.HasCode(err, "READONLY", "MASTERDOWN"):
		return fmt.Errorf("%w: %w", errElsewhere, err)
	}
	return nil
}
