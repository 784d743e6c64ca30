package quorum

import (
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// Node 0 grants b's offer, b's key expires there, and a's attempt gets the node's vote. Then the node is set back to
// before the grant (an append-only file that lacks the last second, or a replica that lagged): it has b's offer again,
// and the release of somebody else grants it a second time. b's client knows nothing of that. b's lease must not last
// by this node's word while a's attempt is under way.
func TestAnOfferIsNotGrantedByANodeThatWasSetBack(t *testing.T) {
	t.Parallel()
	const long, patience = 7 * time.Second, 20 * time.Second
	var servers []*redistest.Server
	conns, proxies := map[string][]redis.UniversalClient{}, map[string][]*redistest.Proxy{}
	for range 3 {
		s := redistest.StartServer(t, "--appendonly", "yes", "--appendfsync", "always")
		servers = append(servers, s)
		for _, name := range []string{"a", "b", "c", "x"} {
			p := redistest.StartProxy(t, s.Addr())
			conns[name] = append(conns[name], s.Client(t, func(o *redis.Options) { o.Addr = p.Addr() }))
			proxies[name] = append(proxies[name], p)
		}
	}
	client := func(name string) *client {
		c := newPatientClient(t, name, conns[name], patience)
		c.guard(time.Minute)
		c.nodeTimeout(patience)
		l, _ := c.must("lock:other", time.Minute, 1)
		c.release(l)
		return c
	}
	a, b, c, x := client("a"), client("b"), client("c"), client("x")
	has := func(i int, owner string) func() bool {
		return func() bool { return servers[i].Do(t, "GET", key) == owner }
	}
	free := func(i int) func() bool { return func() bool { return servers[i].Do(t, "EXISTS", key) == int64(0) } }
	listens := func(i int) func() bool {
		return func() bool { return len(servers[i].Do(t, "PUBSUB", "CHANNELS", "flightlock:inbox:*").([]any)) > 0 }
	}

	// x holds the key, and b waits for it with an offer.
	first := new(Lease)
	x.q.Prepare(first, key, 2*time.Second, 1, Self)
	acquire := x.newCall("acquire", first)
	first.Acquire(false, acquire)
	if _, f := acquire.wait(); f != nil {
		t.Fatal(describe(f))
	}
	t.Cleanup(b.q.Watch(key, "b-77", func(Event, string) {}))
	for i := range servers {
		redistest.Eventually(t, patience, "x has the key everywhere", has(i, first.Owner()))
		redistest.Eventually(t, patience, "b is subscribed", listens(i))
	}
	offer := b.newCall("offer", new(Lease))
	b.q.Offer(offer.l, key, long, 1, "b-77", offer)
	poll := new(Lease)
	b.q.Prepare(poll, key, long, 1, "b-77")
	poll.Carry(offer.l, time.Second, true)
	asked := b.newCall("acquire", poll)
	poll.Acquire(false, asked)
	if _, f := asked.wait(); f == nil {
		t.Fatal("won")
	}
	redistest.Eventually(t, patience, "node 0 has b's offer", func() bool {
		return servers[0].Do(t, "EXISTS", "flightlock:{offer}:b-77") == int64(1)
	})
	saved, err := servers[0].SaveAppendOnly()
	if err != nil {
		t.Fatal(err)
	}

	// x's release grants b's offer on nodes 0 and 1. However far apart their messages are on a busy machine, b waits for
	// both: if it asked node 1, that would look like a second name of node 0.
	b.q.rtt.Store(int64(patience))
	servers[2].Do(t, "SET", key, "other", "PX", 60000)
	x.release(first)
	if _, f := offer.wait(); f != nil {
		t.Fatal(describe(f))
	}
	lease := offer.l
	servers[2].Do(t, "DEL", key)
	if _, f := b.refresh(lease, long, 0); f != nil {
		t.Fatal(describe(f))
	}
	redistest.Eventually(t, patience, "node 2 has b's key", has(2, lease.Owner()))
	redistest.Eventually(t, patience, "node 0 has refreshed it", func() bool {
		return servers[0].Do(t, "PTTL", key).(int64) > time.Second.Milliseconds()
	})
	servers[0].Do(t, "DEL", key) // as if the refresh had not come there, and the grant had ended
	proxies["a"][1].HoldRequests()
	attempt := a.begin(key, time.Minute, 1)
	redistest.Eventually(t, patience, "node 0 has granted it to a", has(0, attempt.l.Owner()))

	if err := servers[0].RestartFrom(saved); err != nil {
		t.Fatal(err)
	}
	redistest.Eventually(t, patience, "x's key is gone from node 0", free(0))
	redistest.Eventually(t, patience, "b is subscribed again", listens(0))
	redistest.Eventually(t, patience, "b may ask node 0 again", func() bool { return !b.nodes[0].Server().Suspended() })
	known := b.nodes[0].Epoch()

	// c gets that node's vote, gives up, and passes the key on.
	proxies["c"][1].HoldRequests()
	proxies["c"][2].HoldRequests()
	other := new(Lease)
	c.q.Prepare(other, key, time.Minute, 1, "c-9")
	given := c.newCall("acquire", other)
	other.Acquire(false, given)
	redistest.Eventually(t, patience, "node 0 has granted it to c", has(0, other.Owner()))
	other.Cancel()
	given.wait()
	redistest.Eventually(t, patience, "c's key is gone from node 0", func() bool { return !has(0, other.Owner())() })
	proxies["c"][1].ReleaseRequests()
	proxies["c"][2].ReleaseRequests()

	if e := b.nodes[0].Epoch(); e != known {
		t.Fatalf("b knows of epoch %+v", e)
	}
	proxies["b"][1].HoldRequests()
	if has(0, lease.Owner())() { // else it has no answer but node 2's
		if _, f := b.refresh(lease, long, 0); f == nil {
			t.Error("the node that was set back has confirmed a refresh")
		}
	}
	redistest.Eventually(t, patience, "b's key is gone from node 1", free(1))
	proxies["a"][1].ReleaseRequests()
	g, f := attempt.wait()
	lease.mu.Lock()
	if now := time.Now(); f == nil && lease.phase == held && now.Before(lease.until) {
		t.Errorf("a holds the key until %v, and b does until %v", g.Until, lease.until)
	}
	lease.mu.Unlock()
	proxies["b"][1].ReleaseRequests()
	b.release(lease)
	if f == nil {
		a.release(attempt.l)
	}
}
