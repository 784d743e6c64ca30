package quorum

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

func epochs(text ...string) (all []*node.Epoch) {
	for _, t := range text {
		if t == "" {
			all = append(all, nil)
			continue
		}
		states := map[byte]node.EpochState{'n': node.EpochNew, 'l': node.EpochLost, 'k': node.EpochKept}
		all = append(all, &node.Epoch{Name: t[1:], State: states[t[0]]})
	}
	return all
}

// Nodes are established together only if all are new, and each in the epoch in which it
// was before any of them was asked again.
func TestJudge(t *testing.T) {
	for _, c := range []struct {
		before, now []*node.Epoch
		want        verdict
	}{
		{epochs("n1", "n2", "n3"), epochs("n1", "n2", "n3"), establish},
		{nil, epochs("n1", "n2", "n3"), retry},
		{epochs("n1", "n2", ""), epochs("n1", "n2", "n3"), retry},
		{epochs("n1", "n2", "n3"), epochs("n4", "n2", "n3"), retry}, // it lost its data once more
		{epochs("k1", "n2", "n3"), epochs("n1", "n2", "n3"), retry},
		{epochs("l1", "n2", "n3"), epochs("n4", "n2", "n3"), retry},
		{epochs("n1", "n2", "n3"), epochs("n1", "n2", ""), leave},
		{epochs("n1", "n2", "n3"), epochs("n1", "n2", "l3"), leave},
		{epochs("n1", "n2", "n3"), epochs("k1", "n2", "n3"), retry}, // somebody else is about it
		{epochs("k1", "k2", "n3"), epochs("k1", "k2", "n3"), leave},
		{epochs("k1", "k2", "k3"), epochs("k1", "k2", "k3"), leave},
		{epochs("l1", "l2", "l3"), epochs("l1", "l2", "l3"), leave},
	} {
		if got := judge(c.before, c.now, 2); got != c.want {
			t.Errorf("judge(%v, %v) = %d, want %d", c.before, c.now, got, c.want)
		}
	}
}

// A grant counts in an epoch that is kept, and in one that was established since.
func TestIsVote(t *testing.T) {
	for _, c := range []struct {
		m, now string
		want   bool
	}{
		{"k1", "", true}, {"k1", "l2", true}, {"n1", "", false}, {"n1", "n1", false}, {"n1", "k1", true},
		{"n1", "k2", false}, {"l1", "l1", false}, {"l1", "k1", true}, {"l1", "k2", false},
	} {
		if got := isVote(epochs(c.m)[0], epochs(c.now)[0]); got != c.want {
			t.Errorf("isVote(%s, %s) = %v", c.m, c.now, got)
		}
	}
}

// While a bootstrap may make votes of grants, the round is not decided; then it is, and not because
// somebody holds the key.
func TestGrantsInLimbo(t *testing.T) {
	for _, c := range []struct {
		t    tally
		lost bool
	}{
		{tally{nodes: 3, need: 2, undecided: 2, pending: 1}, false},
		{tally{nodes: 3, need: 2, undecided: 2, bad: 1}, false},
		{tally{nodes: 3, need: 2, undecided: 1, yes: 1, no: 1, held: 1}, false},
		{tally{nodes: 3, need: 2, undecided: 1, bad: 2}, true},
		{tally{nodes: 3, need: 2, bad: 2, pending: 1}, true},
		{tally{nodes: 3, need: 2, undecided: 1, no: 2, held: 2}, true},
	} {
		if got := c.t.failedForGood(true); got != c.lost {
			t.Errorf("%+v: lost is %v", c.t, got)
		}
	}
}

