package quorum

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/flightlock/flightlock/internal/node"
)

// A majority is away only by what an immediate retry cannot change: an answer that did not come is not
// enough, however many did not.
func TestAMajorityThatIsAway(t *testing.T) {
	refused := &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	for _, c := range []struct {
		name string
		err  error
		away bool
	}{
		{"refused", refused, true},
		{"late", errors.New("no answer"), false},
		{"stalled", node.ErrStalled, false},
		{"cut", &net.OpError{Op: "read", Err: syscall.ECONNRESET}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := node.Away(c.err); got != c.away {
				t.Errorf("Away(%v) is %v", c.err, got)
			}
		})
	}
}

// repliesOf are those of nodes that have these holders: "" is a vote for us, "down" no answer, "late" none
// yet.
func repliesOf(holders ...string) (all []node.Reply) {
	for _, h := range holders {
		rep := node.Reply{Kind: node.Held, Holder: h, TTL: ttl}
		switch h {
		case "":
			rep = node.Reply{Kind: node.Granted, Counter: 1}
		case "down":
			rep = node.Reply{Kind: node.Failed, Err: errors.New("down")}
		case "lost":
			rep = node.Reply{Kind: node.Failed, Err: io.EOF, Lost: true}
		case "late":
			rep = node.Reply{}
		case "nameless":
			rep.Holder = ""
		}
		all = append(all, rep)
	}
	return all
}

// An attempt was lost with its connections if those votes might have made a majority, and nothing else says
// that it has failed.
func TestWhichAttemptsWereLost(t *testing.T) {
	for name, c := range map[string]struct {
		votes []string
		lost  bool
	}{
		"the only one":         {[]string{"lost"}, true},
		"two of three":         {[]string{"", "lost", "lost"}, true},
		"beside a holder":      {[]string{"x", "lost", "lost"}, true},
		"of one, another down": {[]string{"", "down", "lost"}, true},
		"beside a majority":    {[]string{"x", "x", "lost"}, false},
		"two are down":         {[]string{"down", "down", "lost"}, false},
		"none":                 {[]string{"down", "down", ""}, false},
	} {
		t.Run(name, func(t *testing.T) {
			lease := muteLease(t, len(c.votes))
			r := lease.newRound("acquire", node.Granted, 0, func(*round) {})
			for i, rep := range repliesOf(c.votes...) {
				r.Answer(i, rep)
			}
			lease.mu.Lock()
			f := r.failureLocked()
			lease.mu.Unlock()
			if f.Lost != c.lost {
				t.Errorf("lost: %t", f.Lost)
			}
		})
	}
}

// Votes are split if nobody has a majority, and nobody is about to get the key. Those who split them agree
// on the foremost: the one with most votes, and of several the first by name. A lease that may be retained
// is undecided too.
func TestWhichVotesAreSplit(t *testing.T) {
	const l, theirs, others = "late", "a#uuid-1R", "b#uuid-2R"
	for name, c := range map[string]struct {
		votes                     []string // ours is the owner o
		split, foremost, retained bool
	}{
		"three holders":                  {[]string{"x", "y", "z"}, true, false, false},
		"a vote, and two behind":         {[]string{"", "x", "y"}, true, true, false},
		"a vote, and one before":         {[]string{"", "x", "a"}, true, false, false},
		"two votes":                      {[]string{"", "a", "", "b", "c"}, true, true, false},
		"another has two":                {[]string{"", "x", "x", "b", l}, true, false, false},
		"a vote, a holder, a dead node":  {[]string{"", "x", "down"}, true, true, false},
		"before the last answer":         {[]string{"x", "y", l}, true, false, false},
		"one holder":                     {[]string{"x", "x", "x"}, false, false, false},
		"one holder with a majority":     {[]string{"x", "y", "x"}, false, false, false},
		"one holder with it, and a vote": {[]string{"", "x", "x"}, false, false, false},
		"half of the nodes":              {[]string{"", "", "x", "x"}, true, true, false},
		"one holder of half of them":     {[]string{l, l, "x", "x"}, false, false, false},
		"the turn of another":            {[]string{"x", "y", node.TurnOf + "z"}, false, false, false},
		"left to one that waits longer":  {[]string{"x", "", node.TurnOf}, false, false, false},
		"too few nodes can be reached":   {[]string{"x", "down", "down"}, false, false, false},
		"held, without an owner's name":  {[]string{"nameless", "nameless", "nameless"}, false, false, false},
		"retained on all nodes":          {[]string{theirs, theirs, theirs}, false, false, true},
		"on two, and one is free":        {[]string{"", theirs, theirs}, false, false, true},
		"on half of them":                {[]string{"", theirs, theirs, l}, true, false, true},
		"on one node":                    {[]string{"", theirs, "down"}, true, false, false},
		"by two owners":                  {[]string{"", theirs, others}, true, false, false},
		"on two, and one keeps a turn":   {[]string{node.TurnOf + "z", theirs, theirs}, false, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			lease := muteLease(t, len(c.votes))
			r := lease.newRound("acquire", node.Granted, 0, func(*round) {})
			for i, rep := range repliesOf(c.votes...) {
				if rep.Kind != node.Pending {
					r.Answer(i, rep)
				}
			}
			lease.mu.Lock()
			f := r.failureLocked()
			lease.mu.Unlock()
			if f.Split != c.split || f.Foremost != c.foremost || f.Retained != c.retained {
				t.Errorf("split %t, foremost %t, retained %t", f.Split, f.Foremost, f.Retained)
			}
		})
	}
}

// A failure is decided as soon as a majority is out of reach. What the others answer after that tells who
// has one.
func TestAnswersAfterTheDecisionTellWhoHasAMajority(t *testing.T) {
	lease := muteLease(t, 3)
	var f *Failure
	r := lease.newRound("acquire", node.Granted, 0, func(r *round) {
		lease.mu.Lock()
		f = r.failureLocked()
		lease.mu.Unlock()
	})
	replies := repliesOf("x", "y", "x")
	for i := range 2 {
		r.Answer(i, replies[i])
	}
	if f == nil || !f.Split || !f.Now().Split {
		t.Fatalf("%+v is not split", f)
	}
	r.Answer(2, replies[2])
	if now := f.Now(); now.Undecided() || !now.Owned || now.Nodes[2].Reply.Holder != "x" {
		t.Errorf("now %+v", now)
	}
}
