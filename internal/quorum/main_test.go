package quorum

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/clocktest"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
)

// clocks are those of this package's tests.
var clocks clocktest.Clocks

func TestMain(m *testing.M) {
	clocks.Install()
	firstPoll = func() uint32 { return 0 }  // so that tests can write messages
	new(node.Target).Init("warm", "up", "") // what is built once must not be built in a bubble
	redistest.SilenceRedis()
	goleak.VerifyTestMain(m)
}

const (
	nodeTimeout = 50 * time.Millisecond
	ttl         = time.Second
	patience    = 20 * time.Second // for what must happen on real servers, and their NodeTimeout
	key         = "lock:k"
)

// A client is one process: a quorum over nodes of its own.
type client struct {
	t     *testing.T
	q     *Quorum
	nodes []*node.Node

	mu     sync.Mutex // guards what follows
	owners []string
	calls  []*call
}

// newClient makes a client and, in the test's cleanup, ends it; then every operation that
// was begun must have been answered, once.
func newClient(t *testing.T, name string, conns []redis.UniversalClient) *client {
	t.Helper()
	return newPatientClient(t, name, conns, nodeTimeout)
}

// threeServers starts servers with these arguments, and gives a client of each.
func threeServers(t *testing.T, args ...string) (servers []*redistest.Server, conns []redis.UniversalClient) {
	t.Helper()
	for range 3 {
		s := redistest.StartServer(t, args...)
		servers, conns = append(servers, s), append(conns, s.Client(t))
	}
	return servers, conns
}

// newPatientClient is for real time, in which a busy machine may take longer than nodeTimeout.
func newPatientClient(t *testing.T, name string, conns []redis.UniversalClient,
	nodeTimeout time.Duration) *client {
	t.Helper()
	c := &client{t: t}
	for _, conn := range conns {
		n, err := node.New(conn, nodeTimeout, len(conns) == 1)
		if err != nil {
			t.Fatal(err)
		}
		c.nodes = append(c.nodes, n)
	}
	var seq atomic.Int64
	c.q = New(Config{
		Nodes: c.nodes, NodeTimeout: nodeTimeout, DriftFactor: 0.01,
		Owner: func() string {
			c.mu.Lock()
			defer c.mu.Unlock()
			owner := fmt.Sprintf("%s-%d", name, seq.Add(1))
			c.owners = append(c.owners, owner)
			return owner
		},
		Same: func(ctx context.Context, i, j int) (bool, error) {
			return node.SameServer(ctx, conns[i], conns[j], fmt.Sprintf("%s-%d", name, seq.Add(1)))
		},
	})
	t.Cleanup(c.close)
	return c
}

func (c *client) close() {
	var wg sync.WaitGroup
	for _, n := range c.nodes {
		wg.Go(func() {
			if err := n.Close(context.Background()); err != nil {
				c.t.Error(err)
			}
		})
	}
	wg.Wait()
	_ = c.q.Close(context.Background())
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, call := range c.calls {
		if n := call.times.Load(); n != 1 {
			c.t.Errorf("%s of %s was answered %d times", call.op, call.l.Owner(), n)
		}
	}
}

// commands is how many requests went to each node since the last call.
func (c *client) commands(before []uint64) []uint64 {
	var sent []uint64
	for i, n := range c.nodes {
		sent = append(sent, n.Commands())
		if before != nil {
			sent[i] -= before[i]
		}
	}
	return sent
}

// A call is one operation under way.
type call struct {
	op    string
	l     *Lease
	times atomic.Int32
	ended chan struct{} // closed by the first answer

	grant Grant // written before ended is closed
	fail  *Failure
}

func (c *client) newCall(op string, l *Lease) *call {
	a := &call{op: op, l: l, ended: make(chan struct{})}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, a)
	return a
}

func (a *call) done(g Grant, f *Failure) {
	if a.times.Add(1) == 1 {
		a.grant, a.fail = g, f
		close(a.ended)
	}
}

