package flightlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/quorum"
)

// Revoke asks the Client of owner ([Inspection.Owner], [NodeError.Holder]) to end its lock on key, or to
// release the lease that it retains. There, the Lock's Context ends first, with a cause that matches
// ErrLockLost and ErrRevoked, and then the lock is released. So its holder knows before anybody else has it;
// what the holder does after that is not stopped.
//
// It returns nil when a majority of the nodes no longer has the key in that owner's name, and ErrNotHeld if
// none that answers had. ErrUnavailable means that this has not happened within NodeTimeout, or that too few
// nodes answer: the lock may end later, so call again. Other errors: ErrClosed, ctx's, and ErrInvalid, also
// for a read lock.
//
// A Client obeys from its first automatic refresh on (Do, AutoRefresh: after a third of the ttl), or from its
// first lock with Options.Linger; never with DisableNotify, or a Cluster among its nodes. A process that is
// gone or stopped does not answer: see RevokeForce.
func (c *Client) Revoke(ctx context.Context, key, owner string) error {
	if err := c.checkRevoke(key, owner); err != nil {
		return err
	}
	in, err := c.inspect(ctx, "revoke", key, max(time.Second, c.opts.NodeTimeout))
	if err != nil {
		return err
	}
	need := c.quorum.Need()
	few := in.without(owner) >= need // yet its holder may believe that it has the lock: a node may have lost it
	if few && !in.has(owner) {
		reason := errors.New("no owner was found on a majority")
		if !slices.ContainsFunc(in.Nodes, func(n NodeInspection) bool { return n.Err != nil || n.Owner != "" }) {
			reason = errors.New("nobody has it")
		}
		if in.Owner != "" {
			reason = fmt.Errorf("its owner is %q", in.Owner)
		}
		return &QuorumError{Op: "revoke", Key: key, Need: need, sentinel: ErrNotHeld, reason: reason}
	}
	inbox, text := node.Revocation(owner, c.opts.KeyPrefix+key)
	waited, cancel := context.WithTimeout(ctx, c.opts.NodeTimeout)
	defer cancel()
	// a message may be lost; and the last look is after the time is up
	for pause := time.Millisecond; ; pause *= 2 {
		over := waited.Err() != nil
		in, err = c.inspect(ctx, "revoke", key, c.opts.NodeTimeout, owner, inbox, text)
		if in.without(owner) >= need && !(few && in.has(owner)) {
			return nil
		}
		if over {
			break
		}
		select {
		case <-time.After(pause):
		case <-waited.Done():
		}
	}
	if err == nil {
		err = &QuorumError{Op: "revoke", Key: key, Need: need, sentinel: ErrUnavailable, ctx: ctx.Err(),
			reason: errNoAnswer}
	}
	return err
}

var errNoAnswer = errors.New("the holder has not answered within NodeTimeout: it listens from its first " +
	"refresh on")

// RevokeForce deletes key from the nodes if it has this owner, without asking anybody, and passes it on to
// those that wait. It is for a holder that is known to be gone or stopped. It breaks what a lock promises: a
// holder that is alive believes that it has the lock until its next refresh or its deadline, while another
// one gets it. Only a resource that compares fencing tokens is safe from that: every later token is larger.
//
// It returns nil if a majority of the nodes has deleted the key; ErrNotHeld if a majority does not have it in
// that owner's name; ErrUnavailable if too few nodes answered: call it again. Other errors: ErrClosed;
// ErrInvalid as Revoke; ctx's, if it had ended before. It takes at most NodeTimeout from when it was written
// to the nodes.
func (c *Client) RevokeForce(ctx context.Context, key, owner string) error {
	if err := c.checkRevoke(key, owner); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return &QuorumError{Op: "revoke", Key: key, Need: c.quorum.Need(), ctx: err}
	}
	done := make(revoked, 1)
	c.quorum.Revoke(c.opts.KeyPrefix+key, owner, done)
	if f := <-done; f != nil {
		return quorumError(key, f)
	}
	return nil
}

// revoked gets the outcome of a release that revokes.
type revoked chan *quorum.Failure

func (r revoked) Released(f *quorum.Failure) { r <- f }

func (c *Client) checkRevoke(key, owner string) error {
	switch {
	case c.flights == nil:
		return errZeroClient
	case c.ended.Err() != nil:
		return errClosed
	// that is a reader's whose key is not shared yet
	case owner == node.Readers, node.Shares(owner) && ours(owner):
		return invalid("owner", strconv.Quote(owner),
			"read locks have the key in this name, and none of them alone")
	case owner == "":
		return invalid("owner", `""`, "it must be the whole owner, as Lock.Owner or Inspection.Owner")
	}
	return c.checkKey(key)
}
