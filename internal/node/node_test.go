package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A request whose reply was cut off is not repeated by the transport, even if the caller's client
// would do so, and that client's options stay as they were.
func TestRequestsAreNeverReplayed(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	p := redistest.StartProxy(t, s.Addr())
	c := s.Client(t, at(p.Addr()), func(o *redis.Options) { o.MaxRetries, o.ReadTimeout = 5, 7*time.Second })
	n := newNode(t, c)
	warm := newAttempt(t, n, "k")
	warm.acquire().want(t, Granted)
	warm.release().want(t, Deleted)

	settle()
	before := s.CommandCalls(t)["evalsha"]
	p.CutReplies(0)
	a := newAttempt(t, n, "k")
	a.acquire().want(t, Failed)
	if got := s.CommandCalls(t)["evalsha"] - before; got != 1 {
		t.Errorf("evalsha was called %d times", got)
	}
	if n.LastErr() == nil {
		t.Error("LastErr does not tell")
	}
	a.release().want(t, Deleted)
	if n.LastErr() != nil {
		t.Error(n.LastErr())
	}
	if o := c.Options(); o.MaxRetries != 5 || o.ReadTimeout != 7*time.Second || o.ContextTimeoutEnabled {
		t.Errorf("the caller's options changed: %+v", o)
	}
}

// Requests that were answered before their connection was cut are answered.
func TestRepliesBeforeACutCount(t *testing.T) {
	t.Parallel()
	gate := make(chan struct{})
	var evals atomic.Int32
	f := redistest.StartFake(t, func(cmd []string) string {
		if ends(cmd) {
			return ":1\r\n"
		}
		switch n := evals.Add(1); {
		case n == 1:
			<-gate
			return ":1\r\n"
		case n < 7:
			return ":5\r\n"
		default:
			return "*2\r\n$5\r\not" + redistest.Hangup
		}
	})
	n := newNode(t, f.Client(t))
	var as []*attempt
	var ears []*ear
	for i := range 11 {
		a := newAttempt(t, n, fmt.Sprint("k", i))
		as, ears = append(as, a), append(ears, a.acquire())
	}
	redistest.Eventually(t, patience, "all are written", func() bool { return n.Commands() == 11 })
	close(gate)
	for i, e := range ears {
		want := Granted
		if i >= 6 {
			want = Failed
		}
		e.want(t, want)
	}
	for i, a := range as {
		if want := i >= 6; a.indeterminate > 0 != want {
			t.Errorf("request %d: %d indeterminate", i, a.indeterminate)
		}
	}
}

// A server that does not have the scripts gets them inside the attempt, once for all callers.
func TestMissingScriptsAreLoadedOnce(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	round := func() {
		t.Helper()
		before := s.CommandCalls(t)["script|load"]
		var wg sync.WaitGroup
		for i := range 300 {
			wg.Go(func() {
				a := newAttempt(t, n, strings.Repeat("k", i+1))
				e := a.acquire()
				if rep := <-e.heard; rep.Kind != Granted {
					t.Errorf("acquire: %v", rep)
				}
				if rep := <-a.release().heard; rep.Kind != Deleted {
					t.Errorf("release: %v", rep)
				}
			})
		}
		wg.Wait()
		if got := s.CommandCalls(t)["script|load"] - before; got != 4 { // not release
			t.Errorf("script|load was called %d times, for four scripts", got)
		}
	}
	round()
	s.Do(t, "SCRIPT", "FLUSH")
	round()
	if err := s.Restart(); err != nil { // which is found out before anything is written to the connection
		t.Fatal(err)
	}
	round()
}

// A server may have the script of release and not that of acquire. Then the release is answered
// before the acquire is repeated; the acquire must not be written any more.
func TestAHealedAcquireDoesNotComeAfterItsRelease(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	held, loaded := false, false
	var a *attempt
	var released *ear
	f := redistest.StartFake(t, func(cmd []string) string {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case strings.EqualFold(cmd[0], "script"):
			loaded = true
			return "$1\r\nx\r\n"
		case ends(cmd):
			held = false
			return ":0\r\n"
		case !loaded: // the caller gives up just then
			released = a.release()
			return "-NOSCRIPT No matching script. Please use EVAL.\r\n"
		}
		held = true
		return ":1\r\n"
	})
	n := newNode(t, f.Client(t))
	mu.Lock()
	a = newAttempt(t, n, "k")
	asked := a.acquire()
	mu.Unlock()
	if rep := asked.want(t, Failed); !errors.Is(rep.Err, ErrExpired) {
		t.Error(rep.Err)
	}
	mu.Lock()
	undone := released
	mu.Unlock()
	undone.want(t, Missing)
	mu.Lock()
	defer mu.Unlock()
	if held {
		t.Error("the acquire was written after all")
	}
}

