package quorum

import (
	"context"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// Release succeeds when a majority deleted our key, and does not wait for the others.
func TestReleaseNeedsAMajority(t *testing.T) {
	for n := 1; n <= 5; n++ {
		for gone := 0; gone <= n; gone++ {
			inBubble(t, n, func(t *testing.T, r *rig) {
				c := r.client("x")
				r.warm(c, key)
				l, _ := c.must(key, ttl, 1)
				synctest.Wait()
				for i := range gone {
					r.mem[i].Mini.Del(key)
				}
				f := c.release(l)
				if n-gone >= c.q.Need() {
					if f != nil {
						t.Errorf("gone on %d of %d: %s", gone, n, describe(f))
					}
				} else {
					wantReason(t, f, NotHeld)
				}
				r.wantNoKey(key)
			})
		}
	}
}

// A key that another has by now is not changed, and the release returns NotHeld.
func TestReleaseLeavesOthersAlone(t *testing.T) {
	heldLease(t, func(r *rig, c *client, l *Lease, _ Grant) {
		r.give(key, "other", time.Hour, 0, 1, 2)
		wantReason(r.t, c.release(l), NotHeld)
		r.settle()
		r.wantHolders(key, "other", "other", "other")
	})
}

// When too few nodes answer, the release returns that when the NodeTimeout, and the moment that a first
// deadline is put off, are over; it is retried on the nodes all the same, and the key is gone when they are
// back.
func TestReleaseOfUnreachableNodes(t *testing.T) {
	heldLease(t, func(r *rig, c *client, l *Lease, _ Grant) {
		r.mem[0].Down(true)
		r.mem[1].Stall(true)
		start := time.Now()
		wantReason(r.t, c.release(l), Unreachable)
		if took := time.Since(start); took != nodeTimeout+conn.MinGrace {
			r.t.Errorf("took %v", took)
		}
		r.mem[0].Down(false)
		r.mem[1].Stall(false)
		time.Sleep(ms(600)) // less than the ttl
		r.wantHolders(key, "", "", "")
	})
}

// A second release is NotHeld at once, and so is one of a lease that was never won. It
// does not disturb the attempt that is under way.
func TestReleaseOfNoLease(t *testing.T) {
	heldLease(t, func(r *rig, c *client, l *Lease, _ Grant) {
		if f := c.release(l); f != nil {
			r.t.Fatal(describe(f))
		}
		r.settle() // a majority has answered; the others' requests may not be sent yet
		before := c.commands(nil)
		wantReason(r.t, c.release(l), NotHeld)
		if got := c.commands(before); slices.Max(got) != 0 {
			r.t.Errorf("sent %v", got)
		}
		r.settle()

		r.delays(ms(5), ms(5), ms(5))
		a := c.begin(key, ttl, 1)
		wantReason(r.t, c.release(a.l), NotHeld)
		if _, f := a.wait(); f != nil {
			r.t.Fatal(describe(f))
		}
		r.wantHolders(key, a.l.Owner(), a.l.Owner(), a.l.Owner())
		if f := c.release(a.l); f != nil {
			r.t.Error(describe(f))
		}
	})
}

// Release while a refresh is in progress: each gets one answer, and nothing of the lease is left,
// at whatever moment the release comes.
func TestReleaseDuringRefresh(t *testing.T) {
	t.Parallel()
	for at := range 30 {
		heldLease(t, func(r *rig, c *client, l *Lease, _ Grant) {
			r.setCounter(0, r.counter(0)+100) // so that there is a confirmation
			r.mem[2].Mini.Del(key)            // and a repair
			r.delays(ms(2), ms(4), ms(6))
			a := c.beginRefresh(l, ttl, 10)
			time.Sleep(ms(at))
			b := c.beginRelease(l)
			_, f := a.wait()
			if early := at < 8; early {
				wantReason(r.t, f, NotHeld)
			} else if f != nil && f.Reason != NotHeld {
				r.t.Errorf("after %dms: %s", at, describe(f))
			}
			if _, f := b.wait(); f != nil {
				r.t.Errorf("after %dms: %s", at, describe(f))
			}
			time.Sleep(ms(100))
			r.wantHolders(key, "", "", "")
		})
	}
}

// A node that never had the key is as good as one that deleted it: what counts is that a majority
// is free of it. But it proves nothing about a lease that another node has lost.
func TestReleaseCountsNodesThatNeverHadTheKey(t *testing.T) {
	for name, c := range map[string]struct{ lost, others bool }{
		"held": {}, "lost": {lost: true}, "held, and the node has another's": {others: true},
		"lost, and the node has another's": {lost: true, others: true},
	} {
		lost, others := c.lost, c.others
		t.Run(name, func(t *testing.T) {
			inBubble(t, 3, func(t *testing.T, r *rig) {
				c := r.client("x")
				r.warm(c, key)
				if others {
					r.give(key, "other-1", ms(500), 2)
				} else {
					r.mem[2].Down(true)
				}
				l := c.mustAs("x-1") // whose release is for those who wait as well, so each node is asked
				time.Sleep(ms(100))
				r.mem[2].Down(false)
				time.Sleep(redial)
				r.mem[1].Down(true)
				if lost {
					r.mem[0].Mini.Del(key)
				}
				f := c.release(l)
				if lost {
					wantReason(t, f, NotHeld)
				} else if f != nil {
					t.Error(describe(f))
				}
				r.mem[1].Down(false)
				time.Sleep(ms(600))
				r.wantNoKey(key)
			})
		})
	}
}

// A lease that has returned the memory for its release is released like any other, at any moment:
// also while its acquire, which lives there, is on its way to a slow node.
func TestReleaseOfASettledLease(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"settled", "refreshed"} {
		for at := range 20 {
			inBubble(t, 3, func(t *testing.T, r *rig) {
				c := r.client("x")
				r.warm(c, key)
				r.delays(ms(2), ms(2), ms(15))
				l, _ := c.must(key, ttl, 1)
				time.Sleep(ms(at))
				if how == "settled" {
					l.Settle()
				} else if _, f := c.refresh(l, ttl, 0); f != nil {
					t.Fatal(describe(f))
				}
				if l.scratch != nil {
					t.Errorf("%s, it keeps its scratch", how)
				}
				if f := c.release(l); f != nil {
					t.Errorf("%s after %dms: %s", how, at, describe(f))
				}
				time.Sleep(ms(100))
				r.wantNoKey(key)
				l.Settle() // changes nothing any more
				wantReason(t, c.release(l), NotHeld)
			})
		}
	}
}