func (a *call) Acquired(g Grant, f *Failure) { a.done(g, f) }

func (a *call) Released(f *Failure) { a.done(Grant{}, f) }

func (a *call) wait() (Grant, *Failure) {
	<-a.ended
	return a.grant, a.fail
}

func (a *call) answered() bool {
	select {
	case <-a.ended:
		return true
	default:
		return false
	}
}

// begin starts an attempt.
func (c *client) begin(key string, ttl time.Duration, tokens int64) *call {
	l := prepare(c.q, key, ttl, tokens)
	a := c.newCall("acquire", l)
	l.Acquire(false, a)
	return a
}

// try makes an attempt and waits for its outcome.
func (c *client) try(key string, ttl time.Duration, tokens int64) (*Lease, Grant, *Failure) {
	a := c.begin(key, ttl, tokens)
	g, f := a.wait()
	return a.l, g, f
}

// must makes an attempt that has to succeed. One that was granted too late, on a busy machine, is made again.
func (c *client) must(key string, ttl time.Duration, tokens int64) (*Lease, Grant) {
	c.t.Helper()
	l, g, f := c.try(key, ttl, tokens)
	for range 10 {
		if f != nil && (errors.Is(f.Err, errTooLate) || errors.Is(f.Err, errSlowAttempt)) {
			l, g, f = c.try(key, ttl, tokens)
		}
	}
	if f != nil {
		c.t.Fatalf("acquire: %s", describe(f))
	}
	return l, g
}

// tryAndRelease makes an attempt, and gives back what it wins.
func (c *client) tryAndRelease(key string, ttl time.Duration) {
	if l, _, f := c.try(key, ttl, 1); f == nil {
		c.release(l)
	}
}

func (c *client) beginRefresh(l *Lease, ttl time.Duration, more int64) *call {
	a := c.newCall("refresh", l)
	l.Refresh(ttl, more, c.q.NodeTimeout, false, a.done)
	return a
}

func (c *client) refresh(l *Lease, ttl time.Duration, more int64) (Grant, *Failure) {
	return c.beginRefresh(l, ttl, more).wait()
}

// reserve refreshes l for tokens, again if the nodes did not agree on them.
func (c *client) reserve(l *Lease, ttl time.Duration, more int64) (Grant, *Failure) {
	g, f := c.refresh(l, ttl, more)
	if f == nil && g.Reserved {
		g, f = c.refresh(l, ttl, more)
	}
	return g, f
}

func (c *client) beginRelease(l *Lease) *call {
	a := c.newCall("release", l)
	l.Release(false, "", NoNews, a)
	return a
}

func (c *client) release(l *Lease) *Failure {
	_, f := c.beginRelease(l).wait()
	return f
}

// describe is a failure in full, for messages.
func describe(f *Failure) string {
	if f == nil {
		return "success"
	}
	s := fmt.Sprintf("%v reason=%d final=%v free=%v err=%v", f, f.Reason, f.Final, f.Free, f.Err)
	for _, a := range f.Nodes {
		s += fmt.Sprintf("\n\t%s: %+v", a.Name, a.Reply)
	}
	return s
}

func wantReason(t *testing.T, f *Failure, want Reason) {
	t.Helper()
	if f == nil || f.Reason != want {
		t.Fatalf("want a failure with reason %d, got %s", want, describe(f))
	}
}

// A rig is n in-memory nodes in virtual time.
type rig struct {
	t   *testing.T
	mem []*redistest.MemNode
}

// inBubble runs a test on n in-memory nodes in virtual time.
func inBubble(t *testing.T, n int, f func(t *testing.T, r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f(t, &rig{t: t, mem: newMemNodes(t, n)})
	})
}

// overSizes runs a test for each number of nodes from 1 to 5.
func overSizes(t *testing.T, f func(t *testing.T, r *rig)) {
	for n := 1; n <= 5; n++ {
		t.Run(fmt.Sprintf("nodes=%d", n), func(t *testing.T) { inBubble(t, n, f) })
	}
}