// Per key, a release is sent after the acquire that it undoes, however busy the node is.
func TestReleaseComesAfterItsAcquire(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	var wg sync.WaitGroup
	for g := range 50 {
		wg.Go(func() {
			for range 40 {
				a := newAttempt(t, n, strings.Repeat("k", g+1))
				a.acquire()
				if rep := <-a.release().heard; rep.Kind == Failed || rep.Kind == Held {
					t.Errorf("release: %v", rep)
				}
			}
		})
	}
	wg.Wait()
	if keys := lockKeys(t, s); len(keys) > 0 {
		t.Errorf("left behind: %q", keys)
	}
	wantDebts(t, n, 0)
}

// An acquire that waits for the connection, and is released meanwhile, is never written.
func TestReleaseDropsAnAcquireThatWasNotWritten(t *testing.T) {
	t.Parallel()
	f := redistest.StartFake(t, func(cmd []string) string {
		if ends(cmd) {
			return ":0\r\n"
		}
		return ":1\r\n"
	})
	gate := make(chan struct{})
	n := newNode(t, f.Client(t, dialsWhenOpen(gate)))
	a := newAttempt(t, n, "k")
	dropped := a.acquire()
	released := a.release()
	close(gate)
	if rep := dropped.want(t, Failed); !errors.Is(rep.Err, ErrExpired) {
		t.Error(rep.Err)
	}
	released.want(t, Missing)
	wantDebts(t, n, 0)
	for _, cmd := range f.Commands() {
		if !ends(cmd) {
			t.Errorf("%v was sent", cmd)
		}
	}
}

