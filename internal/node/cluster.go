package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/link"
	"github.com/redis/go-redis/v9"
)

// lookupPause is the time between two tries to find out about a Cluster that cannot be asked.
const lookupPause = 250 * time.Millisecond

// errNoMaster is why nobody waits any more for a release whose master is looked up.
var errNoMaster = errors.New("not sent: its master was not found within")

// MaxHops bounds how often one request is sent on by a Cluster that is moving slots.
const MaxHops = 5

// router finds the master that a request must go to, on a Redis Cluster.
//
// Which master has a slot is known from earlier requests. One that is not known waits in
// pending for a goroutine of the router's, because asking the cluster client may mean
// network traffic and must not hold up any caller. Each master has links of its own: one
// that has stopped does not hold up the others.
//
// A cluster client's own pipeline would follow redirections too, but it also replays
// requests whose connection died, which a lock must not.
//
// A master that the Cluster names no longer is dropped, with its links: see gone.go.
type router struct {
	n       *Node
	cluster *redis.ClusterClient
	start   sync.Once
	done    chan struct{}                 // closed when run has ended, or when it will never begin
	owner   [slots]atomic.Pointer[Server] // nil: not known

	// For run's goroutine: why the last lookup failed, and until when there is no other. A Cluster
	// of which no master is known has none to be suspended, and each lookup may dial all of its
	// members.
	failed error
	again  time.Time

	remapped time.Time // when the map was read last because of a request's; for run's goroutine

	life    context.Context // of what requests need of the cluster client; ends with close
	end     context.CancelFunc
	finding conn.Limit // the master of a slot: nearly always known to the cluster client
	reading conn.Limit // all masters, from the Cluster

	sweepEvery time.Duration // set before the first request

	mu       sync.Mutex   // guards what follows, and strikes of the servers
	pending  []pending    // wait for run
	current  pending      // is looked up by it; zero: none is
	overdue  link.Overdue // of the oldest of these. See giveUp
	more     sync.Cond    // signalled when there is one, or the router is closed
	closed   bool
	known    map[string]*Server
	sweep    *time.Timer // for sweepNow; nil until there is a server
	sweeping bool        // it is in progress
	soon     bool        // the next one is not to wait for sweepEvery
	swept    time.Time   // when the last one had ended
	unread   time.Time   // until when no request has the masters read: that has just failed
}

// pending is a request whose master is looked up.
type pending struct {
	r     *request
	since time.Time
}

func newRouter(n *Node, c *redis.ClusterClient) *router {
	ro := &router{
		n: n, cluster: c, known: map[string]*Server{}, done: make(chan struct{}),
		finding: conn.NewLimit(1), reading: conn.NewLimit(1), sweepEvery: sweepTime,
	}
	ro.life, ro.end = context.WithCancel(context.Background())
	ro.more.L = &ro.mu
	return ro
}

// route hands r to the master that has its slot, or has it looked up.
func (ro *router) route(r *request) {
	if s := ro.owner[r.e.t.slot].Load(); s != nil {
		s.push(r)
		return
	}
	ro.lookUp(r)
}

func (ro *router) lookUp(r *request) {
	ro.start.Do(func() { ro.n.wg.Go(ro.run) })
	ro.mu.Lock()
	closed := ro.closed && r.op != opRelease || ro.ended()
	if !closed {
		ro.pending = append(ro.pending, pending{r, time.Now()})
		if r.op == opRelease && !ro.overdue.IsSet() {
			ro.overdue.Set(time.Now().Add(ro.n.timeout), ro.giveUp)
		}
	}
	ro.mu.Unlock()
	ro.more.Signal()
	if closed {
		r.complete(failed(ErrClosed), notSent)
	}
}

// giveUp tells those who wait for a release that its master was looked up for NodeTimeout. The release waits on.
func (ro *router) giveUp() {
	ro.mu.Lock()
	if !ro.overdue.Passed(ro.n.timeout, ro.giveUp) {
		ro.mu.Unlock()
		return
	}
	now := time.Now()
	var tell []func()
	for _, p := range append([]pending{ro.current}, ro.pending...) { // the oldest first
		if p.r == nil || p.r.op != opRelease || p.r.sink == nil {
			continue
		}
		if end := p.since.Add(ro.n.timeout); now.Before(end) {
			ro.overdue.Set(end, ro.giveUp)
			break
		}
		e, sink := p.r.e, p.r.sink
		p.r.sink = nil
		tell = append(tell, func() { e.answer(sink, failed(fmt.Errorf("%w %v", errNoMaster, ro.n.timeout))) })
	}
	ro.mu.Unlock()
	for _, f := range tell {
		f()
	}
}

