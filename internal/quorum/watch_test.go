package quorum

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/node"
)

// listener is a watch whose nodes are the test, and the events that it has delivered.
type listener struct {
	*watch
	mu  sync.Mutex // guards all
	all []Event
}

func listen(n int) *listener {
	l := &listener{}
	q := &Quorum{Config: Config{NodeTimeout: nodeTimeout}, need: n/2 + 1}
	q.rtt.Store(int64(ms(8)))
	l.watch = &watch{q: q, contender: "me-1", names: slices.Repeat([]string{"1"}, n), onEvent: func(n Event) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.all = append(l.all, n)
	}}
	return l
}

// wantNews checks the events since the last check.
func (l *listener) wantNews(t *testing.T, want ...Event) {
	t.Helper()
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	if !slices.Equal(l.all, want) {
		t.Errorf("events %v, want %v", l.all, want)
	}
	l.all = nil
}

// Subscribed is delivered when a majority of the nodes has confirmed, and again for each further
// one; Unsubscribed once, when they are no longer a majority.
func TestHearsByMajority(t *testing.T) {
	for n := 1; n <= 5; n++ {
		t.Run(fmt.Sprintf("nodes=%d", n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := listen(n)
				for range 2 {
					l.OnEvent(0, node.Event{Kind: node.Unsubscribed}) // it was not subscribed yet
					l.wantNews(t)
					for i := range n {
						l.OnEvent(i, node.Event{Kind: node.Subscribed})
						if i+1 >= l.q.need {
							l.wantNews(t, Subscribed)
						} else {
							l.wantNews(t)
						}
					}
					l.OnEvent(0, node.Event{Kind: node.Subscribed}) // a subscription that was renewed unseen
					l.wantNews(t, Subscribed)
					for left := n - 1; left >= 0; left-- {
						l.OnEvent(left, node.Event{Kind: node.Unsubscribed})
						l.OnEvent(left, node.Event{Kind: node.Unsubscribed})
						if left == l.q.need-1 {
							l.wantNews(t, Unsubscribed)
						} else {
							l.wantNews(t)
						}
					}
				}
				l.stop()
			})
		})
	}
}

// OurTurn is delivered when a majority of nodes has published it.
func TestOursByMajority(t *testing.T) {
	for n := 1; n <= 5; n++ {
		synctest.Test(t, func(t *testing.T) {
			l := listen(n)
			for i := range l.q.need {
				l.wantNews(t)
				l.OnEvent(n-1-i, node.Event{Kind: node.Message, Text: "1 turn"})
			}
			l.wantNews(t, OurTurn)
			time.Sleep(time.Second)
			l.wantNews(t)
			l.stop()
		})
	}
}

// Or half a round trip after the first node has, however often that one repeats it. It is the
// same for each turn.
func TestOursAfterHalfATrip(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := listen(3)
		for i := range 3 {
			l.OnEvent(i, node.Event{Kind: node.Message, Text: "1 turn"})
			time.Sleep(ms(2))
			l.OnEvent(i, node.Event{Kind: node.Message, Text: "1 turn"})
			time.Sleep(ms(2) - 1)
			l.wantNews(t)
			time.Sleep(1)
			l.wantNews(t, OurTurn)
			time.Sleep(time.Second)
			l.wantNews(t)
		}
		l.OnEvent(0, node.Event{Kind: node.Message, Text: "1 turn"}) // two that are one trip apart are two turns
		time.Sleep(ms(4))
		l.wantNews(t, OurTurn)
		l.OnEvent(1, node.Event{Kind: node.Message, Text: "1 turn"})
		l.wantNews(t)
		time.Sleep(ms(4))
		l.wantNews(t, OurTurn)
		l.stop()
	})
}

