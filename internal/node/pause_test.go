package node

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// A queue that is full of acquires accepts refreshes of held locks: there are no more of these than
// held locks.
func TestAFullQueueTakesRefreshes(t *testing.T) {
	q := &queue{n: maxQueued}
	q.init()
	e := &Entry{}
	if err := q.push(&request{e: e, op: opAcquire}); !errors.Is(err, ErrBusy) {
		t.Errorf("an acquire: %v", err)
	}
	if err := q.push(&request{e: e, op: opRefresh}); err != nil {
		t.Errorf("a refresh: %v", err)
	}
}

// secondDial is a way to a server on which the second dial takes longer than the third.
type secondDial struct {
	dials   atomic.Int64
	dialled chan net.Conn // each connection
}

func (d *secondDial) takes(long time.Duration) func(*redis.Options) {
	d.dialled = make(chan net.Conn, 10)
	return func(o *redis.Options) {
		dial := o.Dialer
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if d.dials.Add(1) == 2 {
				time.Sleep(long) // the bubble's time
			}
			conn, err := dial(ctx, network, addr)
			d.dialled <- conn
			return conn, err
		}
	}
}

// lane is that of a's key on the only server.
func (a *attempt) lane() *lane {
	lanes := a.Entry.n.servers[0].lanes
	return &lanes[int(a.Entry.t.lane)%len(lanes)]
}

// untilItRests waits until l has nothing to do.
func untilItRests(t *testing.T, l *lane) {
	t.Helper()
	redistest.Eventually(t, patience, "the lane rests", l.claim)
	l.rest()
}

// A lane's connection is the one that it uses, even if another dial of it ends later.
func TestALaneKnowsTheConnectionThatItUses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		var second secondDial
		fifo := func(o *redis.Options) { o.PoolFIFO = true }
		n := newAlone(t, m.Client(t, fifo, second.takes(600*time.Millisecond)), 100*time.Millisecond)
		a := newAttempt(t, n, "k")
		a.acquire().want(t, Granted)
		l := a.lane()
		first := l.conn.Load()
		if !l.connected() {
			t.Fatal("not connected")
		}
		_ = (<-second.dialled).Close()
		newAttempt(t, n, "k").acquire().want(t, Failed) // and go-redis drops the connection
		synctest.Wait()
		n.servers[0].fast.Store(true)
		newAttempt(t, n, "k").acquireHere().want(t, Held)
		time.Sleep(time.Second)
		newAttempt(t, n, "k").acquire().want(t, Held)
		if got := l.conn.Load(); second.dials.Load() != 3 || got == first || !l.connected() {
			t.Errorf("%d dials; it knows another connection than the first: %v, which was greeted: %v",
				second.dials.Load(), got != first, l.connected())
		}
	})
}

// Requests that arrive while Ready waits for an answer wait no longer than behind any other
// request.
func TestWhoComesBehindReadyWaitsNoLonger(t *testing.T) {
	const timeout = 50 * time.Millisecond
	gate := make(chan struct{})
	f := redistest.StartFake(t, func(cmd []string) string {
		if cmd[0] == "ping" || cmd[0] == "PING" {
			<-gate
		}
		return ":1\r\n"
	})
	n := startNode(t, f.Client(t), timeout, false)
	defer close(gate)
	ready := make(chan error, 1)
	start := time.Now()
	go func() { ready <- n.Ready(t.Context()) }()
	if err := <-ready; err == nil || time.Since(start) > conn.TransportTimeout-timeout {
		t.Errorf("%v after %v", err, time.Since(start))
	}
}

// A process that was paused between a request and its answer does not take the grant for a vote, if
// the server may have been another's replica meanwhile: without the strict check nobody would
// notice. The key is released.
func TestAGrantAfterALongPauseIsNoProof(t *testing.T) {
	f := &forgetful{name: "m1", run: "r", version: "7.0", loaded: map[string]bool{}}
	f.forgets("m1")
	n := newNode(t, redistest.StartFake(t, f.answer).Client(t))
	guard(n)
	newAttempt(t, n, "k").acquire().want(t, Granted)
	long := 10 * n.timeout
	for _, tc := range []struct {
		looks bool
		took  time.Duration
		kind  Kind
	}{
		{false, n.timeout, Granted}, {false, long, Failed}, {true, long, Granted},
	} {
		a := newAttempt(t, n, "k")
		e, l := newEar(), &n.servers[0].lanes[0]
		redistest.Eventually(t, patience, "the lane rests", l.claim)
		l.epoch = n.servers[0].epoch.Load()
		l.by, l.strict, l.lasted = l.epoch.usual, tc.looks, tc.took
		a.create = &request{e: &a.Entry, op: opAcquire, sink: e, ttl: longTTL}
		l.complete(a.create, response{val: int64(7)}, true, true)
		l.rest()
		if rep := e.want(t, tc.kind); tc.kind == Failed && !errors.Is(rep.Err, errOld) {
			t.Error(rep.Err)
		}
		if !a.present {
			t.Error("nobody would release it")
		}
	}
}

