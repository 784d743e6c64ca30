package quorum

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/flightlock/flightlock/internal/node"
)

// recallLog is Recalls that records what it receives.
type recallLog struct {
	mu        sync.Mutex
	log       []string
	confirmed bool
}

func (l *recallLog) Confirmed(yes bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.confirmed != yes {
		l.log = append(l.log, fmt.Sprint(yes))
	}
	l.confirmed = yes
}

func (l *recallLog) Lost() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.log = append(l.log, "lost")
}

func (l *recallLog) Recall(r node.Recall) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.log = append(l.log, r.Owner+" of "+r.Key+" for "+r.Contender)
}

func (l *recallLog) want(t *testing.T, want ...string) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	if !slices.Equal(l.log, want) {
		t.Errorf("%q, want %q", l.log, want)
	}
	l.log = nil
}

// The inbox is confirmed as soon as a majority is, and as long; a gap in the messages of a node
// that has confirmed is a loss of that majority, however short. What is not a recall is ignored.
func TestRecallsAreConfirmedByAMajority(t *testing.T) {
	l := &recallLog{}
	w := &recallWatch{q: &Quorum{need: 2}, by: l}
	on, off := node.Event{Kind: node.Subscribed}, node.Event{Kind: node.Unsubscribed}
	w.OnEvent(0, on)
	l.want(t)
	w.OnEvent(2, on)
	l.want(t, "true")
	w.OnEvent(1, on)
	w.OnEvent(0, off)
	l.want(t)
	w.OnEvent(1, off)
	l.want(t, "false", "lost")
	w.OnEvent(2, on) // a gap without consequences: nothing is retained
	l.want(t)
	w.OnEvent(0, on)
	l.want(t, "true")
	w.OnEvent(0, off) // lost, and there again
	w.OnEvent(0, on)
	l.want(t, "false", "lost", "true")
	for _, text := range []string{"recall: 2 1 oRclock:k", "recall: 2 1 oRc", "1 turn", "", "recall: 2 1"} {
		w.OnEvent(1, node.Event{Kind: node.Message, Text: text})
	}
	l.want(t, "oR of lock:k for c")
}

// From any number of goroutines, the last report is the final state.
func TestConfirmationsAtOnce(t *testing.T) {
	l := &recallLog{}
	w := &recallWatch{q: &Quorum{need: 2}, by: l}
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			for range 200 {
				w.OnEvent(i, node.Event{Kind: node.Unsubscribed})
				w.OnEvent(i, node.Event{Kind: node.Subscribed})
			}
		})
	}
	wg.Wait()
	if !l.confirmed {
		t.Error("not confirmed")
	}
	count := map[string]int{}
	for _, e := range l.log {
		count[e]++
	}
	if count["false"] != count["lost"] || count["true"] != count["lost"]+1 {
		t.Error(count)
	}
}
