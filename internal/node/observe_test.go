package node

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

// observed is what Observe was called with.
type observed struct {
	mu       sync.Mutex // guards failures
	failures []string
}

func (o *observed) of(n *Node) {
	n.Observe = func(_ time.Duration, err error) {
		o.mu.Lock()
		defer o.mu.Unlock()
		if err != nil {
			o.failures = append(o.failures, err.Error())
		}
	}
}

func (o *observed) has(text string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.ContainsFunc(o.failures, func(f string) bool { return strings.Contains(f, text) })
}

// A node that answers with an error is a node with an error for its observer: also one that is not
// suspended for it, and for requests of callers and of lanes.
func TestErrorRepliesAreObserved(t *testing.T) {
	for _, line := range []string{
		"OOM command not allowed when used memory > 'maxmemory'.",
		"LOADING Redis is loading the dataset in memory",
		"READONLY You can't write against a read only replica.",
		"NOPERM this user has no permissions to run the 'evalsha' command",
	} {
		for _, alone := range []bool{true, false} {
			code, _, _ := strings.Cut(line, " ")
			t.Run(fmt.Sprintf("%s/alone=%v", code, alone), func(t *testing.T) {
				n := startNode(t, redistest.StartFake(t, redistest.ErrorFor("EVALSHA", line)).Client(t), time.Second, alone)
				var o observed
				o.of(n)
				for range 2 { // by a lane, and by the caller itself if it is alone
					newAttempt(t, n, "k").acquireHere().want(t, Failed)
				}
				if !o.has(code) {
					t.Errorf("observed: %q", o.failures)
				}
				if n.Suspended() {
					t.Error("suspended by an answer")
				}
			})
		}
	}
}

// That a server does not have the scripts yet is no error, but that it refuses to load them is.
func TestRefusedScriptsAreObserved(t *testing.T) {
	refused := redistest.ErrorFor("SCRIPT", "NOPERM this user has no permissions to run the 'script|load' command")
	n := newNode(t, redistest.StartFake(t, func(cmd []string) string {
		if strings.EqualFold(cmd[0], "EVALSHA") {
			return "-NOSCRIPT No matching script.\r\n"
		}
		return refused(cmd)
	}).Client(t))
	var o observed
	o.of(n)
	newAttempt(t, n, "k").acquire().want(t, Failed)
	if !o.has("NOPERM") || o.has("NOSCRIPT") {
		t.Errorf("observed: %q", o.failures)
	}
}
