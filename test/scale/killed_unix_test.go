//go:build unix

package scale

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
)

// This file kills and stops processes that hold or want a lock.

// waiting is a process that was asked to lock the key, and does not have it yet.
type waiting struct {
	*process
	got chan told // closed if the process ended
}

func (p *process) startLock(ttl time.Duration) *waiting {
	w := &waiting{p, make(chan told, 1)}
	go func() {
		defer close(w.got)
		if r, err := p.run(errand{Do: doLock, Key: "k", TTL: ttl}); err == nil {
			w.got <- r
		}
	}()
	return w
}

// mustGet waits for the lock.
func (w *waiting) mustGet(t *testing.T, within time.Duration) told {
	t.Helper()
	select {
	case r, ok := <-w.got:
		if !ok || len(r.Errors) > 0 {
			t.Fatalf("no lock: %v", r.Errors)
		}
		return r
	case <-time.After(within):
		t.Fatalf("no lock within %v", within)
		return told{}
	}
}

func (p *process) must(t *testing.T, e errand) told {
	t.Helper()
	e.Key = "k"
	r, err := p.run(e)
	if err != nil || len(r.Errors) > 0 {
		t.Fatalf("%s: %v %v", e.Do, err, r.Errors)
	}
	return r
}

// wants are the contenders that wait for the key k on a server, in the order of their waiting time.
func wants(t *testing.T, s *redistest.Server) (names []string) {
	t.Helper()
	for _, key := range s.Keys(t) {
		if strings.HasPrefix(key, node.Reserved) && strings.HasSuffix(key, ":wants:lock:k") {
			for _, name := range s.Do(t, "ZRANGE", key, 0, -1).([]any) {
				names = append(names, name.(string))
			}
		}
	}
	return names
}

// isTurnOf reports whether the key k on a server is reserved for the contender, or was granted to its
// process.
func isTurnOf(t *testing.T, s *redistest.Server, contender string) bool {
	t.Helper()
	holder, _ := s.Do(t, "GET", "lock:k").(string)
	return strings.HasPrefix(strings.TrimPrefix(holder, node.TurnOf), processOf(contender))
}

// haveRead returns when the servers have executed what was sent to them before. A server may read a second
// PING only in a round of its loop after that in which it has read all that had come before the first.
func haveRead(t *testing.T, servers []*redistest.Server) {
	t.Helper()
	for range 2 {
		for _, s := range servers {
			s.Do(t, "PING")
		}
	}
}

func everywhere(servers []*redistest.Server, cond func(*redistest.Server) bool) bool {
	return !slices.ContainsFunc(servers, func(s *redistest.Server) bool { return !cond(s) })
}

// eventuallyWanted waits until n contenders are registered on all servers.
func eventuallyWanted(t *testing.T, servers []*redistest.Server, n int) {
	t.Helper()
	var there [][]string // by server
	defer func() {
		if t.Failed() {
			t.Logf("those that wait, by server: %q", there)
		}
	}()
	redistest.Eventually(t, passesOn, fmt.Sprintf("%d contenders wait", n), func() bool {
		there = nil
		for _, s := range servers {
			there = append(there, wants(t, s))
		}
		return !slices.ContainsFunc(there, func(names []string) bool { return len(names) != n })
	})
}

// stopsWithALease has the process retain a lease, and stops it while a majority of the servers has that. (On
// a busy machine it may have returned the lease by the time at which it is stopped.)
func (p *process) stopsWithALease(t *testing.T, servers []*redistest.Server, ttl time.Duration) (r told) {
	t.Helper()
	redistest.Eventually(t, passesOn, "the process is stopped and retains a lease", func() bool {
		if now := p.must(t, errand{Do: doRetain, TTL: ttl, Linger: time.Minute}); now.Owner != "" {
			r = now // else it retains the one of before
		}
		testkit.Must(t, p.Stop())
		has := 0
		for _, s := range servers {
			if v, _ := s.Do(t, "GET", "lock:k").(string); strings.HasPrefix(v, processOf(r.Owner)) {
				has++
			}
		}
		if has > len(servers)/2 {
			return true
		}
		testkit.Must(t, p.Cont())
		return false
	})
	return r
}

// processOf is the part of the name of an owner or contender that all of its process share.
func processOf(name string) string { return name[:strings.LastIndex(name, "-")+1] }

