package quorum

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/node"
)

// Whatever happens to the nodes while a release grants the key to an offer, and while that lease is refreshed and
// released: when all nodes are back, the key is soon gone from all of them, long before its ttl has ended.
func TestGrantsLeaveNothing(t *testing.T) {
	for seed := range uint64(100) {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 0))
			inBubble(t, 3+2*rng.IntN(2), func(t *testing.T, r *rig) { grantAndFail(t, r, rng) })
		})
	}
}

func grantAndFail(t *testing.T, r *rig, rng *rand.Rand) {
	upTo := func(most int) time.Duration { return time.Duration(rng.Int64N(int64(ms(most)) + 1)) }
	holder, held, c, offer := r.offers(1)
	for _, m := range r.mem {
		m.SetDelay(upTo(10))
	}
	for range 1 + rng.IntN(4) {
		m, what, at, lasts := r.mem[rng.IntN(len(r.mem))], rng.IntN(3), upTo(150), upTo(400)
		go func() {
			time.Sleep(at)
			switch what {
			case 0:
				m.Cut()
			case 1:
				m.Down(true)
				time.Sleep(lasts)
				m.Down(false)
			case 2:
				m.Stall(true)
				time.Sleep(lasts)
				m.Stall(false)
			}
		}()
	}
	time.Sleep(upTo(50))
	if rng.IntN(2) == 0 {
		holder.release(held)
	} else { // messages are lost, or late
		r.unwanted()
		r.loses(key)
		spread := rng.IntN(4) // if it is larger than what messages are waited for, the other nodes are asked
		for i := range r.mem {
			r.give(key, offer.l.Owner(), span, i)
			if rng.IntN(3) != 0 {
				at := upTo(spread)
				go func() {
					time.Sleep(at)
					c.vote(i, offer, 1, 1<<40)
				}()
			}
		}
		holder.release(held)
	}
	time.Sleep(upTo(50))
	synctest.Wait()
	if offer.answered() {
		if _, f := offer.wait(); f == nil {
			for range rng.IntN(3) {
				c.refresh(offer.l, time.Minute, 0)
				time.Sleep(upTo(30))
			}
			c.release(offer.l)
		}
	} else {
		offer.l.Cancel()
		if _, f := offer.wait(); f == nil {
			c.release(offer.l)
		}
	}
	time.Sleep(time.Second)
	r.delays(make([]time.Duration, len(r.mem))...)
	r.wantNoKey(key)
	for i, n := range append(append([]*node.Node(nil), c.nodes...), holder.nodes...) {
		if d := n.Debts(); d != 0 {
			t.Errorf("node %d: %d debts", i, d)
		}
	}
}
