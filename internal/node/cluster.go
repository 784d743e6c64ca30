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
	"github.com/flightlock/flightlock/internal/group"
	"github.com/redis/go-redis/v9"
)

// lookupPause is the time between two tries to find out about a Cluster that cannot be asked.
const lookupPause = 250 * time.Millisecond

// errNoMaster is why a request was not sent whose master is looked up.
var errNoMaster = errors.New("not sent: its master was not found within")

// MaxHops bounds how often one request is sent on by a Cluster that is moving slots.
const MaxHops = 5

// router finds the master that a request must go to, on a Redis Cluster.
//
// Which master has a slot is known from earlier requests. One that is not known is looked up by a goroutine
// of the request's, because asking the cluster client may mean network traffic and must not hold up any
// caller. One of them at a time does so, and the others mostly find out from that. Each master has links of
// its own: one that has stopped does not hold up the others.
//
// A cluster client's own pipeline would follow redirections too, but it also replays
// requests whose connection died, which a lock must not.
//
// A master that the Cluster names no longer is dropped, with its links: see gone.go.
type router struct {
	n       *Node
	cluster *redis.ClusterClient
	owner   [slots]atomic.Pointer[Server] // nil: not known
	lookups group.Group                   // of requests

	// For the lookup that has finding: why the last one failed, and until when there is no other. A Cluster
	// of which no master is known has none to be suspended, and each lookup may dial all of its
	// members.
	failed error
	again  time.Time

	remapped time.Time // when the map was read last because of a request's; for the same one

	life    context.Context // of what requests need of the cluster client; ends with close
	end     context.CancelFunc
	finding conn.Limit // the master of a slot: nearly always known to the cluster client
	reading conn.Limit // all masters, from the Cluster

	mu       sync.Mutex // guards what follows, and strikes of the servers
	known    map[string]*Server
	sweep    *time.Timer // for sweepNow; nil if none was needed
	sweeping bool        // it is due, or in progress
	swept    time.Time   // when the last one had ended
	unread   time.Time   // until when no request has the masters read: that has just failed
}

func newRouter(n *Node, c *redis.ClusterClient) *router {
	ro := &router{
		n: n, cluster: c, known: map[string]*Server{},
		finding: conn.NewLimit(1), reading: conn.NewLimit(1), swept: time.Now(),
	}
	ro.life, ro.end = context.WithCancel(context.Background())
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
	if !ro.lookups.Go(func() { ro.find(r) }) {
		r.complete(failed(ErrClosed), notSent)
	}
}

// close lets what is looked up be handed to the links. A topology that cannot be read holds it up for
// NodeTimeout.
func (ro *router) close() {
	ro.lookups.Close()
	_ = ro.lookups.Wait(context.Background())
	ro.end()
	ro.stopSweeping()
}

// find passes r on to its master, or ends it. Nobody waits for a lookup for longer than NodeTimeout for a
// release, and Close for none but that of a release that was not sent before.
func (ro *router) find(r *request) {
	life, most := ro.n.life, 2*ro.n.ExchangeTime() // to read the map, and to look up
	if r.op == opRelease {
		most = ro.n.timeout
		if !r.repeats {
			life = ro.life
		}
	}
	ctx, cancel := context.WithTimeout(life, most)
	defer cancel()
	of := *r // the lookup may take longer than r has
	s, err := conn.Await(ctx, ro.finding, func() (*Server, error) { return ro.masterOf(&of) }, nil)
	switch {
	case err == nil:
		s.push(r)
	case life.Err() != nil:
		r.complete(failed(ErrClosed), notSent)
	case ctx.Err() != nil:
		r.complete(failed(fmt.Errorf("%w %v", errNoMaster, most)), notSent)
	default:
		r.complete(failed(err), notSent)
	}
}

// masterOf finds the master of r's slot: the one at the address that a redirection named, or the one known,
// or the one that the cluster client knows. It may take network traffic to find out, and then it blocks for
// ExchangeTime, and for that once more if the map is read, or until the router ends. It is for the request
// that has finding.
//
// A Cluster's map names only masters that have slots. The one at the address that a redirection named is
// meant if the map does not name it, if it is to have its first slot, or if the map has led to a master that
// does not have the slot any more. (Else the map is right, and the Cluster may know its masters by addresses
// that do not lead there from here.)
func (ro *router) masterOf(r *request) (s *Server, err error) {
	slot, redirected := r.e.t.slot, r.to != ""
	switch s = ro.owner[slot].Load(); {
	case redirected:
		s = ro.named(r.to)
	case s != nil && !r.remapped: // somebody else has found it
		return s, nil
	case ro.failed != nil && time.Now().Before(ro.again):
		return nil, ro.failed
	case r.remapped && time.Since(ro.remapped) > lookupPause: // many may have that answer at once
		_ = ro.named("") // which reads the map
		ro.remapped = time.Now()
	}
	if s == nil || !redirected {
		ctx, cancel := context.WithTimeout(ro.life, ro.n.ExchangeTime())
		defer cancel()
		master, err := ro.cluster.MasterForKey(ctx, r.e.t.Key())
		if ro.failed = err; err != nil {
			ro.again = time.Now().Add(lookupPause)
			return nil, err
		}
		if redirected && (r.asking || r.hops > 1) {
			s = ro.unnamed(master, r.to)
		} else {
			s = ro.server(master)
		}
	}
	if !r.asking {
		ro.learn(slot, s)
	}
	return s, nil
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
	ro.known[of.Addr] = s
	ro.known[of.NodeAddress] = s // as redirections name it
	ro.armLocked()
	return s
}

// unnamed gives the links of the master at addr, which the Cluster's map does not name. Its options are those
// of another master but for the address. They last as long as the node: also when the map names that master,
// it keeps its links.
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
// read again, and r sent once more. (Its script has ended at the first of these keys; what it has written
// before, the same owner may write again.)
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

// redirection is the address in a redirecting answer of s: "MOVED slot host:port". An IPv6 address has no
// brackets there: "::1:6379".
func (s *Server) redirection(answer error) string {
	words := strings.Fields(answer.Error())
	to := words[len(words)-1]
	at := strings.LastIndexByte(to, ':')
	if at < 0 {
		return to
	}
	host := strings.Trim(to[:at], "[]")
	if host == "" { // no host in the answer: the one that answered
		answered, _, err := net.SplitHostPort(s.of.Addr)
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
func (ro *router) named(addr string) *Server {
	ro.mu.Lock()
	s, unread := ro.known[addr], time.Now().Before(ro.unread)
	ro.mu.Unlock()
	if s != nil || unread {
		return s
	}
	masters, err := ro.masters(ro.life)
	for _, master := range masters {
		ro.server(master)
	}
	ro.mu.Lock()
	defer ro.mu.Unlock()
	if err != nil && ro.life.Err() == nil {
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