// Another client establishes the nodes one by one: a bootstrap that finds some of them established
// reads again, and does not take the rest for nodes that have lost their epoch. One that has restarted in
// between is not established, whatever was known of it.
func TestABootstrapDuringAnothers(t *testing.T) {
	t.Parallel()
	servers, conns := threeServers(t)
	x, z := newPatientClient(t, "x", conns, patience), newPatientClient(t, "z", conns, patience)
	x.guard(time.Minute)
	z.guard(time.Minute)
	ask := func(i int, establish string) node.Epoch { // y's bootstrap, by hand
		t.Helper()
		n, err := node.New(conns[i], patience, false)
		if err != nil {
			t.Fatal(err)
		}
		defer n.Close(t.Context())
		n.SetGuard(node.Guard{
			Limit:   time.Minute,
			Name:    func() string { return fmt.Sprint("y-", i, establish) },
			Changed: func(_ node.Epoch, store func()) { store() },
		})
		got := make(chan node.Epoch, 1)
		n.Boot(establish, func(m node.Epoch, err error) {
			if err != nil {
				t.Error(err)
			}
			got <- m
		})
		return <-got
	}
	// y has read, and is slow to continue.
	var before []node.Epoch
	for i := range servers {
		before = append(before, ask(i, ""))
	}
	l, _ := x.must(key, time.Minute, 1) // x has established all
	if err := servers[0].Restart(); err != nil {
		t.Fatal(err)
	}
	for i, m := range before { // y goes on
		after := ask(i, m.Name)
		if want := i != 0; after.State == node.EpochKept != want || after.Name == m.Name != want {
			t.Errorf("node %d: %+v after %+v", i, after, m)
		}
	}
	servers[2].Do(t, "DEL", key)
	_, _, f := z.try(key, time.Minute, 1)
	if f == nil {
		t.Error("granted twice")
	}
	x.release(l)
}

// Where some nodes were established long ago, one read shows that a new one cannot be: it has no other.
func TestANewNodeAmongOthersIsReadOnce(t *testing.T) {
	t.Parallel()
	servers, conns := threeServers(t)
	c := newPatientClient(t, "c", conns, patience)
	c.guard(time.Minute)
	c.tryAndRelease(key, time.Minute)
	servers[1].Do(t, "FLUSHALL")
	redistest.Eventually(t, patience, "the loss is noticed", func() bool {
		c.tryAndRelease(key, time.Minute)
		return c.q.Quarantined(1)
	})
	reads := func() int64 { return servers[1].CommandCalls(t)["evalsha"] }
	readOnce := func() {
		done := make(chan struct{})
		c.q.Nodes[1].Boot("", func(node.Epoch, error) { close(done) })
		<-done
	}
	redistest.Eventually(t, patience, "a bootstrap that reads it once", func() bool { // c makes others meanwhile
		before := reads()
		readOnce()
		once := reads() - before
		c.q.quarantine.bootstrap(true, false)
		return reads()-before == 2*once
	})
}

// A bootstrap begins before the node's epoch is known to have changed, and ends after that: or the
// node would have no vote, and would never be read again. A round with a vote in that epoch
// finds the bootstrap under way.
func TestABootstrapSeesWhatItIsAbout(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		c.guard(ttl)
		k := c.q.quarantine
		for i, n := range c.q.Nodes {
			n.SetGuard(node.Guard{Limit: ttl, Name: c.q.EpochName, Changed: func(m node.Epoch, store func()) {
				k.changed(i, m, func() {
					if k.mu.TryLock() {
						k.mu.Unlock()
						t.Error("a bootstrap may end in this instant")
					}
					if m.State != node.EpochKept && !k.underWay() {
						t.Error("a vote would be turned away")
					}
					store()
				})
				time.Sleep(ms(20))
			}})
		}
		l, _ := c.must(key, time.Minute, 1)
		c.release(l)
		before := c.q.Nodes[0].Epoch().Name
		r.mem[0].Mini.FlushAll()
		l, _ = c.must(key, ttl, 1)
		synctest.Wait() // until node 0 was asked, too
		c.release(l)
		r.settle()
		if m := c.q.Nodes[0].Epoch(); m.State != node.EpochKept || m.Name == before {
			t.Errorf("%v after it began, its epoch is %+v; it was %s", time.Since(m.Began), m, before)
		}
	})
}

// A change that a node reports after Close begins no bootstrap.
func TestNoBootstrapAfterClose(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("x")
		c.guard(time.Minute)
		k := c.q.quarantine
		forget := func() {
			before := c.q.Nodes[0].Epoch().Name
			r.mem[0].Mini.FlushAll()
			c.begin(key, ttl, 1)
			time.Sleep(ttl)
			if c.q.Nodes[0].Epoch().Name == before {
				t.Error("it was not noticed")
			}
		}
		l, _ := c.must(key, time.Minute, 1)
		c.release(l)
		forget() // it is in quarantine for a minute
		_ = c.q.Close(context.Background())
		forget()
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.underWay() || k.running {
			t.Errorf("a bootstrap is under way: %v; run is: %v", k.underWay(), k.running)
		}
	})
}

