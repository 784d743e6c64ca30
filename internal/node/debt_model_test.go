package node

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

// model is a link and a server for random walks: requests are executed, refused, lost
// before or lost after execution, and what was lost may be executed up to 900 ms later.
type model struct {
	*lab
	rnd *rand.Rand

	server sync.Mutex // guards what follows
	key    string     // the owner that the server has, "" for none
	ghosts int        // requests that are still to be executed
}

// exec is what the scripts do.
func (m *model) exec(r *request) Reply {
	m.server.Lock()
	defer m.server.Unlock()
	return m.execLocked(r)
}

func (m *model) execLocked(r *request) Reply {
	owner := r.e.t.Owner()
	switch r.op {
	case opAcquire, opRepair:
		if m.key == "" {
			m.key = owner
			return Reply{Kind: Granted, Counter: 1}
		}
		if m.key == owner {
			return Reply{Kind: Replayed, Counter: 1}
		}
	case opRefresh:
		if m.key == "" {
			return Reply{Kind: Missing}
		}
		if m.key == owner {
			return Reply{Kind: Renewed, Counter: 1}
		}
	case opRelease:
		if m.key == "" {
			return Reply{Kind: Missing}
		}
		if m.key == owner {
			m.key = ""
			return Reply{Kind: Deleted}
		}
	}
	return Reply{Kind: Held, Holder: m.key, TTL: longTTL}
}

// haunt executes r later on.
func (m *model) haunt(r *request) {
	m.server.Lock()
	defer m.server.Unlock()
	m.ghosts++
	r = &request{e: r.e, op: r.op} // as it is on the wire: its buf may be another's by then
	time.AfterFunc(time.Duration(m.rnd.IntN(900))*time.Millisecond, func() {
		m.server.Lock()
		defer m.server.Unlock()
		m.execLocked(r)
		m.ghosts--
	})
}

// flush makes the server lose everything.
func (m *model) flush() {
	m.server.Lock()
	defer m.server.Unlock()
	m.key = ""
}

// step lets one thing happen to the first request of the queue. It reports whether there was one.
func (m *model) step(faults bool) bool {
	r := m.pop()
	if r == nil {
		return false
	}
	if !settleMoot(r) {
		m.happen(r, faults)
	}
	return true
}

func (m *model) happen(r *request, faults bool) {
	dice := 9
	if faults {
		dice = m.rnd.IntN(10)
	}
	switch dice {
	case 0: // the connection could not be made
		r.complete(failed(errReset), notSent)
	case 1: // refused by the server
		r.complete(failed(redisError("LOADING x")), answered)
	case 2: // executed, answer lost
		m.exec(r)
		r.complete(failed(errReset), lost)
	case 3: // lost for good
		r.complete(failed(errReset), lost)
	case 4: // lost, and executed later
		m.haunt(r)
		r.complete(failed(errReset), lost)
	case 5: // an error after the script has written
		m.exec(r)
		r.complete(failed(redisError("ERR x")), answered)
	case 6:
		m.flush()
		fallthrough
	default:
		r.complete(m.exec(r), answered)
	}
}

// Random walks of one key and many owners: whatever happens to their requests, every
// request is answered once and no key is left behind.
func TestRandomWalksLeaveNothingBehind(t *testing.T) {
	for seed := range uint64(1000) {
		synctest.Test(t, func(t *testing.T) {
			m := &model{lab: newLab(), rnd: rand.New(rand.NewPCG(seed, 1))}
			var ears []*ear
			var attempts []*attempt
			hear := func(e *ear) { ears = append(ears, e) }
			for range 60 {
				time.Sleep(time.Duration(m.rnd.IntN(400)) * time.Millisecond)
				synctest.Wait()
				switch dice := m.rnd.IntN(12); {
				case dice == 0 || len(attempts) == 0:
					a := newAttempt(t, m.n, "k")
					attempts = append(attempts, a)
					hear(a.acquire())
				case dice == 1:
					hear(attempts[m.rnd.IntN(len(attempts))].refresh())
				case dice == 2:
					attempts[m.rnd.IntN(len(attempts))].Repair(longTTL, 1, soon())
				case dice == 3:
					hear(attempts[m.rnd.IntN(len(attempts))].release())
				default:
					m.step(true)
				}
			}
			for _, a := range attempts {
				hear(a.release())
			}
			for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
				synctest.Wait()
				for m.step(false) {
				}
			}
			m.server.Lock()
			defer m.server.Unlock()
			if m.key != "" || m.n.Debts() != 0 || m.ghosts != 0 {
				t.Errorf("seed %d: key of %q is left, %d debts", seed, m.key, m.n.Debts())
			}
			for i, e := range ears {
				if got := e.n.Load(); got != 1 {
					t.Errorf("seed %d: sink %d got %d answers", seed, i, got)
				}
			}
		})
		if t.Failed() {
			return
		}
	}
}