// dialsWhenOpen has dials wait for the gate.
func dialsWhenOpen(gate <-chan struct{}) func(*redis.Options) {
	return func(o *redis.Options) {
		dial := o.Dialer
		if dial == nil {
			dial = (&net.Dialer{}).DialContext
		}
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			select {
			case <-gate:
				return dial(ctx, network, addr)
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
}

// After Release nothing creates the key again, and a second Release has nothing to do.
func TestNothingFollowsARelease(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	a := newAttempt(t, n, "k")
	a.acquire().want(t, Granted)
	a.release().want(t, Deleted)
	if rep := a.acquire().wantNow(t, Failed); !errors.Is(rep.Err, ErrExpired) {
		t.Error(rep.Err)
	}
	a.Repair(longTTL, 5, soon())
	a.refresh().wantNow(t, Failed)
	a.release().wantNow(t, Missing)
	if keys := lockKeys(t, s); len(keys) > 0 {
		t.Errorf("left behind: %q", keys)
	}
}

// A repair restores the key, and Release removes it like any other.
func TestARepairIsUndoneByRelease(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	a := newAttempt(t, n, "k")
	a.acquire().want(t, Granted)
	s.Do(t, "FLUSHALL")
	a.refresh().want(t, Missing)
	a.Repair(longTTL, 1<<52, soon())
	redistest.Eventually(t, patience, "the key is back", func() bool { return exists(t, s, "k") })
	if rep := a.refresh().want(t, Renewed); rep.Counter != 1<<52 {
		t.Errorf("counter %d", rep.Counter)
	}
	a.release().want(t, Deleted)
}

// An acquire of an attempt that has begun elsewhere, and is over before its turn comes here, is
// never written.
func TestAfterItsDeadlineARequestIsNotWritten(t *testing.T) {
	t.Parallel()
	gate := make(chan struct{})
	f := redistest.StartFake(t, func([]string) string { <-gate; return ":1\r\n" })
	n := newNode(t, f.Client(t))
	first := newAttempt(t, n, "k1").acquire()
	redistest.Eventually(t, patience, "the first one is written", func() bool { return len(f.Commands()) == 1 })
	a := newAttempt(t, n, "k2")
	late := newEar()
	a.Entry.t.begin(time.Now().Add(-longTTL))
	a.Acquire(&a.buf, late, longTTL, 1, false)
	close(gate)
	first.want(t, Granted)
	if rep := late.want(t, Failed); !errors.Is(rep.Err, ErrExpired) {
		t.Error(rep.Err)
	}
	a.release().wantNow(t, Missing)
	if got := f.Commands(); len(got) != 1 {
		t.Errorf("commands: %v", got)
	}
}

// A server that refuses connections received nothing, so nothing is owed to it.
func TestARefusedConnectionLeavesNothing(t *testing.T) {
	t.Parallel()
	c := redis.NewClient(&redis.Options{Addr: redistest.RefusedAddr(t), DialerRetries: 1})
	defer c.Close()
	n := newNode(t, c)
	a := newAttempt(t, n, "k")
	rep := a.acquire().want(t, Failed)
	var op *net.OpError
	if !errors.As(rep.Err, &op) || n.LastErr() == nil {
		t.Errorf("error %v, last %v", rep.Err, n.LastErr())
	}
	a.release().wantNow(t, Missing)
	wantDebts(t, n, 0)
}

// Neither did one that accepts and then does not even take part in the handshake. The attempt is
// over in bounded time.
func TestABlackHoleLeavesNothing(t *testing.T) {
	t.Parallel()
	c := redis.NewClient(&redis.Options{Addr: redistest.BlackHole(t)})
	defer c.Close()
	n := newImpatientNode(t, c)
	a := newAttempt(t, n, "k")
	a.acquire().want(t, Failed) // which waits for patience, and not forever
	a.release().wantNow(t, Missing)
	wantDebts(t, n, 0)
}

// The same server through two clients is detected; two servers are not mistaken for one.
func TestSameServer(t *testing.T) {
	t.Parallel()
	one, two := redistest.StartServer(t), redistest.StartServer(t)
	for _, c := range []struct {
		a, b *redistest.Server
		want bool
	}{{one, one, true}, {one, two, false}} {
		got, err := SameServer(t.Context(), c.a.Client(t), c.b.Client(t), "nonce")
		if err != nil || got != c.want {
			t.Errorf("same %v, %v", got, err)
		}
	}
	if keys := one.Keys(t); len(keys) > 0 {
		t.Errorf("left behind: %q", keys)
	}
	gone := redis.NewClient(&redis.Options{Addr: redistest.RefusedAddr(t), DialerRetries: 1, MaxRetries: -1})
	defer gone.Close()
	if _, err := SameServer(t.Context(), one.Client(t), gone, "nonce"); err == nil {
		t.Error("no error of a server that is not there")
	}
}

// A Ring shards by itself and cannot be a node.
func TestOnlyServersAndClustersAreNodes(t *testing.T) {
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	defer ring.Close()
	if _, err := New(ring, time.Second, true); err == nil {
		t.Error("a Ring became a node")
	}
}

// Close fails what was not written yet, and still tries releases once.
func TestCloseFailsWhatWaitsAndTriesReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		gate := make(chan struct{}, 10)
		gate <- struct{}{}
		n := newNode(t, m.Client(t, dialsWhenOpen(gate)))
		for range 2 { // the first one has the scripts loaded
			a := newAttempt(t, n, "k1")
			a.acquire().want(t, Granted)
			a.release().want(t, Deleted)
		}
		first := newAttempt(t, n, "k1")
		first.acquire().want(t, Granted)
		settle()
		m.Cut()
		synctest.Wait()
		released := first.release()
		a := newAttempt(t, n, "k2")
		waiting, refresh := a.acquire(), a.refresh()

		commands := n.Commands()
		closed := make(chan error)
		go func() { closed <- n.Close(t.Context()) }()
		synctest.Wait()
		close(gate)
		if err := <-closed; err != nil {
			t.Error(err)
		}
		released.wantNow(t, Deleted)
		for _, e := range []*ear{waiting, refresh} {
			if rep := e.wantNow(t, Failed); !errors.Is(rep.Err, ErrClosed) {
				t.Error(rep.Err)
			}
		}
		if got := n.Commands() - commands; got != 1 || m.Mini.Exists("k1") || m.Mini.Exists("k2") {
			t.Errorf("%d commands were written, or a key is left", got)
		}
	})
}