// client makes a client of all nodes, with connections of its own.
func (r *rig) client(name string) *client { return newClient(r.t, name, r.conns()) }

func (r *rig) conns() (all []redis.UniversalClient) {
	for _, m := range r.mem {
		all = append(all, m.Client(r.t))
	}
	return all
}

// warm makes every connection of c, loads the scripts and creates the fence bucket of
// key, with the given counters.
func (r *rig) warm(c *client, key string, counters ...int64) {
	r.t.Helper()
	l, _ := c.must(key, max(ttl, c.q.Quarantine), 1) // a new deployment is not established within a second
	synctest.Wait()
	if f := c.release(l); f != nil {
		r.t.Fatal(describe(f))
	}
	r.settle()
	for i, n := range counters {
		r.setCounter(i, n)
	}
	time.Sleep(redial) // a connection that ends sooner is not made again at once
}

// redial is longer than the pause between two dials of a node that lets nobody in.
const redial = 300 * time.Millisecond

// newMemNodes are nodes that were never used.
func newMemNodes(t *testing.T, n int) []*redistest.MemNode {
	nodes := redistest.StartMemNodes(t, n)
	for _, m := range nodes {
		m.Mini.FlushAll()
		c := redis.NewClient(m.Options())
		for _, script := range []lua.Script{lua.Undo, lua.Release} { // others have needed them before
			if err := c.ScriptLoad(t.Context(), script.Source).Err(); err != nil {
				t.Fatal(err)
			}
		}
		_ = c.Close()
	}
	return nodes
}

// settle waits until whatever is under way has come to rest, late answers included.
func (r *rig) settle() {
	time.Sleep(10 * time.Second)
	synctest.Wait()
}

func (r *rig) delays(d ...time.Duration) {
	for i := range d {
		r.mem[i].SetDelay(d[i])
	}
}

func (r *rig) bucket(i int) string {
	r.t.Helper()
	for _, k := range r.mem[i].Mini.Keys() {
		if strings.Contains(k, "fence") {
			return k
		}
	}
	r.t.Fatalf("node %d has no fence bucket", i)
	return ""
}

func (r *rig) setCounter(i int, n int64) {
	r.t.Helper()
	if err := r.mem[i].Mini.Set(r.bucket(i), strconv.FormatInt(n, 10)); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) counter(i int) int64 {
	r.t.Helper()
	s, err := r.mem[i].Mini.Get(r.bucket(i))
	if err != nil {
		r.t.Fatal(err)
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		r.t.Fatal(err)
	}
	return n
}

// holders is whose key each node has, "" for nobody's.
func (r *rig) holders(key string) []string {
	var owners []string
	for _, m := range r.mem {
		owner, _ := m.Mini.Get(key)
		owners = append(owners, owner)
	}
	return owners
}

func (r *rig) wantHolders(key string, want ...string) {
	r.t.Helper()
	if got := r.holders(key); !slices.Equal(got, want) {
		r.t.Fatalf("the nodes have %q, want %q", got, want)
	}
}

// wantNoKey checks that no node has key once everything has come to rest.
func (r *rig) wantNoKey(key string) {
	r.t.Helper()
	r.settle()
	r.wantHolders(key, make([]string, len(r.mem))...)
}

// give makes another client the holder of key on the given nodes.
func (r *rig) give(key, owner string, ttl time.Duration, nodes ...int) {
	r.t.Helper()
	for _, i := range nodes {
		if err := r.mem[i].Mini.Set(key, owner); err != nil {
			r.t.Fatal(err)
		}
		if ttl > 0 {
			r.mem[i].Mini.SetTTL(key, ttl)
		}
	}
}

func ms(n int) time.Duration { return time.Duration(n) * time.Millisecond }

func prepare(q *Quorum, key string, ttl time.Duration, tokens int64) *Lease {
	l := new(Lease)
	q.Prepare(l, key, ttl, tokens, "")
	return l
}
