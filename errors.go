package flightlock

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/errtext"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/quorum"
)

// The errors of this package, to be tested with errors.Is.
var (
	// ErrNotAcquired reports that others had the lock, or the votes were split, when the strategy gave up or ctx
	// ended. If ctx ended before the state of the key was known, the error is ctx's alone.
	ErrNotAcquired = errors.New("not acquired")
	// ErrNotHeld reports that the lock to be refreshed or released had expired, was taken, or was released
	// before.
	ErrNotHeld = errors.New("not held")
	// ErrLockLost reports that a lock ended before it was released. [Lock.Err] and [Client.Do] return it, and it
	// is the cause with which a Context of the lock ends.
	ErrLockLost = errors.New("lock lost")
	// ErrUnavailable reports that too few nodes answered, or have a vote now. Others may hold the lock or not:
	// see [NodeError.Holder]. Whatever the strategy, a call returns it without a retry where that cannot help:
	// nodes have refused the user's rights for a second or more (NOAUTH, WRONGPASS, NOPERM), or the key holds
	// other data (WRONGTYPE).
	ErrUnavailable = errors.New("too few nodes available")
	// ErrRevoked reports, together with ErrLockLost, that the lock was ended by [Client.Revoke].
	ErrRevoked = errors.New("revoked")
	// ErrTooManyWaiters reports that Options.MaxWaiters callers already wait for the key.
	ErrTooManyWaiters = errors.New("too many waiters")
	// ErrClosed reports that the Client, Fetcher or Cache is closed, or that closing it has ended the lock.
	ErrClosed = errors.New("closed")
	// ErrInvalid reports an argument or option outside its limits. The text names it, its value and the limit.
	ErrInvalid = errors.New("invalid")
)

// QuorumError reports an operation to which the nodes did not agree. errors.Is matches its sentinel, such as
// ErrNotAcquired, and ctx's error if that had ended, but no error of a node.
type QuorumError struct {
	// "acquire", "refresh", "release", "attach" or "revoke"; the key as the caller passed it
	Op, Key   string
	Need, Got int         // votes
	Nodes     []NodeError // the answer of each node; nil if no request was sent

	sentinel error // nil if ctx ended before anything was known
	ctx      error
	reason   error
	// a majority of nodes cannot be reached for now, and not for one late reply: see quorum.Failure
	away      bool
	undecided bool // perhaps nobody holds the key: see quorum.Failure
}

// NodeError is the answer of one node, or the reason why there is none.
type NodeError struct {
	Node      string        // its address
	Holder    string        // the owner that holds the key there, if that is the reason
	HolderTTL time.Duration // how long the holder has it unless it refreshes; below 0 if unknown
	Err       error         // nil if the node granted the request, or with a Holder
}

// Error lists the answer of each node.
func (e *QuorumError) Error() string {
	text := fmt.Sprintf("flightlock: %s %q: ", e.Op, e.Key)
	if e.sentinel == nil { // the caller's ctx ended before anything was known
		return text + fmt.Sprint(e.ctx)
	}
	text += e.sentinel.Error()
	if e.ctx != nil {
		text += fmt.Sprintf(" (%v)", e.ctx)
	}
	if e.reason != nil {
		text += fmt.Sprintf(": %v", e.reason)
	}
	if len(e.Nodes) > 0 {
		text += fmt.Sprintf(": %d of the %d votes needed", e.Got, e.Need)
	}
	for _, n := range e.Nodes {
		text += "; " + n.Error()
	}
	return text
}

// Unwrap returns the sentinel, and ctx's error if it had ended.
func (e *QuorumError) Unwrap() []error {
	return slices.DeleteFunc([]error{e.sentinel, e.ctx}, func(err error) bool { return err == nil })
}

// Error names the node, and the holder of the key there or what went wrong.
func (e NodeError) Error() string {
	switch {
	case strings.HasPrefix(e.Holder, node.TurnOf):
		return e.Node + ": free, and reserved for a process that has waited longer"
	case e.Holder != "" && e.HolderTTL >= 0:
		return fmt.Sprintf("%s: held by %q for %v", e.Node, e.Holder, e.HolderTTL)
	case e.Holder != "":
		return fmt.Sprintf("%s: held by %q", e.Node, e.Holder)
	case e.Err != nil && e.HolderTTL > 0:
		return fmt.Sprintf("%s: %s, for %v", e.Node, errtext.OneLine(e.Err), e.HolderTTL)
	case e.Err != nil:
		return fmt.Sprintf("%s: %s", e.Node, errtext.OneLine(e.Err))
	}
	return e.Node + ": ok"
}

// Unwrap returns Err.
func (e NodeError) Unwrap() error { return e.Err }

// PanicError reports that the Loader or Store of a Fetcher panicked, or called runtime.Goexit, on a goroutine
// of the Fetcher.
type PanicError struct {
	Op     string // "Lookup", "Load" or "Store"; "rdb" for a hook of a rediscache.Cache's client
	Value  any    // the value of the panic; nil for Goexit
	Goexit bool
	Stack  []byte // of its goroutine
}

// Error is one line. Stack has the origin.
func (e *PanicError) Error() string {
	if e.Goexit {
		return fmt.Sprintf("flightlock: %s called runtime.Goexit", e.Op)
	}
	return fmt.Sprintf("flightlock: %s panicked: %s", e.Op, errtext.OneLine(e.Value))
}