// A release whose connection is being dialled is written when that is there. If it takes longer than
// NodeTimeout, nobody waits for it any more.
func TestAReleaseWithoutAConnection(t *testing.T) {
	for _, dial := range []time.Duration{nodeTimeout / 2, 10 * nodeTimeout} {
		inBubble(t, 1, func(t *testing.T, r *rig) {
			var takes time.Duration
			c := newClient(t, "x", []redis.UniversalClient{r.mem[0].Client(t, func(o *redis.Options) {
				dial := o.Dialer
				o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
					time.Sleep(takes)
					return dial(ctx, network, addr)
				}
			})})
			l, _ := c.must(key, 10*ttl, 1)
			time.Sleep(redial)
			takes = dial
			r.mem[0].Cut()
			synctest.Wait()
			began := time.Now()
			f := c.release(l)
			if took := time.Since(began); took != min(dial, nodeTimeout) {
				t.Errorf("a dial of %v: took %v", dial, took)
			}
			if dial > nodeTimeout {
				wantReason(t, f, Unreachable)
			} else if f != nil {
				t.Error(describe(f))
			}
			time.Sleep(time.Until(began.Add(dial)))
			synctest.Wait()
			r.wantNoKey(key)
		})
	}
}

// A release that is sent again, because its connection has ended, proves nothing of a node that never had the
// key.
func TestAReleaseThatIsSentAgainToANodeThatNeverHadTheKey(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		r.warm(c, key)
		r.give(key, "other", time.Hour, 2)
		r.delays(0, 0, ms(20))
		l, _ := c.must(key, ttl, 1)
		r.mem[0].Mini.Del(key)
		a := c.beginRelease(l)
		time.Sleep(ms(5))
		r.delays(0, 0, 0)
		r.mem[2].Cut()
		_, f := a.wait()
		wantReason(t, f, NotHeld)
	})
}

// The end of the nodes is that of a release that has no answer by then.
func TestAReleaseEndsWithItsNodes(t *testing.T) {
	heldLease(t, func(r *rig, c *client, l *Lease, _ Grant) {
		r.everyNode(func(m *redistest.MemNode) { m.Stall(true) })
		a := c.beginRelease(l)
		synctest.Wait()
		ctx, cancel := context.WithCancel(r.t.Context())
		cancel()
		for _, n := range c.nodes {
			_ = n.Close(ctx)
		}
		_, f := a.wait()
		wantReason(r.t, f, Unreachable)
		r.everyNode(func(m *redistest.MemNode) { m.Stall(false) })
	})
}

// stoppable is clock.AfterFunc of a process that can be stopped: meanwhile no timer goes off.
type stoppable struct {
	mu      sync.Mutex // guards what follows
	stopped bool
	due     []func()
}

func (p *stoppable) afterFunc(d time.Duration, f func()) *time.Timer {
	return time.AfterFunc(d, func() {
		p.mu.Lock()
		stopped := p.stopped
		if stopped {
			p.due = append(p.due, f)
		}
		p.mu.Unlock()
		if !stopped {
			f()
		}
	})
}

// stop stops the process for d.
func (p *stoppable) stop(d time.Duration) {
	p.mu.Lock()
	p.stopped = true
	p.mu.Unlock()
	time.AfterFunc(d, func() {
		p.mu.Lock()
		due := p.due
		p.stopped, p.due = false, nil
		p.mu.Unlock()
		for _, f := range due {
			f()
		}
	})
}

// A process that is stopped (by a CPU limit, by the machine) cannot read the answers to its releases. When it
// continues, it reads them before it takes the nodes for silent; if they are, it says so when it has waited
// for as much longer.
func TestReleasesOfAStoppedProcessAreAnswered(t *testing.T) {
	for _, silent := range []bool{false, true} {
		var process stoppable
		clock.AfterFunc = process.afterFunc
		heldLease(t, func(r *rig, c *client, l *Lease, _ Grant) {
			defer r.everyNode(func(m *redistest.MemNode) { m.Stall(false) })
			const stopped, way = 90 * time.Millisecond, 46 * time.Millisecond
			r.delays(way, way, way) // no answer is read before the timer goes off
			r.everyNode(func(m *redistest.MemNode) { m.Stall(silent) })
			start := time.Now()
			process.stop(stopped)
			f := c.release(l)
			switch took := time.Since(start); {
			case !silent && f != nil:
				r.t.Errorf("after %v: %s", took, describe(f))
			case silent:
				wantReason(r.t, f, Unreachable)
				if took != stopped+(stopped-nodeTimeout) {
					r.t.Errorf("took %v", took)
				}
			}
		})
		clock.AfterFunc = time.AfterFunc
	}
}

func (r *rig) everyNode(f func(m *redistest.MemNode)) {
	for _, m := range r.mem {
		f(m)
	}
}