// Where a node's clock stands still, its quarantine ends by the client's, and is not put off meanwhile.
func TestAQuarantineEndsByTheClientsClock(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		const quarantine = time.Minute
		c := r.client("x")
		c.guard(quarantine)
		r.warm(c, key)
		r.mem[0].Mini.SetTime(time.Now())
		r.mem[0].Mini.FlushAll()
		lost := time.Now()
		c.tryAndRelease(key, ttl)
		r.settle()
		began := c.q.Nodes[0].Epoch().Began
		time.Sleep(time.Until(lost.Add(quarantine - time.Second)))
		if e := c.q.Nodes[0].Epoch(); !c.q.Quarantined(0) || !e.Began.Equal(began) {
			t.Errorf("after %v: in quarantine %v, %v later", time.Since(lost), c.q.Quarantined(0), e.Began.Sub(began))
		}
		time.Sleep(5 * time.Second)
		if c.q.Quarantined(0) {
			t.Errorf("after %v, it is in quarantine still", time.Since(lost))
		}
	})
}

var memoryNames atomic.Int64

// guard turns quarantine on for a client that has not done anything.
func (c *client) guard(limit time.Duration) {
	c.q.Quarantine = limit
	c.q.EpochName = func() string { return fmt.Sprint("m-", memoryNames.Add(1)) }
	c.q.quarantine = newQuarantine(c.q)
	c.nodeTimeout(5 * time.Second)
}

// A confirmation counts in an epoch that is kept, and in one that began so long ago that no attempt is under
// way that the node has granted before; and only if the epoch is the one that was known when the request was
// written.
func TestConfirms(t *testing.T) {
	began := time.Now()
	for _, c := range []struct {
		e, now string
		age    time.Duration
		want   bool
	}{
		{"k1", "k1", 0, true}, {"k1", "l2", time.Hour, false}, {"k1", "", 0, false},
		{"l1", "l1", confirmAfter - 1, false}, {"l1", "l1", confirmAfter, true}, {"n1", "n1", 0, false},
		{"l1", "k1", confirmAfter - 1, false}, {"l1", "k2", time.Hour, false}, {"n1", "k1", confirmAfter, true},
	} {
		e := epochs(c.e)[0]
		e.Began = began.Add(-c.age)
		if got := confirms(e, epochs(c.now)[0], began); got != c.want {
			t.Errorf("confirms(%s, %s, after %v) = %v", c.e, c.now, c.age, got)
		}
	}
}

// The error of a confirmation that does not count says from when on it does, and, as all errors of
// that node, until when its votes do not. It names no time that is past.
func TestWhyAConfirmationDoesNotCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			epoch string
			age   time.Duration
			want  string
		}{
			{"l1", 0,
				`refreshed, which counts from [0-9:.]+ on \(in 11s\): quarantined until [0-9:.]+ \(for 1m0s\): it was`},
			{"n1", confirmAfter,
				`refreshed, which counts from the next refresh on: quarantined until [0-9:.]+ ` +
					`\(for 49s\): it has no data`},
			{"k1", time.Hour, `refreshed, which counts from the next refresh on: the node had lost data$`},
			{"", 0, `not known`},
		} {
			e := epochs(c.epoch)[0]
			if e != nil {
				e.Began = time.Now().Add(-c.age)
			}
			if got := unconfirmed(e, time.Minute).Error(); !regexp.MustCompile(c.want).MatchString(got) {
				t.Errorf("%s, %v old: %s", c.epoch, c.age, got)
			}
		}
	})
}

