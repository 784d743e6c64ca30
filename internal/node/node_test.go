package node

import (
	"context"
	"errors"
	"math"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// countingHook counts exchanges in which scripts are called.
type countingHook struct{ batches atomic.Int64 }

func (h *countingHook) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *countingHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.count(cmd)
		return next(ctx, cmd)
	}
}

func (h *countingHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		h.count(cmds[0])
		return next(ctx, cmds)
	}
}

func (h *countingHook) count(first redis.Cmder) {
	if first.Name() == "evalsha" {
		h.batches.Add(1)
	}
}

// Requests that arrive while a batch is in flight form the next one.
func TestConcurrentCallersShareBatches(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	p := redistest.StartProxy(t, s.Addr())
	n := newNode(t, s.Client(t, at(p.Addr())))
	hook := &countingHook{}
	for i := range n.servers[0].lanes {
		n.servers[0].lanes[i].client.AddHook(hook)
	}
	newAttempt(t, n, "warm").acquire().want(t, Granted) // loads the scripts
	p.SetDelay(20 * time.Millisecond)
	batches, requests := hook.batches.Load(), n.Commands()

	const callers = 1000
	ears := make([]*ear, callers)
	var wg sync.WaitGroup
	for i := range ears {
		wg.Go(func() { ears[i] = newAttempt(t, n, strings.Repeat("k", i+1)).acquire() })
	}
	wg.Wait()
	for _, e := range ears {
		e.want(t, Granted)
	}
	batches, requests = hook.batches.Load()-batches, n.Commands()-requests
	if requests != callers || batches > 50 {
		t.Errorf("%d requests in %d batches", requests, batches)
	}
}

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

// Requests that were answered before their pipeline's connection was cut are answered.
func TestRepliesBeforeACutCount(t *testing.T) {
	t.Parallel()
	keys := sameLane(11)
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
	n.servers[0].noBatchUntil.Store(math.MaxInt64)
	var as []*attempt
	var ears []*ear
	for _, key := range keys {
		a := newAttempt(t, n, key)
		as, ears = append(as, a), append(ears, a.acquire())
		if len(as) == 1 { // alone in the first batch; the others collect
			redistest.Eventually(t, patience, "the first command has come", func() bool { return evals.Load() == 1 })
		}
	}
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
		if got := s.CommandCalls(t)["script|load"] - before; got != int64(len(lua.All)) {
			t.Errorf("script|load was called %d times, for %d scripts", got, len(lua.All))
		}
	}
	round()
	s.Do(t, "SCRIPT", "FLUSH")
	round()
	if err := s.Restart(); err != nil {
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
			if !loaded { // the caller gives up while the scripts are loaded
				loaded = true
				released = a.release()
			}
			return "$1\r\nx\r\n"
		case ends(cmd):
			held = false
			return ":0\r\n"
		case !loaded:
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
	defer mu.Unlock()
	released.want(t, Missing)
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

// Release takes an acquire that still waits out of the queue: it is never written.
func TestReleaseDropsAnAcquireThatWasNotWritten(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	keys := sameLane(2)
	warm := newAttempt(t, n, keys[0])
	warm.acquire().want(t, Granted)
	warm.release().want(t, Deleted)
	_ = s.Stop()
	commands := n.Commands()
	blocker := newAttempt(t, n, keys[0])
	first := blocker.acquire()
	redistest.Eventually(t, patience, "the first one is written", func() bool { return n.Commands() == commands+1 })

	a := newAttempt(t, n, keys[1])
	dropped := a.acquire()
	a.release().wantNow(t, Missing)
	_ = s.Cont()
	first.want(t, Granted)
	blocker.release().want(t, Deleted)
	if got := n.Commands() - commands; got != 2 {
		t.Errorf("%d commands were written, want 2", got)
	}
	if dropped.n.Load() != 0 {
		t.Error("a dropped acquire was answered")
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
	keys := sameLane(2)
	first := newAttempt(t, n, keys[0]).acquire()
	redistest.Eventually(t, patience, "the first one is written", func() bool { return len(f.Commands()) == 1 })
	a := newAttempt(t, n, keys[1])
	late := newEar()
	a.Entry.t.begin(time.Now().Add(-longTTL))
	a.Acquire(&a.buf, late, longTTL, 1, 0, false)
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
	if _, err := New(ring, time.Second, false); err == nil {
		t.Error("a Ring became a node")
	}
}

// blocked is a node of a fake server that answers nothing until the gate opens, with one
// acquire written to it.
func blocked(t *testing.T) (n *Node, f *redistest.Fake, gate chan struct{}, first *attempt, heard *ear) {
	gate = make(chan struct{})
	f = redistest.StartFake(t, func([]string) string { <-gate; return ":1\r\n" })
	n = newNode(t, f.Client(t))
	first = newAttempt(t, n, sameLane(1)[0])
	heard = first.acquire()
	redistest.Eventually(t, patience, "the first command is written", func() bool { return len(f.Commands()) == 1 })
	return n, f, gate, first, heard
}

// Close fails what was not written yet, and still tries releases once.
func TestCloseFailsWhatWaitsAndTriesReleases(t *testing.T) {
	n, f, gate, first, heard := blocked(t)
	released := first.release()
	a := newAttempt(t, n, sameLane(2)[1])
	waiting := a.acquire()
	refresh := a.refresh()

	ctx, cancel := context.WithCancel(t.Context())
	closed := make(chan error)
	go func() { closed <- n.Close(ctx) }()
	redistest.Eventually(t, patience, "the node is closing", n.closing.Load)
	close(gate)
	if err := <-closed; err != nil {
		t.Error(err)
	}
	cancel()
	heard.wantNow(t, Granted)
	released.wantNow(t, Deleted)
	for _, e := range []*ear{waiting, refresh} {
		if rep := e.wantNow(t, Failed); !errors.Is(rep.Err, ErrClosed) {
			t.Error(rep.Err)
		}
	}
	if got := f.Commands(); len(got) != 2 {
		t.Errorf("commands: %v", got)
	}
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

// Close returns with its ctx although the server is stalled. The goroutines end soon: one batch is
// tried, however many requests wait.
func TestCloseOfAStalledNodeReturnsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := startNode(t, m.Client(t), conn.TransportTimeout, false)
		keys := sameLane(2)
		held := make([]*attempt, 3*maxBatch)
		for i := range held {
			held[i] = newAttempt(t, n, keys[1]+string(rune(i)))
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
		if d := time.Since(begin); d > closeTimeout*5/4 {
			t.Errorf("the goroutines ended after %v", d)
		}
		for _, e := range ears {
			e.wantNow(t, Failed)
		}
		m.Stall(false)
	})
}