// ended reports whether run has ended.
func (ro *router) ended() bool {
	select {
	case <-ro.done:
		return true
	default:
		return false
	}
}

// close lets run hand what is pending to the links and end. A topology that cannot be
// read holds it up for half of the time that Close has, and the links have the other half.
func (ro *router) close() {
	ro.start.Do(func() { close(ro.done) }) // nothing to start any more
	ro.mu.Lock()
	ro.closed = true
	ro.mu.Unlock()
	ro.more.Signal()
	select {
	case <-ro.done:
	case <-time.After(ro.n.closeTime() / 2):
	}
	ro.end()
	ro.stopSweeping()
}

// run looks up the masters of pending requests until close.
func (ro *router) run() {
	for {
		ro.mu.Lock()
		for len(ro.pending) == 0 && !ro.closed {
			ro.more.Wait()
		}
		if len(ro.pending) == 0 {
			close(ro.done) // under mu: nothing comes after it
			ro.mu.Unlock()
			return
		}
		r := ro.pending[0].r
		ro.current, ro.pending = ro.pending[0], ro.pending[1:]
		ro.mu.Unlock()
		if r.obsolete(ro.n.now(), 0) {
			ro.found()
			r.completeUseless()
		} else {
			ro.find(r)
		}
	}
}

// found notes that the request that is looked up is about to be passed on: it is run's no more.
func (ro *router) found() {
	ro.mu.Lock()
	defer ro.mu.Unlock()
	ro.current = pending{}
	if len(ro.pending) == 0 {
		ro.overdue.Stop()
	}
}

// find passes r on to its master, or ends it. Close does not wait for the lookup if r only repeats a release.
func (ro *router) find(r *request) {
	if ro.failed != nil && time.Now().Before(ro.again) && r.to == "" && ro.owner[r.e.t.slot].Load() == nil {
		ro.found()
		r.complete(failed(ro.failed), notSent)
		return
	}
	ctx := ro.life
	if r.repeats {
		ctx = ro.n.life
	}
	if r.remapped && time.Since(ro.remapped) > lookupPause { // many may have that answer at once
		_ = ro.named(ctx, "") // which reads the map
		ro.remapped = time.Now()
	}
	s, err := ro.master(ctx, r.e.t.Key(), r.e.t.slot, r.to, r.asking || r.hops > 1)
	ro.found()
	if err != nil && ctx.Err() != nil {
		r.complete(failed(ErrClosed), notSent)
		return
	}
	if ro.failed = err; err != nil {
		ro.again = time.Now().Add(lookupPause)
		r.complete(failed(err), notSent)
		return
	}
	if !r.asking {
		ro.learn(r.e.t.slot, s)
	}
	s.push(r)
}

// learn remembers that s has the slot, unless s was dropped: who drops it says so first, and has all
// slots unlearned then.
func (ro *router) learn(slot uint16, s *Server) {
	ro.owner[slot].Store(s)
	if s.dropped.Load() {
		ro.owner[slot].CompareAndSwap(s, nil)
		return
	}
	ro.n.learned(s)
}

// master is the server that has the slot of key: the one at the address to, which a
// redirection named, or the one known, or the one that the cluster client knows. It may
// take network traffic to find out, and then it blocks for ExchangeTime, or until ctx ends.
//
// A Cluster's map names only masters that have slots. insist says that the one at the address to
// is meant if the map does not name it, because it is to have its first slot, or because the
// map has led to a master that does not have the slot any more. (Else the map is right, and the
// Cluster may know its masters by addresses that do not lead there from here.)
func (ro *router) master(ctx context.Context, key string, slot uint16, to string, insist bool) (*Server, error) {
	s := ro.owner[slot].Load()
	if to != "" {
		s = ro.named(ctx, to)
	}
	if s != nil {
		return s, nil
	}
	ctx, cancel := context.WithTimeout(ctx, ro.n.ExchangeTime())
	defer cancel()
	master, err := conn.Await(ctx, ro.finding, func() (*redis.Client, error) { return ro.cluster.MasterForKey(ctx, key) },
		nil)
	if err != nil {
		return nil, err
	}
	if to != "" && insist {
		return ro.unnamed(master, to), nil
	}
	return ro.server(master), nil
}

// server gives the links of a master.
func (ro *router) server(master *redis.Client) *Server {
	ro.mu.Lock()
	defer ro.mu.Unlock()
	s := ro.known[master.Options().Addr]
	if s != nil && s.of != master.Options() && !s.unnamed {
		// The cluster client closes its client of a master that leaves, and makes another
		// one when it comes back.
		ro.dropLocked(s)
		s = nil
	}
	if s == nil {
		s = ro.addLocked(master.Options())
	}
	return s
}