// A node has lost its data, and a repair has put b's key back on it. a's attempt has its vote from before
// that, and gets another one where b's lease has ended. b's lease must not last by this node's word.
func TestNoConfirmationByANodeThatHasJustForgotten(t *testing.T) {
	const ttl = 4 * time.Second
	inBubble(t, 3, func(t *testing.T, r *rig) {
		var toA, toB redistest.Detainer // of node 1
		client := func(name string, d *redistest.Detainer) *client {
			conns := r.conns()
			conns[1] = r.mem[1].Client(t, d.Options)
			c := newPatientClient(t, name, conns, patience)
			c.guard(time.Minute)
			return c
		}
		a, b := client("a", &toA), client("b", &toB)
		first, _ := a.must("lock:other", time.Minute, 1)
		a.release(first)
		wantHas := func(what string, i int, l *Lease) {
			t.Helper()
			synctest.Wait()
			if got, _ := r.mem[i].Mini.Get(key); got != l.Owner() {
				t.Fatalf("%s: node %d has %q", what, i, got)
			}
		}

		lease, _ := b.must(key, ttl, 1)
		for i := range 3 {
			wantHas("b's key is everywhere", i, lease)
		}
		r.mem[0].Mini.Del(key) // as if the acquire were late
		toA.Hold()
		attempt := a.begin(key, time.Minute, 1)
		wantHas("the first node has granted it to a", 0, attempt.l)

		r.mem[0].Mini.FlushAll()
		redistest.Eventually(t, ttl/4, "b knows", func() bool {
			// An attempt notices that, unless it has ended before its request to the first node was sent.
			b.tryAndRelease("lock:other", ttl)
			return b.nodes[0].Epoch().State != node.EpochKept
		})
		began := time.Now()
		if _, f := b.refresh(lease, ttl, 0); f != nil {
			t.Fatalf("the other two are there: %s", describe(f))
		}
		wantHas("the first node has b's key again", 0, lease)
		toB.Hold()
		time.Sleep(ttl / 4) // so that this refresh is valid for longer than the key is on node 1
		_, f := b.refresh(lease, ttl, 0)
		ended := time.Now()
		if f == nil {
			t.Error("the node that has just lost its data has confirmed a refresh")
		} else if ended.Before(began.Add(ttl * 3 / 4)) {
			t.Errorf("b's lease was lost before its time: %s", describe(f))
		}
		redistest.Eventually(t, 2*ttl, "b's key is gone from node 1",
			func() bool { return !r.mem[1].Mini.Exists(key) })
		toA.LetGo()
		g, f := attempt.wait()
		lease.mu.Lock()
		if now := time.Now(); f == nil && lease.phase == held && now.Before(lease.until) {
			t.Errorf("a holds the key until %v, and b does until %v", g.Until, lease.until)
		}
		lease.mu.Unlock()
		toB.LetGo()
		b.release(lease)
		if f == nil {
			a.release(attempt.l)
		}
		r.settle()
	})
}

// An attempt with votes that are older than attemptLimit fails, for it may have one of a node that
// has lost its data and confirms others' refreshes by now.
func TestAnAttemptThatTakesLongerThanAVoteIsValid(t *testing.T) {
	for _, c := range []struct {
		late time.Duration
		wins bool
	}{{attemptLimit - ms(100), true}, {attemptLimit + ms(100), false}} {
		t.Run(fmt.Sprint(c.late), func(t *testing.T) {
			inBubble(t, 3, func(t *testing.T, r *rig) {
				x := newPatientClient(t, "x", r.conns(), 30*time.Second)
				x.guard(time.Minute)
				x.nodeTimeout(30 * time.Second)
				r.warm(x, key)
				r.give(key, "other-1", time.Hour, 2)
				r.delays(0, c.late/2) // there, and back
				l, _, f := x.try(key, time.Minute, 1)
				if (f == nil) != c.wins {
					t.Errorf("%s", describe(f))
				}
				r.delays(0, 0)
				if f == nil {
					x.release(l)
				} else if !errors.Is(f.Err, errSlowAttempt) {
					t.Error(f.Err)
				}
				r.settle()
				r.wantHolders(key, "", "", "other-1")
			})
		})
	}
}

// A node that keeps its data over a restart is in quarantine, since it may have lost some. Locks that it
// still has were put on it before: it confirms them at once, whether or not the client knows of the restart.
// So they survive that another node is gone shortly after.
func TestANodeThatHasKeptItsDataConfirmsAtOnce(t *testing.T) {
	t.Parallel()
	for confirmsAfterARestart(t) != nil { // the machine was too busy to refresh a lock in time
	}
}