// After Close everything fails at once, and nothing is owed.
func TestAClosedNodeRefusesAtOnce(t *testing.T) {
	t.Parallel()
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

// Close returns with its ctx although the server is stalled, however many requests wait, and leaves no
// goroutine.
func TestCloseOfAStalledNodeReturnsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := startNode(t, m.Client(t), conn.TransportTimeout)
		held := make([]*attempt, 1000)
		for i := range held {
			held[i] = newAttempt(t, n, fmt.Sprint("k", i))
			held[i].acquire().want(t, Granted)
		}
		m.Stall(true)
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
		if d := time.Since(begin); d > 50*time.Millisecond {
			t.Errorf("Close took %v", d)
		}
		if err := n.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if d := time.Since(begin); d > n.closeTime() {
			t.Errorf("the goroutines ended after %v", d)
		}
		synctest.Wait() // for the first Close
		for _, e := range ears {
			e.wantNow(t, Failed)
		}
		m.Stall(false)
	})
}

// A refresh and a release of locks that somebody has go before acquires that wait to be written.
func TestWhatIsHeldGoesFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := newNode(t, m.Client(t))
		kept, ended := newAttempt(t, n, "kept"), newAttempt(t, n, "ended")
		kept.acquire().want(t, Granted)
		ended.acquire().want(t, Granted)
		m.Stall(true)
		answered := make(asAnswered, 300)
		for i := range 200 { // more than are written at once
			a := newAttempt(t, n, fmt.Sprint("other-", i))
			a.Acquire(&a.buf, answered.as("acquire"), longTTL, 1, false)
		}
		kept.Refresh(answered.as("refresh"), longTTL, 1, 0, soon(), "")
		ended.Release(&ended.buf, answered.as("release"), false, &TurnPass{})
		m.Stall(false)
		last := ""
		for range 202 {
			last = <-answered
		}
		if last != "acquire" {
			t.Errorf("the last that was answered: %s", last)
		}
	})
}

// asAnswered receives the names of what is answered.
type asAnswered chan string

func (o asAnswered) as(name string) Sink { return namedSink{o, name} }

type namedSink struct {
	order asAnswered
	name  string
}

func (s namedSink) Answer(int, Reply) { s.order <- s.name }

// What is about a lock that somebody has goes before what waits to be written, but not before the acquire of
// its own.
func TestARefreshStaysBehindItsAcquire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := newNode(t, m.Client(t))
		newAttempt(t, n, "warm").acquire().want(t, Granted)
		m.Stall(true)
		for i := range 200 { // more than are written at once
			newAttempt(t, n, fmt.Sprint("other-", i)).acquire()
		}
		a := newAttempt(t, n, "k")
		acquired, refreshed := a.acquire(), a.refresh()
		m.Stall(false)
		acquired.want(t, Granted)
		refreshed.want(t, Renewed)
	})
}

// The release of a lease that others have granted stays behind the acquires of its contender that were not
// written yet: these would give it a place among those who wait after it has left.
func TestAContenderLeavesBehindItsAcquires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := newNode(t, m.Client(t))
		newAttempt(t, n, "warm").acquire().want(t, Granted)
		const contender = "label#client-1"
		granted, polls := &attempt{t: t}, &attempt{t: t}
		offered, polled := &Target{}, &Target{}
		offered.Init("k", "offer", contender)
		offered.Carry(&Offer{Target: offered, Tokens: 1}, 1, time.Minute, false)
		granted.Init(n, offered, 0)
		if err := m.Mini.Set("k", "offer"); err != nil {
			t.Fatal(err)
		}
		granted.Granted(time.Minute)
		polled.Init("k", "poll", contender)
		polls.Init(n, polled, 0)
		m.Stall(true)
		for i := range 200 { // more than are written at once
			newAttempt(t, n, fmt.Sprint("other-", i)).acquire()
		}
		polls.acquire()
		polls.Release(&polls.buf, nil, false, nil)
		granted.Release(&granted.buf, nil, false, &TurnPass{Contender: contender})
		m.Stall(false)
		time.Sleep(time.Second)
		for _, key := range m.Mini.Keys() {
			if strings.HasSuffix(key, wantsPart+"k") {
				t.Errorf("%s is left", key)
			}
		}
	})
}

// A server that is far away, and not slow, is sent as many requests as it has time for: that an answer takes
// more than a quarter of NodeTimeout is then not due to what it was sent.
func TestAFarServerIsNotTakenForASlowOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		m.SetDelay(10 * time.Millisecond) // each way
		n := startNode(t, m.Client(t), 50*time.Millisecond)
		newAttempt(t, n, "warm").acquire().want(t, Granted)
		for i := range 4000 {
			newAttempt(t, n, fmt.Sprint("key-", i)).acquire()
		}
		time.Sleep(time.Second)
		if got := n.Commands(); got < 4000 {
			t.Errorf("%d requests in a second", got)
		}
	})
}