// Unwrap returns the value, if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// quorumError translates a failure of the quorum to the errors of this package.
func quorumError(key string, f *quorum.Failure) *QuorumError {
	e := &QuorumError{Op: f.Op, Key: key, Need: f.Need, Got: f.Got, sentinel: sentinels[f.Outcome()],
		reason: f.Err,
		away:   f.Away, undecided: f.Undecided()}
	for _, n := range f.Nodes {
		e.Nodes = append(e.Nodes, nodeError(f.Op, n))
	}
	return e
}

// nodeErrors are the errors of the nodes in err, by name, if it is a QuorumError.
func nodeErrors(err error) map[string]error {
	all := map[string]error{}
	if q := (*QuorumError)(nil); errors.As(err, &q) {
		for _, n := range q.Nodes {
			if n.Err != nil {
				all[n.Node] = n.Err
			}
		}
	}
	return all
}

var sentinels = map[quorum.Reason]error{
	quorum.Taken:         ErrNotAcquired,
	quorum.Unreachable:   ErrUnavailable,
	quorum.NotHeld:       ErrNotHeld,
	quorum.Misconfigured: ErrInvalid,
}

var (
	errMissing = errors.New("the key is gone")
	// errNotThere is for an attempt whose first votes differ in their counters: the node is asked to raise its
	// own, and may not have granted the key so far.
	errNotThere = errors.New("it has not granted the key")
	errNoName   = errors.New("held by a client of another library: the key has an empty value")
)

func nodeError(op string, n quorum.NodeAnswer) NodeError {
	e := NodeError{Node: n.Name}
	switch n.Reply.Kind {
	case node.Failed:
		e.Err = n.Reply.Err
	case node.Held:
		e.Holder, e.HolderTTL = n.Reply.Holder, n.Reply.TTL
		if e.Holder == "" {
			e.Err = errNoName
		}
	case node.Missing:
		e.Err = errMissing
		if op == "acquire" {
			e.Err = errNotThere
		}
	}
	return e
}

// invalid is an ErrInvalid that names a field or argument, its value, and the limit.
func invalid(field string, value any, limit string) error {
	return fmt.Errorf("flightlock: %w: %s is %v, but %s", ErrInvalid, field, value, limit)
}

var errZeroClient = fmt.Errorf("flightlock: %w: this Client was not made by New or Open", ErrInvalid)

// flightErrors phrases the errors of the local tier.
type flightErrors struct{ c *Client }

var (
	errClosed  = fmt.Errorf("flightlock: the Client is %w", ErrClosed)
	errExpired = fmt.Errorf("%w: its validity ended before it was refreshed or released", ErrLockLost)
)

func (p flightErrors) Failed(key string, f *quorum.Failure, ctxErr error) error {
	e := &QuorumError{Op: "acquire", Key: key}
	if f != nil {
		e = quorumError(key, f)
	}
	e.Need, e.ctx = p.c.quorum.Need(), ctxErr // no node may have been asked
	return e
}

func (p flightErrors) TooManyWaiters(key string) error {
	return fmt.Errorf("flightlock: acquire %q: %w: Options.MaxWaiters is %d", key, ErrTooManyWaiters,
		p.c.opts.MaxWaiters)
}

func (flightErrors) FailedElsewhere() error { return errFailedElsewhere }

func (flightErrors) Closed() error { return errClosed }

func (flightErrors) Released() error { return errReleased }

func (flightErrors) Ended(key string, why error) error { return lockEnded(key, why) }

// lockEnded is for using a lock that has ended.
func lockEnded(key string, why error) error { return lockError(key, ErrNotHeld, why) }

// A lossError is why a lock was lost, with its key. Two of one loss are equal, so that errors.Is finds
// the cause of a Lock's ctx in what Err returns.
type lossError struct {
	key string
	why error
}

func (e lossError) Error() string { return fmt.Sprintf("flightlock: lock %q: %v", e.key, e.why) }

func (e lossError) Unwrap() error { return e.why }

// lockError names the key and matches sentinel, whether or not why does. If the lock was lost, it
// matches the cause of the Lock's ctx as well.
func lockError(key string, sentinel, why error) error {
	lock := fmt.Sprintf("flightlock: lock %q", key)
	why = within(errtext.Within(lock, why))
	if errors.Is(why, sentinel) {
		return fmt.Errorf("%s: %w", lock, why)
	}
	return fmt.Errorf("%s: %w: %w", lock, sentinel, why)
}

// matches is errors.Is for a target that may be the caller's own error, and not comparable: for such a
// one errors.Is panics.
func matches(err, target error) bool {
	return reflect.ValueOf(target).Comparable() && errors.Is(err, target)
}

func within(err error) error { return errtext.Within("flightlock", err) }

func (flightErrors) Lost(key string, f *quorum.Failure) error {
	return lossError{key, fmt.Errorf("%w: %w", ErrLockLost, within(quorumError(key, f)))}
}

func (flightErrors) Revoked(key string) error {
	return lossError{key, fmt.Errorf("%w: it was %w", ErrLockLost, ErrRevoked)}
}

func (flightErrors) Expired(key string, stopped, failed error) error {
	if stopped == nil && failed == nil {
		return lossError{key, errExpired}
	}
	err := fmt.Errorf("%w: its validity ended", ErrLockLost)
	if stopped != nil {
		err = fmt.Errorf("%w: %w", err, within(stopped))
	}
	if failed != nil {
		err = fmt.Errorf("%w; the last refresh failed: %w", err, within(failed))
	}
	return lossError{key, err}
}