// An offer is granted by all nodes, and the message of one is lost. Then another node is gone.
func TestANodeWhoseMessageWasLostConfirms(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("w")
		c.guard(time.Minute)
		r.warm(c, key)
		r.give(key, "other-1", time.Minute, 0, 1, 2)
		offer := c.offer("w-1", 1)
		c.poll("w-1", offer)
		r.give(key, offer.l.Owner(), span, 0, 1, 2)
		for i := range 2 {
			epoch, owner := c.nodes[i].Epoch().Name, offer.l.Owner()
			c.q.vote(i, fmt.Sprintf("1 grant 5 %s 0 0 %d 1 %d 500 1 %s%s", epoch, len(owner), i, owner, key))
		}
		if _, f := offer.outcome(t); f != nil {
			t.Fatal(describe(f))
		}
		r.mem[1].Down(true)
		var f *Failure
		for range 3 {
			if _, f = c.refresh(offer.l, ttl, 0); f == nil {
				break
			}
			time.Sleep(ms(50))
		}
		if f != nil {
			t.Errorf("a lock is lost that a majority has: %s", describe(f))
		}
		r.mem[1].Down(false)
		c.release(offer.l)
		r.settle()
	})
}

// While most nodes have no vote, in quarantine or suspended, an attempt fails for that and sends nothing to
// the others, also not during the bootstraps that are repeated meanwhile: others' keys are not why nobody
// gets a lock.
func TestWithoutVotesNothingIsSent(t *testing.T) {
	t.Parallel()
	const ttl = time.Minute
	for name, loses := range map[string]func(t *testing.T, s *redistest.Server){
		"both in quarantine": func(t *testing.T, s *redistest.Server) { s.Do(t, "FLUSHALL") },
		"one suspended": func(t *testing.T, s *redistest.Server) {
			if err := s.Kill(); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			servers, conns := threeServers(t)
			before := newPatientClient(t, "before", conns, patience)
			before.guard(time.Minute)
			before.tryAndRelease("lock:other", ttl)
			servers[1].Do(t, "FLUSHALL")
			loses(t, servers[2])
			c := newPatientClient(t, "c", conns, patience) // to which they are new, so that it reads them every second
			c.guard(time.Minute)
			redistest.Eventually(t, patience, "both losses are noticed", func() bool {
				c.tryAndRelease("lock:other", ttl)
				return c.q.Quarantined(1) && (c.q.Quarantined(2) || c.q.Nodes[2].Suspended())
			})
			for _, s := range servers[:2] {
				s.Do(t, "SET", key, "other", "PX", "60000")
			}
			k := c.q.quarantine
			seen, tries := map[bool]bool{}, int64(0)
			sent := servers[0].CommandCalls(t)["evalsha"]
			redistest.Eventually(t, patience, "attempts in a bootstrap and between two", func() bool {
				during := k.underWay()
				tries++
				if _, _, f := c.try(key, ttl, 1); f == nil || f.Reason != Unreachable || !f.Away {
					t.Fatalf("%s, away: %v, in a bootstrap: %v", describe(f), f != nil && f.Away, during)
				}
				seen[during] = true
				return len(seen) == 2 && tries >= 100
			})
			if now := servers[0].CommandCalls(t)["evalsha"]; now-sent > tries/2 { // bootstraps read it once a second
				t.Errorf("%d scripts for %d attempts were sent to the node that has a vote", now-sent, tries)
			}
		})
	}
}

// The error of a node in quarantine may be read after its end: when it is logged, or held for newcomers. It
// says no negative time then.
func TestTheErrorOfAQuarantineThatIsOver(t *testing.T) {
	e := &Quarantined{Until: time.Now().Add(-time.Minute)}
	if text := e.Error(); !strings.Contains(text, "(for 0s)") {
		t.Error(text)
	}
}

// While most nodes are in quarantine because they have lost all their data, and one has not, each of many
// clients reads them once per second or so: another client that establishes the nodes has done so long
// before.
func TestNodesInQuarantineAreReadNowAndThen(t *testing.T) {
	t.Parallel()
	inBubble(t, 3, func(t *testing.T, r *rig) {
		var dials [3]atomic.Int64
		var conns []redis.UniversalClient
		for i, m := range r.mem {
			conns = append(conns, m.Client(t, redistest.CountDials(&dials[i])))
		}
		c := newClient(t, "c", conns)
		c.guard(time.Minute)
		c.tryAndRelease(key, ttl)
		r.mostForget(c)
		if c.q.Quarantined(0) || !c.q.Quarantined(1) || !c.q.Quarantined(2) {
			t.Fatal("the wrong nodes are in quarantine")
		}
		for i := range dials {
			dials[i].Store(0)
		}
		const seconds = 10
		time.Sleep(seconds * time.Second) // the bubble's time
		for i := range dials {
			if n := dials[i].Load(); n > 2*seconds {
				t.Errorf("node %d: %d dials in %d s", i, n, seconds)
			}
		}
	})
}