// After a pause of the process a grant counts if the server proves that its epoch is still the one
// in which it granted.
func TestAGrantAfterALongPauseIsProvenByTheEpochThatIsStillThere(t *testing.T) {
	for epoch, kind := range map[string]Kind{"m1": Granted, "m2": Failed} {
		f := &forgetful{name: "m1", run: "r", version: "7.0", loaded: map[string]bool{}}
		f.forgets("m1")
		n := newNode(t, redistest.StartFake(t, f.answer).Client(t))
		guard(n)
		a := newAttempt(t, n, "k")
		a.acquire().want(t, Granted)
		e, l := newEar(), &n.servers[0].lanes[0]
		redistest.Eventually(t, patience, "the lane rests", l.claim)
		f.forgets(epoch)
		l.epoch = n.servers[0].epoch.Load()
		l.by, l.strict, l.lasted = l.epoch.usual, false, 10*n.timeout
		if !l.tooOld() {
			t.Error("a long pause is nothing")
		}
		l.prove(t.Context())
		a.create = &request{e: &a.Entry, op: opAcquire, sink: e, ttl: longTTL}
		l.complete(a.create, response{val: int64(7)}, true, true)
		l.rest()
		e.want(t, kind)
	}
}

// After a batch that took long, in a process whose processors are busy, a lane's scripts make the
// strict check. Otherwise each such batch would need a proof: a call of boot.lua, on a connection
// of its own.
func TestALateLaneTakesTheCloserLook(t *testing.T) {
	for _, blind := range []error{nil, errors.New("NOPERM")} {
		f := &forgetful{name: "m1", run: "r", version: "7.0", loaded: map[string]bool{}}
		f.forgets("m1")
		n := newNode(t, redistest.StartFake(t, f.answer).Client(t))
		guard(n)
		newAttempt(t, n, "k").acquire().want(t, Granted)
		l := &n.servers[0].lanes[0]
		redistest.Eventually(t, patience, "the lane rests", l.claim)
		m := *l.s.epoch.Load()
		m.NoInfo = blind
		l.s.epoch.Store(&m)
		for _, tc := range []struct {
			lasted time.Duration
			looks  bool
		}{{n.timeout / 2, false}, {n.timeout * 2, blind == nil}, {n.timeout, false}} {
			l.s.verified.Store(&verification{of: &m, until: time.Now().Add(time.Minute)})
			l.lasted = tc.lasted
			if l.begin(time.Now()); l.strict != tc.looks {
				t.Errorf("after a batch that took %v, refused by %v: closer look %v", tc.lasted, blind, l.strict)
			}
		}
		l.rest()
	}
}

// Only grants wait for their proof. The other answers of the batch are settled before the proof is
// asked for. If nothing was granted, or nobody waits for a grant any more, no proof is asked for.
func TestOnlyGrantsWaitForTheirProof(t *testing.T) {
	f := &forgetful{name: "m1", run: "r", version: "7.0", loaded: map[string]bool{}}
	f.forgets("m1")
	var boots atomic.Int64
	hang, goOn := make(chan struct{}, 1), make(chan struct{})
	n := newNode(t, redistest.StartFake(t, func(cmd []string) string {
		if len(cmd) > 1 && cmd[1] == lua.Boot.SHA {
			boots.Add(1)
			select {
			case <-hang:
				<-goOn
			default:
			}
		}
		return f.answer(cmd)
	}).Client(t))
	guard(n)
	held := newAttempt(t, n, "held")
	held.acquire().want(t, Granted)
	l := &n.servers[0].lanes[0]
	redistest.Eventually(t, patience, "the lane rests", l.claim)
	before := boots.Load()
	asked := func(got response, sink Sink) *request {
		a := newAttempt(t, n, "k")
		a.create = &request{e: &a.Entry, op: opAcquire, sink: sink, ttl: longTTL}
		l.answers = append(l.answers, got)
		return a.create
	}
	complete := func(batch ...*request) {
		l.epoch = n.servers[0].epoch.Load()
		l.by, l.strict, l.lasted = l.epoch.usual, false, time.Second
		l.completeEach(t.Context(), batch, true, true)
		l.answers = l.answers[:0]
	}

	l.answers = l.answers[:0]
	ear := newEar()
	complete(asked(response{val: []any{"other", int64(1000)}}, ear), asked(response{val: int64(7)}, nil))
	ear.want(t, Held)
	if got := boots.Load() - before; got != 0 {
		t.Errorf("asked %d times for a proof of nothing", got)
	}

	hang <- struct{}{}
	granted, renewed := newEar(), newEar()
	a := asked(response{val: int64(7)}, granted)
	l.answers = append(l.answers, response{val: int64(9)})
	settled := make(chan struct{})
	go func() {
		defer close(settled)
		complete(a, &request{e: &held.Entry, op: opRefresh, sink: renewed, ttl: longTTL, deadline: n.now().Add(time.Hour)})
	}()
	renewed.want(t, Renewed) // while the proof has no answer
	close(goOn)
	granted.want(t, Granted)
	<-settled
	l.rest()
}

// A refresh is sent before acquires of other keys, and not before that of its own entry, which a
// slow node may not have received yet.
func TestARefreshStaysBehindItsAcquire(t *testing.T) {
	q := &queue{}
	q.init()
	var other, own Entry
	push := func(e *Entry, o op) *request {
		r := &request{e: e, op: o}
		if o == opAcquire {
			e.create = r
		}
		if err := q.push(r); err != nil {
			t.Fatal(err)
		}
		return r
	}
	a, b := push(&other, opAcquire), push(&own, opAcquire)
	late := push(&own, opRefresh)
	first := push(&Entry{}, opRefresh)
	if got := q.take(nil, maxBatch); !slices.Equal(got, []*request{first, a, b, late}) {
		t.Error("out of order")
	}
	if q.rest(); push(&own, opRefresh) == nil || q.urgent == nil {
		t.Error("the acquire was written: the refresh waits")
	}
}
