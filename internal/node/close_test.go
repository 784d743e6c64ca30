package node

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

// blocked is a node of a fake server that answers nothing until the gate opens, with one
// acquire written to it.
func blocked(t *testing.T) (n *Node, f *redistest.Fake, gate chan struct{}, first *attempt, heard *ear) {
	gate = make(chan struct{})
	f = redistest.StartFake(t, func([]string) string { <-gate; return ":1\r\n" })
	n = newNode(t, f.Client(t))
	first = newAttempt(t, n, sameLane(1)[0])
	heard = first.acquire()
	redistest.Eventually(t, patience, "the first command is written", func() bool { return len(f.Commands()) == 1 })
	return n, f, gate, first, heard
}

// Close fails what was not written yet, and still tries releases once.
func TestCloseFailsWhatWaitsAndTriesReleases(t *testing.T) {
	n, f, gate, first, heard := blocked(t)
	released := first.release()
	a := newAttempt(t, n, sameLane(2)[1])
	waiting := a.acquire()
	refresh := a.refresh()

	ctx, cancel := context.WithCancel(t.Context())
	closed := make(chan error)
	go func() { closed <- n.Close(ctx) }()
	redistest.Eventually(t, patience, "the node is closing", n.closing.Load)
	close(gate)
	if err := <-closed; err != nil {
		t.Error(err)
	}
	cancel()
	heard.wantNow(t, Granted)
	released.wantNow(t, Deleted)
	for _, e := range []*ear{waiting, refresh} {
		if rep := e.wantNow(t, Failed); !errors.Is(rep.Err, ErrClosed) {
			t.Error(rep.Err)
		}
	}
	if got := f.Commands(); len(got) != 2 {
		t.Errorf("commands: %v", got)
	}
}

// After Close everything fails at once, and nothing is owed.
func TestAClosedNodeRefusesAtOnce(t *testing.T) {
	s := redistest.StartServer(t)
	for name, used := range map[string]bool{"used": true, "never used": false} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, s.Client(t))
			a := newAttempt(t, n, "k")
			if used {
				a.acquire().want(t, Granted)
			}
			for range 2 { // closing again changes nothing
				if err := n.Close(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			late := newAttempt(t, n, "late")
			if rep := late.acquire().wantNow(t, Failed); !errors.Is(rep.Err, ErrClosed) {
				t.Error(rep.Err)
			}
			late.release().wantNow(t, Missing)
			if used {
				a.release().wantNow(t, Failed)
			}
			wantDebts(t, n, 0)
		})
	}
}

// Close returns with its ctx although the server is stalled. The goroutines end soon: one batch is
// tried, however many requests wait.
func TestCloseOfAStalledNodeReturnsWithItsContext(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	keys := sameLane(2)
	held := make([]*attempt, 3*maxBatch)
	for i := range held {
		held[i] = newAttempt(t, n, keys[1]+string(rune(i)))
		held[i].acquire()
	}
	for _, a := range held {
		redistest.Eventually(t, patience, "all are granted", func() bool {
			a.mu.Lock()
			defer a.mu.Unlock()
			return a.present
		})
	}
	_ = s.Stop()
	ears := make([]*ear, len(held))
	for i, a := range held {
		ears[i] = a.release()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	begin := time.Now()
	if err := n.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Close: %v", err)
	}
	if d := time.Since(begin); d > time.Second {
		t.Errorf("Close took %v", d)
	}
	if err := n.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if d := time.Since(begin); d > 2*closeTimeout {
		t.Errorf("the goroutines ended after %v", d)
	}
	for _, e := range ears {
		e.wantNow(t, Failed)
	}
	_ = s.Cont()
}