// mostForget has all nodes but the first lose their data, and c notice it.
func (r *rig) mostForget(c *client) {
	for _, m := range r.mem[1:] {
		m.Mini.FlushAll()
	}
	for range 2 {
		c.tryAndRelease(key, ttl)
	}
	time.Sleep(5 * time.Second) // the bubble's time
}

// All nodes that lose all their data, together or one after the other, are no new deployment to a client that
// knew them, and it says so to one that did not.
func TestNodesThatAllForgetAreKnown(t *testing.T) {
	t.Parallel()
	const ttl = time.Minute
	flush := func(t *testing.T, s *redistest.Server) { s.Do(t, "FLUSHALL") }
	for _, way := range []struct {
		name   string
		first  int // so many lose their data before the others do
		forget func(*testing.T, *redistest.Server)
	}{{"together", 3, flush}, {"one by one", 2, flush}, {"with old data first", 2, restartWithOldData}} {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			servers, conns := threeServers(t)
			c := newPatientClient(t, "c", conns, patience)
			c.guard(10 * time.Minute)
			c.tryAndRelease(key, ttl)
			for _, s := range servers[:way.first] {
				way.forget(t, s)
			}
			redistest.Eventually(t, patience, "the losses are noticed", func() bool {
				if c.tryAndRelease(key, ttl); way.first == 3 && !c.q.Quarantined(2) {
					return false
				}
				return c.q.Quarantined(0) && c.q.Quarantined(1)
			})
			for _, s := range servers[way.first:] {
				s.Do(t, "FLUSHALL")
			}
			late := newPatientClient(t, "late", conns, patience)
			late.guard(10 * time.Minute)
			for range 2 {
				for _, c := range []*client{late, c} {
					if _, _, f := c.try(key, ttl, 1); f == nil {
						t.Error("it is taken for a new deployment")
					}
				}
			}
		})
	}
}

// A client that holds locks, and only refreshes them, notices that all nodes lost their data, and says so.
func TestARefreshNoticesThatAllNodesForgot(t *testing.T) {
	t.Parallel()
	const ttl = time.Minute
	servers, conns := threeServers(t)
	c := newPatientClient(t, "c", conns, patience)
	c.guard(10 * time.Minute)
	a, _ := c.must("a", ttl, 1)
	b, _ := c.must("b", ttl, 1)
	for _, s := range servers {
		s.Do(t, "FLUSHALL")
	}
	if _, f := c.refresh(a, ttl, 1); f == nil || f.Reason != NotHeld {
		t.Fatalf("a refresh of what is gone: %v", describe(f))
	}
	redistest.Eventually(t, patience, "all nodes are in quarantine", func() bool {
		return c.q.Quarantined(0) && c.q.Quarantined(1) && c.q.Quarantined(2)
	})
	late := newPatientClient(t, "late", conns, patience)
	late.guard(10 * time.Minute)
	if _, _, f := late.try("b", ttl, 1); f == nil {
		t.Errorf("another client has b, which is valid until %v", b.until)
	}
}

// restartWithOldData makes s look like a process that has read the marker from a file. Connections end, as
// with a process: who sends scripts as texts compares it with what INFO says, which is the same here.
func restartWithOldData(t *testing.T, s *redistest.Server) {
	t.Helper()
	past := strings.Fields(s.Do(t, "GET", lua.Past).(string))
	past[3] = strings.Repeat("0", 40) // the run_id
	s.Do(t, "SET", lua.Past, strings.Join(past, " "))
	s.Do(t, "SCRIPT", "FLUSH")
	s.Do(t, "CLIENT", "KILL", "TYPE", "normal")
}

