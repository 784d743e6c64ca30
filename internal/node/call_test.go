package node

import (
	"errors"
	"testing"

	"github.com/flightlock/flightlock/internal/redistest"
)

// A command that is reused keeps nothing of the answer to its earlier request: an exchange that
// loses its connection must not find a vote there.
func TestACallForgetsTheAnswerBefore(t *testing.T) {
	e := &Entry{}
	e.Init(&Node{}, newTarget("k", "o"), 0)
	c := &call{}
	for _, o := range []op{opAcquire, opRepair, opRefresh, opRelease} {
		first := c.of(&request{e: e, op: o}, &scriptName{})
		first.SetVal(int64(1))
		first.SetErr(errors.New("an error reply"))
		again := c.of(&request{e: e, op: o}, &scriptName{})
		if again != first {
			t.Errorf("%s: another command", o)
		}
		if rep, err := outcome(o, responseOf(again)); again.Val() != nil || err != nil || rep.Kind != Failed {
			t.Errorf("%s: %v, %v, %+v", o, again.Val(), err, rep)
		}
		if n := len(again.Args()); n != map[op]int{opAcquire: 8, opRepair: 9, opRefresh: 9, opRelease: 5}[o] {
			t.Errorf("%s: %d arguments", o, n)
		}
	}
}

// A lane keeps nothing of what it has sent: a lease is large, and its caller may be gone.
func TestALaneKeepsNothingOfARequest(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	for _, inline := range []bool{false, true} {
		n := startNode(t, s.Client(t), patience, true)
		for range 3 { // the first has the scripts loaded
			a := newAttempt(t, n, "k")
			e := newEar()
			a.Acquire(&a.buf, e, longTTL, 1, 0, inline)
			e.want(t, Granted)
			a.release().want(t, Deleted)
		}
		l := &n.servers[0].lanes[int(newTarget("k", "").lane)%lanesAlone]
		for !l.claim() { // it delivers its answers before it goes idle
		}
		for _, c := range l.calls {
			for i, arg := range c.args {
				if arg != nil {
					t.Errorf("inline=%t: argument %d is still %v", inline, i, arg)
				}
			}
		}
		l.rest()
	}
}