// A third node that notifies of a turn when the majority already has costs one more try, and is not
// half a majority for the next turn.
func TestLateNoticeOfATurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := listen(3)
		l.OnEvent(0, node.Event{Kind: node.Message, Text: "1 turn"})
		l.OnEvent(1, node.Event{Kind: node.Message, Text: "1 turn"})
		l.wantNews(t, OurTurn)
		l.OnEvent(2, node.Event{Kind: node.Message, Text: "1 turn"})
		l.wantNews(t)
		time.Sleep(ms(4))
		l.wantNews(t, OurTurn)
		l.OnEvent(0, node.Event{Kind: node.Message, Text: "1 turn"})
		l.wantNews(t)
		l.OnEvent(2, node.Event{Kind: node.Message, Text: "1 turn"})
		l.wantNews(t, OurTurn)
		l.waitedForMore() // was just about to run
		l.wantNews(t)
		l.stop()
	})
}

// A round trip that was never measured, or took very long, does not delay a turn.
func TestHalfATripIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for trip, want := range map[time.Duration]time.Duration{0: 0, ms(8): ms(4), time.Hour: nodeTimeout / 2} {
			l := listen(3)
			l.q.rtt.Store(int64(trip))
			l.OnEvent(0, node.Event{Kind: node.Message, Text: "1 turn"})
			if want > 0 {
				time.Sleep(want - 1)
				l.wantNews(t)
				time.Sleep(1)
			}
			l.wantNews(t, OurTurn)
			l.stop()
		}
	})
}

// Another's turn is notified at once, for every node.
func TestTheirsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := listen(3)
		l.OnEvent(0, node.Event{Kind: node.Message, Text: "1 turn"})
		l.OnEvent(1, node.Event{Kind: node.Message, Text: "1 other"})
		l.OnEvent(2, node.Event{Kind: node.Message})
		l.wantNews(t, OtherTurn, OtherTurn)
		time.Sleep(ms(4))
		l.wantNews(t, OurTurn) // of node 0, which may be right
		l.stop()
	})
}

// After stop no turn is delivered, and no timer is left.
func TestStopEndsTheNews(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := listen(3)
		l.OnEvent(0, node.Event{Kind: node.Message, Text: "1 turn"})
		l.stop()
		if l.timer.Stop() {
			t.Error("the timer runs")
		}
		l.waitedForMore() // was just about to run
		l.OnEvent(1, node.Event{Kind: node.Message, Text: "1 turn"})
		time.Sleep(time.Second)
		l.wantNews(t)
	})
}

// Subscribed and Unsubscribed are delivered from the goroutines of several nodes at once. The last
// event is the final state.
func TestLastNewsIsTrue(t *testing.T) {
	for _, first := range []Event{Subscribed, Unsubscribed} {
		synctest.Test(t, func(t *testing.T) {
			l := listen(1)
			signal := map[Event]node.EventKind{Subscribed: node.Subscribed, Unsubscribed: node.Unsubscribed}
			if first == Unsubscribed {
				l.OnEvent(0, node.Event{Kind: node.Subscribed})
				l.wantNews(t, Subscribed)
			}
			record, slow := l.onEvent, make(chan struct{})
			block := sync.OnceFunc(func() { <-slow })
			l.onEvent = func(n Event) {
				if n == first {
					block()
				}
				record(n)
			}
			go l.OnEvent(0, node.Event{Kind: signal[first]})
			synctest.Wait()
			other := Subscribed + Unsubscribed - first
			l.OnEvent(0, node.Event{Kind: signal[other]})
			close(slow)
			synctest.Wait()
			l.mu.Lock()
			defer l.mu.Unlock()
			if got := l.all[len(l.all)-1]; got != other {
				t.Errorf("news %v, and the last is wrong", l.all)
			}
			l.stop()
		})
	}
}

// One node is enough to notify of a failure; later notices of the same failure are no events.
func TestAFailureIsNewsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := listen(3)
		l.OnEvent(1, node.Event{Kind: node.Message, Text: "1 failed label#x-7"})
		l.wantNews(t, Failed)
		l.OnEvent(0, node.Event{Kind: node.Message, Text: "1 failed label#x-7"})
		l.wantNews(t)
		l.OnEvent(2, node.Event{Kind: node.Message, Text: "1 failed label#x-8"})
		l.wantNews(t, Failed)
		l.stop()
	})
}