// lockers starts servers and processes that can lock on them.
func lockers(t *testing.T, nodes, procs int) (servers []*redistest.Server, ps []*process) {
	t.Helper()
	var addrs []string
	for range nodes {
		s := redistest.StartServer(t)
		servers, addrs = append(servers, s), append(addrs, s.Addr())
	}
	for range procs {
		ps = append(ps, startProcess(t, addrs...))
	}
	return servers, ps
}

// passesOn is how long others may have to wait when a process has died: until a ttl of a few
// seconds, or a turn of a second, has run out, with a margin for a busy machine.
const passesOn = 40 * time.Second

// A process that is killed while it holds the key costs the others the ttl that is left.
func TestAProcessKilledWhileItHolds(t *testing.T) {
	t.Parallel()
	run, wait := testkit.Together(t)
	defer wait()
	for _, nodes := range []int{1, 3} {
		run(fmt.Sprintf("nodes=%d", nodes), func(t *testing.T) {
			servers, ps := lockers(t, nodes, 3)
			// until it is killed
			fence := ps[0].must(t, errand{Do: doLock, TTL: 2 * time.Second, Refreshed: true}).Fence
			first := ps[1].startLock(time.Minute)
			eventuallyWanted(t, servers, 1)
			second := ps[2].startLock(time.Minute)
			eventuallyWanted(t, servers, 2)
			ps[0].Kill()
			killed, left := time.Now(), servers[0].Do(t, "PTTL", "lock:k")

			winner, other := first, second
			var next told
			select {
			case next = <-first.got:
			case next = <-second.got:
				winner, other = second, first
			case <-time.After(passesOn):
				t.Fatal("no process continues")
			}
			t.Logf("the next one had it %v after the kill; the ttl had %v ms left", time.Since(killed), left)
			if next.Fence <= fence || len(next.Errors) > 0 {
				t.Errorf("%+v after fence %d", next, fence)
			}
			winner.must(t, errand{Do: doRelease})
			if last := other.mustGet(t, passesOn); last.Fence <= next.Fence {
				t.Errorf("fence %d after %d", last.Fence, next.Fence)
			}
			other.must(t, errand{Do: doRelease})
		})
	}
}

// grantSpan is how long a release grants the key: see package flight.
const grantSpan = 450 * time.Millisecond

// A process that is killed while it waits, or in the moment in which it is granted the key, costs the others
// the span of that grant at most, and no second one.
func TestAProcessKilledWhileItWaits(t *testing.T) {
	t.Parallel()
	run, wait := testkit.Together(t)
	defer wait()
	for _, nodes := range []int{1, 3} {
		for _, told := range []bool{false, true} {
			run(fmt.Sprintf("nodes=%d/told=%v", nodes, told), func(t *testing.T) {
				servers, ps := lockers(t, nodes, 3)
				ps[0].must(t, errand{Do: doLock, TTL: time.Minute})
				ps[1].startLock(time.Minute)
				eventuallyWanted(t, servers, 1)
				victim := wants(t, servers[0])[0]
				next := ps[2].startLock(time.Minute)
				eventuallyWanted(t, servers, 2)

				if told {
					testkit.Must(t, ps[1].Stop()) // its notices stay in its socket
				} else {
					ps[1].Kill()
				}
				haveRead(t, servers) // a poll that is read after the release would lock for the victim, for a minute
				released := time.Now()
				ps[0].must(t, errand{Do: doRelease})
				hasKey := slices.ContainsFunc(servers, func(s *redistest.Server) bool { return isTurnOf(t, s, victim) })
				// Whether the servers know by now that a killed process is gone is chance: then the next one is granted
				// the key at once. One that is stopped is granted it, for as long as nobody else may have it.
				if took := time.Since(released); told && !hasKey && took < grantSpan {
					t.Fatalf("%v after the release the victim was not granted the key, which has %v",
						took, servers[0].Do(t, "GET", "lock:k"))
				}
				ps[1].Kill()
				next.mustGet(t, passesOn)
				t.Logf("the next one had it %v after the release", time.Since(released))

				again := ps[0].startLock(time.Minute)
				redistest.Eventually(t, 20*time.Second, "the first waits again", func() bool {
					return everywhere(servers, func(s *redistest.Server) bool {
						return slices.ContainsFunc(wants(t, s), func(name string) bool { return name != victim })
					})
				})
				ps[2].must(t, errand{Do: doRelease})
				again.mustGet(t, passesOn)
				ps[0].must(t, errand{Do: doRelease})
				for i, s := range servers {
					if left := wants(t, s); slices.Contains(left, victim) {
						t.Errorf("on node %d the victim is still among those who wait: %q", i, left)
					}
				}
			})
		}
	}
}