// stress lets many owners use a node whose network does everything wrong.
type stress struct {
	t  *testing.T
	n  *Node
	mu sync.Mutex // guards asked
	// asked are the sinks of refreshes and releases, which get exactly one answer; of acquires those
	// that were not canceled get one, the others none.
	once, atMostOnce []*ear
}

func (st *stress) worker(rnd *rand.Rand, end time.Time) {
	for time.Now().Before(end) {
		a := newAttempt(st.t, st.n, string(rune('a'+rnd.IntN(20))))
		asked, released := newEar(), newEar()
		a.Acquire(&a.buf, asked, longTTL, 1, false)
		select {
		case <-asked.heard:
		case <-time.After(time.Duration(rnd.IntN(20)) * time.Millisecond):
		}
		once := []*ear{released}
		if rnd.IntN(3) == 0 {
			e := newEar()
			a.Refresh(e, longTTL, 1, 0, time.Now().Add(50*time.Millisecond), "")
			once = append(once, e)
		}
		if rnd.IntN(5) == 0 {
			a.Repair(longTTL, 1, time.Now().Add(50*time.Millisecond))
		}
		a.Release(&a.buf, released, false, &TurnPass{})
		st.mu.Lock()
		st.once, st.atMostOnce = append(st.once, once...), append(st.atMostOnce, asked)
		st.mu.Unlock()
	}
}

// misbehave switches faults at random until end.
func misbehave(rnd *rand.Rand, s *redistest.Server, p *redistest.Proxy, flush func(), end time.Time) {
	for time.Now().Before(end) {
		pause := time.Duration(rnd.IntN(30)) * time.Millisecond
		switch rnd.IntN(10) {
		case 0:
			p.ResetAll()
		case 1, 2, 3:
			p.CutReplies(rnd.IntN(5000))
		case 4:
			p.HoldRequests()
			time.Sleep(pause)
			p.ResetAll()
			p.ReleaseRequests()
		case 5:
			_ = p.Refuse(true)
			p.ResetAll()
			time.Sleep(pause)
			_ = p.Refuse(false)
		case 6:
			flush()
		case 7:
			_ = s.Stop()
			time.Sleep(pause)
			p.ResetAll()
			_ = s.Cont()
		case 8:
			p.SetDelay(pause / 10)
		case 9:
			p.DropReplies(true)
			time.Sleep(pause)
			p.DropReplies(false)
			p.ResetAll()
		}
		time.Sleep(pause)
	}
	p.CutReplies(-1)
	p.SetDelay(0)
}

// Whatever the network does to the requests of many owners, soon after it works again every key is
// gone, nothing is owed, and every request got exactly one answer.
func TestNothingIsLeftBehindAfterRandomFaults(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	p := redistest.StartProxy(t, s.Addr())
	n := newImpatientNode(t, s.Client(t, at(p.Addr()), quick))
	st := &stress{t: t, n: n}
	end := time.Now().Add(time.Second)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	admin := s.Client(t)
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() { st.worker(rand.New(rand.NewPCG(seed, uint64(i))), end) })
	}
	misbehave(rand.New(rand.NewPCG(seed, 1000)), s, p, func() { admin.ScriptFlush(context.Background()) }, end)
	wg.Wait()
	redistest.Eventually(t, patience, "everything is gone", func() bool {
		return n.Debts() == 0 && len(lockKeys(t, s)) == 0
	})
	t.Logf("%d attempts, %d commands", len(st.atMostOnce), n.Commands())
	redistest.Eventually(t, patience, "every sink has its answer", func() bool {
		for _, e := range st.once {
			if e.n.Load() == 0 {
				return false
			}
		}
		return true
	})
	for _, e := range append(st.once, st.atMostOnce...) {
		if e.n.Load() > 1 {
			t.Fatal("a sink got two answers")
		}
	}
}
