package quorum

import (
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"weak"
)

// rejoin releases held, whose contender is the one of the offer, and waits for the outcome.
func (c *client) rejoin(held *Lease, offer *call) *Failure {
	c.t.Helper()
	a := c.newCall("release", held)
	held.Rejoin(offer.l, span, false, rejoined{a, offer.l})
	_, f := a.wait()
	synctest.Wait()
	return f
}

// rejoined gets the outcome of a release, and knows the offer that this has brought, as a flight does.
type rejoined struct {
	*call
	offer *Lease
}

// listens subscribes c as that contender. (As in all of these tests, time is the bubble's.)
func (c *client) listens(contender string) {
	c.t.Helper()
	c.t.Cleanup(c.q.Watch(key, contender, func(Event) {}))
	time.Sleep(ms(50))
	synctest.Wait()
}

// offerOn is the offer that node i has of contender, "" if it has none.
func (r *rig) offerOn(i int, contender string) string {
	for _, k := range r.mem[i].Mini.Keys() {
		if strings.Contains(k, ":offers:") {
			return r.mem[i].Mini.HGet(k, contender)
		}
	}
	return ""
}

// wantNoWant says that no node has a want or an offer.
func (r *rig) wantNoWant() {
	r.t.Helper()
	for i, m := range r.mem {
		for _, k := range m.Mini.Keys() {
			if strings.Contains(k, ":wants:") || strings.Contains(k, ":offers:") {
				r.t.Errorf("node %d has %s", i, k)
			}
		}
	}
}

// Two clients pass a lease back and forth, each by one request per node. It is valid from when the release
// was sent that has brought the offer.
func TestAReleaseBringsTheNextOffer(t *testing.T) {
	overSizes(t, func(t *testing.T, r *rig) {
		h, held, w, offer := r.offers(4)
		h.listens("h-100")
		fence, polled := held.top, time.Time{}
		before := slices.Clone(h.commands(nil))
		clients, contenders := []*client{h, w}, []string{"h-100", "w-1"}
		for i := range 6 {
			c, other := clients[i%2], clients[1-i%2]
			next := c.offer(contenders[i%2], 4)
			sent := time.Now()
			if f := c.rejoin(held, next); f != nil || !next.l.Rejoined() {
				t.Fatalf("%d: rejoined %v, %s", i, next.l.Rejoined(), describe(f))
			}
			g, f := offer.outcome(t)
			if f != nil || g.First <= fence || g.Span != span {
				t.Fatalf("%d: %+v after %d, %s", i, g, fence, describe(f))
			}
			if from := g.Until.Add(-other.q.Validity(span)); i > 0 && !from.Equal(polled) {
				t.Errorf("%d: valid from %v after the release was sent", i, from.Sub(polled))
			}
			held, offer, fence, polled = offer.l, next, g.Last, sent
		}
		if sent := h.commands(before); slices.Max(sent) != 3 {
			t.Errorf("%d requests per node for 3 releases", sent)
		}
		offer.l.Withdraw()
		h.release(held)
		time.Sleep(ms(50))
		r.wantNoKey(key)
		r.wantNoWant()
	})
}

// A lease whose release may be owed for long keeps none of those that came after it.
func TestALeaseKeepsNoneThatFollowed(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		h, held, w, offer := r.offers(4)
		h.listens("h-100")
		first := held
		var followed []weak.Pointer[Lease]
		clients, contenders := []*client{h, w}, []string{"h-100", "w-1"}
		for i := range 100 {
			next := clients[i%2].offer(contenders[i%2], 4)
			if f := clients[i%2].rejoin(held, next); f != nil {
				t.Fatal(describe(f))
			}
			if _, f := offer.outcome(t); f != nil {
				t.Fatal(describe(f))
			}
			held, offer = offer.l, next
			followed = append(followed, weak.Make(held))
		}
		for _, c := range clients { // the test itself has kept them
			c.mu.Lock()
			c.calls = nil
			c.mu.Unlock()
		}
		runtime.GC()
		for i, p := range followed[:20] { // of the last ones, messages may still come
			if p.Value() != nil {
				t.Fatalf("lease %d is still there", i)
			}
		}
		runtime.KeepAlive(first)
		offer.l.Withdraw()
		h.release(held)
		time.Sleep(ms(50)) // until all is answered, in the bubble's time
	})
}

// Where too few nodes know of somebody else who waits, the contender does not.
func TestAReleaseBringsNoOfferAlone(t *testing.T) {
	// with two, it depends on whose answer is late
	for known, want := range map[int]bool{0: false, 1: false, 3: true} {
		inBubble(t, 3, func(t *testing.T, r *rig) {
			h, held, _, w := r.offers(4)
			h.listens("h-100")
			for i, m := range r.mem {
				for _, k := range m.Mini.Keys() {
					if i >= known && strings.Contains(k, ":wants:") {
						m.Mini.Del(k)
					}
				}
			}
			next := h.offer("h-100", 4)
			if f := h.rejoin(held, next); f != nil || next.l.Rejoined() != want {
				t.Errorf("%d nodes: rejoined %v, %s", known, next.l.Rejoined(), describe(f))
			}
			next.l.Withdraw()
			w.l.Withdraw()
			time.Sleep(ms(50))
			r.wantNoKey(key)
			r.wantNoWant()
		})
	}
}