// A process that is stopped for longer than its ttl while it holds the key has lost it when it
// continues, by every way to find out, and leaves its successor alone.
func TestAProcessStoppedWhileItHolds(t *testing.T) {
	t.Parallel()
	run, wait := testkit.Together(t)
	defer wait()
	for _, nodes := range []int{1, 3} {
		for _, refreshed := range []bool{false, true} {
			run(fmt.Sprintf("nodes=%d/refreshed=%v", nodes, refreshed), func(t *testing.T) {
				servers, ps := lockers(t, nodes, 2)
				fence := ps[0].must(t, errand{Do: doLock, TTL: 3 * time.Second, Refreshed: refreshed}).Fence
				next := ps[1].startLock(time.Minute)
				eventuallyWanted(t, servers, 1)
				testkit.Must(t, ps[0].Stop())
				after := next.mustGet(t, passesOn)
				if after.Fence <= fence {
					t.Errorf("fence %d after %d", after.Fence, fence)
				}
				testkit.Must(t, ps[0].Cont())
				ps[0].must(t, errand{Do: doInspect})
				held := 0
				for _, s := range servers {
					if s.Do(t, "GET", "lock:k") == after.Owner {
						held++
					}
				}
				if held <= nodes/2 {
					t.Errorf("the successor is left on %d nodes", held)
				}
				ps[1].must(t, errand{Do: doRefresh})
				ps[1].must(t, errand{Do: doRelease})
				ps[0].must(t, errand{Do: doLock, TTL: time.Second}) // the client is as good as new
				ps[0].must(t, errand{Do: doRelease})
			})
		}
	}
}

// A process that dies with a retained lease costs the others what is left of its ttl.
func TestAProcessKilledWhileItRetains(t *testing.T) {
	t.Parallel()
	run, wait := testkit.Together(t)
	defer wait()
	for _, nodes := range []int{1, 3} {
		run(fmt.Sprintf("nodes=%d", nodes), func(t *testing.T) {
			_, ps := lockers(t, nodes, 2)
			fence := ps[0].must(t, errand{Do: doRetain, TTL: 2 * time.Second, Linger: time.Minute}).Fence
			ps[0].Kill()
			if next := ps[1].startLock(time.Minute).mustGet(t, passesOn); next.Fence <= fence {
				t.Errorf("fence %d after %d", next.Fence, fence)
			}
		})
	}
}

// A process that is stopped for longer than the ttl of a lease that it retains does not use it when
// it continues, whichever comes first, a caller, the timer or the recall; and it leaves its
// successor alone.
func TestAProcessStoppedWhileItRetains(t *testing.T) {
	t.Parallel()
	run, wait := testkit.Together(t)
	defer wait()
	for _, nodes := range []int{1, 3} {
		run(fmt.Sprintf("nodes=%d", nodes), func(t *testing.T) {
			servers, ps := lockers(t, nodes, 2)
			fence := ps[0].stopsWithALease(t, servers, 2*time.Second).Fence
			after := ps[1].startLock(time.Minute).mustGet(t, passesOn)
			if after.Fence <= fence {
				t.Errorf("fence %d after %d", after.Fence, fence)
			}
			again := ps[0].startLock(time.Minute)
			testkit.Must(t, ps[0].Cont())
			eventuallyWanted(t, servers, 1)
			select {
			case r := <-again.got:
				t.Fatalf("two hold it: %+v, %+v", after, r)
			default:
			}
			ps[1].must(t, errand{Do: doRefresh})
			ps[1].must(t, errand{Do: doRelease})
			if r := again.mustGet(t, passesOn); r.Fence <= after.Fence {
				t.Errorf("fence %d after %d", r.Fence, after.Fence)
			}
		})
	}
}

// A process that continues in time releases a retained lease to the one that has recalled it
// meanwhile.
func TestAProcessStoppedForAMomentWhileItRetains(t *testing.T) {
	t.Parallel()
	servers, ps := lockers(t, 3, 2)
	fence := ps[0].stopsWithALease(t, servers, time.Minute).Fence
	next := ps[1].startLock(time.Minute)
	select {
	case r := <-next.got:
		t.Fatalf("a lease that is retained was given to another: %+v", r)
	case <-time.After(100 * time.Millisecond):
	}
	testkit.Must(t, ps[0].Cont())
	if r := next.mustGet(t, passesOn); r.Fence <= fence {
		t.Errorf("fence %d after %d", r.Fence, fence)
	}
}