// While a node says that scripts may not access keys of two hash slots, every vote counts, also that of a
// node that has lost its data. It is asked again, and then nodes that lost data have no vote: the one and the
// others. No other answer turns the quarantine off.
func TestTheQuarantineIsOffWhileANodeRefusesTwoSlots(t *testing.T) {
	t.Parallel()
	inBubble(t, 3, func(t *testing.T, r *rig) {
		var says atomic.Pointer[string]
		answer := func(text string) { says.Store(&text) }
		answer("")
		r.mem[0].Mini.Server().SetPreHook(func(c *server.Peer, cmd string, args ...string) bool {
			if text := *says.Load(); text != "" && strings.EqualFold(cmd, "EVALSHA") && args[0] == lua.Slots.SHA {
				c.WriteBulk(text)
				return true
			}
			return redistest.AnswerInfo(c, cmd, args...)
		})
		c := r.client("x")
		c.guard(time.Minute)
		var reports []bool
		c.q.OnApart = func(i int, why error) { reports = append(reports, i == 0 && why != nil) }
		wantVotes := func(when string, counts bool) {
			t.Helper()
			for i := 1; i < 3; i++ { // it takes one of them
				r.mem[i].Mini.FlushAll()
			}
			l, _, f := c.try(key, ttl, 1)
			if counts != (f == nil) {
				t.Fatalf("%s: %s", when, describe(f))
			}
			if f == nil {
				c.release(l)
			}
		}
		warm := func() {
			l, _ := c.must(key, time.Minute, 1)
			c.release(l)
		}
		warm()
		finds := func(text string) {
			answer(text)
			time.Sleep(2 * time.Minute) // all votes count again, whatever was found
			r.mem[0].Cut()              // so that it is asked
			c.tryAndRelease(key, time.Minute)
			r.settle()
		}
		for _, another := range []string{
			"NOPERM this user has no permissions to access one of the keys used as arguments",
			"ERR script tried accessing undeclared key, key: flightlock:{boot}",
		} {
			finds(another)
			time.Sleep(2 * time.Minute)
			warm()
			wantVotes(another, false)
		}
		finds("ERR Script attempted to access keys that do not hash to the same slot")
		wantVotes("refused", true)
		if c.q.Nodes[0].Apart() == nil || c.q.Quarantined(1) || c.q.Quarantined(2) {
			t.Errorf("%v, %v, %v", c.q.Nodes[0].Apart(), c.q.Quarantined(1), c.q.Quarantined(2))
		}
		answer("")
		time.Sleep(recheckApart + time.Second)
		r.settle()
		if err := c.q.Nodes[0].Apart(); err != nil {
			t.Errorf("asked again: %v", err)
		}
		time.Sleep(2 * time.Minute)
		warm()
		wantVotes("not refused any more", false)
		if len(reports) != 2 || !reports[0] || reports[1] {
			t.Errorf("reports: %v", reports)
		}
		var q *Quarantined
		if err := c.q.quarantinedUntil(1); !errors.As(err, &q) {
			t.Errorf("node 1: %v", err)
		}
	})
}

// confirmsAfterARestart fails the test if a lock is lost that was refreshed all the time, and returns an
// error if it was not.
func confirmsAfterARestart(t *testing.T) error {
	const ttl = 4 * time.Second
	servers, conns := threeServers(t, "--appendonly", "yes", "--appendfsync", "always")
	c := newPatientClient(t, "c", conns, patience)
	c.guard(time.Minute)
	first, _ := c.must("lock:other", time.Minute, 1)
	c.release(first)
	lease, _ := c.must(key, ttl, 1)
	last := time.Now()
	refresh := func() error {
		_, f := c.refresh(lease, ttl, 0)
		slow := time.Since(last) > ttl/2
		last = time.Now()
		switch {
		case slow:
			return errors.New("a refresh was late")
		case f != nil && f.Reason == NotHeld:
			t.Fatalf("a lock is lost that a majority has: %s", describe(f))
		}
		return nil
	}
	for _, s := range servers {
		if s.Do(t, "GET", key) != lease.Owner() { // two have decided
			return errors.New("a node was late")
		}
	}

	if err := servers[0].Restart(); err != nil {
		t.Fatal(err)
	}
	for c.nodes[0].Epoch().State != node.EpochLost { // until c knows
		c.tryAndRelease("lock:other", ttl) // by the others
		if err := refresh(); err != nil {
			return err
		}
	}
	if err := servers[1].Kill(); err != nil {
		t.Fatal(err)
	}
	for until := time.Now().Add(2 * ttl); time.Now().Before(until); time.Sleep(ttl / 8) {
		if err := refresh(); err != nil {
			return err
		}
	}
	c.release(lease)
	return nil
}
