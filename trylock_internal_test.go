package flightlock

import (
	"errors"
	"testing"

	"github.com/flightlock/flightlock/internal/node"
)

// answers is the error of an attempt at three nodes, which have these holders, "" for a vote.
func answers(holders ...string) error {
	e := &QuorumError{Op: "acquire", Key: "k", Need: 2, sentinel: ErrNotAcquired}
	for _, holder := range holders {
		e.Nodes = append(e.Nodes, NodeError{Node: "n", Holder: holder})
	}
	return e
}

// TryLock repeats an attempt only if nobody has a majority, and nobody is about to get the lock.
func TestWhichAttemptsOfTryLockAreSplit(t *testing.T) {
	down := answers("", "x").(*QuorumError)
	down.Nodes = append(down.Nodes, NodeError{Node: "n", Err: errors.New("down")})
	unavailable := answers("", "x", "y").(*QuorumError)
	unavailable.sentinel = ErrUnavailable
	nameless := answers().(*QuorumError)
	for range 3 {
		nameless.Nodes = append(nameless.Nodes, NodeError{Node: "n", Err: errNoName})
	}
	for name, c := range map[string]struct {
		err  error
		want bool
	}{
		"three holders":                  {answers("x", "y", "z"), true},
		"a vote, and two holders":        {answers("", "x", "y"), true},
		"a vote, a holder, a dead node":  {down, true},
		"one holder":                     {answers("x", "x", "x"), false},
		"one holder with a majority":     {answers("x", "y", "x"), false},
		"one holder with it, and a vote": {answers("", "x", "x"), false},
		"the turn of another":            {answers("x", "y", node.TurnOf+"z"), false},
		"left to one that waits longer":  {answers("x", "", node.TurnOf), false},
		"too few nodes can be reached":   {unavailable, false},
		"another error":                  {errClosed, false},
		"held, without an owner's name":  {nameless, false},
	} {
		if got := split(c.err); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TryLock waits for a recall only if one owner of another process puts a majority out of reach.
func TestWhichKeysMayBeRetained(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *Client) {
		const theirs, others = "a#uuid-1R", "b#uuid-2R"
		for name, x := range map[string]struct {
			err  error
			want bool
		}{
			"retained on all nodes":      {answers(theirs, theirs, theirs), true},
			"on two, and one is free":    {answers("", theirs, theirs), true},
			"on one node":                {answers("", theirs, ""), false},
			"by two owners":              {answers("", theirs, others), false},
			"without a mark":             {answers("a#uuid-1", "a#uuid-1", ""), false},
			"of this Client":             {answers("a"+c.id+"1R", "a"+c.id+"1R", ""), false},
			"an error of something else": {errClosed, false},
		} {
			if got := c.mayBeRetained(x.err); got != x.want {
				t.Errorf("%s: %v", name, got)
			}
		}
	})
}