func (ro *router) addLocked(of *redis.Options) *Server {
	if old := ro.known[of.NodeAddress]; old != nil { // met by that name, before the map named it
		ro.dropLocked(old)
	}
	s := ro.n.addServer(of)
	s.redirect, s.unreachable = ro.redirect, ro.forget
	ro.known[s.addr] = s
	ro.known[of.NodeAddress] = s // as redirections name it
	if ro.sweep == nil {
		ro.armLocked()
	}
	return s
}

// unnamed gives the links of the master at addr, which the Cluster's map does not name. Its options are those of
// another master but for the address. They last as long as the node: also when the map names that master, it keeps its
// links.
func (ro *router) unnamed(like *redis.Client, addr string) *Server {
	ro.mu.Lock()
	defer ro.mu.Unlock()
	if s := ro.known[addr]; s != nil { // the map has just come to name it
		return s
	}
	of := conn.BareOptions(like.Options())
	of.Addr, of.NodeAddress = addr, addr
	s := ro.addLocked(of)
	s.unnamed = true
	return s
}

// redirect sends r on when the answer says that another master has its slot: MOVED for
// good, ASK for this once. It says whether it did. The server that answered so has not
// executed r. One that only says that the keys are not its own names no other: then the map is
// read again, and r sent once more. (Its script has ended at the first of these keys; what it has written before, the
// same owner may write again.)
func (ro *router) redirect(s *Server, r *request, answer error) bool {
	moved, ask := conn.HasCode(answer, "MOVED"), conn.HasCode(answer, "ASK")
	unnamed := conn.RefusesSlots(answer) && !r.remapped
	if !moved && !ask && !unnamed || r.hops >= MaxHops {
		return false
	}
	r.hops++
	r.asking, r.remapped = ask, r.remapped || unnamed
	if r.to = ""; !unnamed {
		r.to = s.redirection(answer)
	}
	if !ask {
		ro.owner[r.e.t.slot].CompareAndSwap(s, nil)
	}
	ro.lookUp(r)
	return true
}

// redirection is the address in a redirecting answer of s: "MOVED slot host:port". An IPv6 address has no brackets
// there: "::1:6379".
func (s *Server) redirection(answer error) string {
	words := strings.Fields(answer.Error())
	to := words[len(words)-1]
	at := strings.LastIndexByte(to, ':')
	if at < 0 {
		return to
	}
	host := strings.Trim(to[:at], "[]")
	if host == "" { // no host in the answer: the one that answered
		answered, _, err := net.SplitHostPort(s.addr)
		if err != nil {
			return to
		}
		host = answered
	}
	return net.JoinHostPort(host, to[at+1:])
}

// named is the server with that address; nil when the Cluster has no such master. The
// topology is read again when the address is new. If that fails, which may take ExchangeTime, it is not
// tried again for a while: many requests may have been sent on to one address, and wait for each other.
func (ro *router) named(ctx context.Context, addr string) *Server {
	ro.mu.Lock()
	s, unread := ro.known[addr], time.Now().Before(ro.unread)
	ro.mu.Unlock()
	if s != nil || unread {
		return s
	}
	masters, err := ro.masters(ctx)
	for _, master := range masters {
		ro.server(master)
	}
	ro.mu.Lock()
	defer ro.mu.Unlock()
	if err != nil && ctx.Err() == nil {
		ro.unread = time.Now().Add(lookupPause)
	}
	return ro.known[addr]
}

// masters are those that the Cluster names, or those that it named last if it cannot be read. It
// blocks for ExchangeTime, or until ctx ends.
func (ro *router) masters(ctx context.Context) ([]*redis.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, ro.n.ExchangeTime())
	defer cancel()
	return conn.Await(ctx, ro.reading, func() ([]*redis.Client, error) { return Masters(ctx, ro.cluster) }, nil)
}

func (ro *router) unlearn(s *Server) {
	for i := range ro.owner {
		ro.owner[i].CompareAndSwap(s, nil)
	}
}

// Masters returns a client for each server of client that takes part in locking.
func Masters(ctx context.Context, client redis.UniversalClient) ([]*redis.Client, error) {
	cluster, ok := client.(*redis.ClusterClient)
	if !ok {
		return []*redis.Client{client.(*redis.Client)}, nil
	}
	found := make(chan *redis.Client, slots)
	err := cluster.ForEachMaster(ctx, func(_ context.Context, c *redis.Client) error {
		found <- c
		return nil
	})
	close(found)
	var all []*redis.Client
	for c := range found {
		all = append(all, c)
	}
	if err == nil && len(all) == 0 {
		err = errors.New("the Cluster names no master")
	}
	return all, err
}
