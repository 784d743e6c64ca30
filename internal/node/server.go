package node

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/redis/go-redis/v9"
)

// Server is one Redis process that answers requests: a standalone server, or one master
// of a Cluster.
type Server struct {
	n    *Node
	from *redis.Client // whose options those of the lanes have
	addr string
	fast atomic.Bool // the last exchange got its answers, well within a caller's time

	answered  atomic.Int64 // the instant of the last answer
	asked     atomic.Int64 // the latest instant at which the server was asked something that it has answered
	silent    atomic.Int64 // when the first exchange since then began that had no answer in its time; 0: none has
	failed    atomic.Int64 // the instant of the last exchange without an answer, if none has had one since; 0: it has
	suspended atomic.Pointer[suspension]
	letIn     atomic.Int64 // the instant when it was back last, after anything but silence; 0: never
	probedAt  atomic.Int64 // the instant of the last probe for a refresh; 0: none was sent

	subscriptionDials conn.Limit // dials of subscription connections
	dials             conn.Limit // what its lanes dial
	singleDials       conn.Limit // what is dialed for one probe or one boot
	urgentDials       conn.Limit // what is dialed for a probe for a refresh

	loading chan struct{} // has a token while scripts are loaded: a mutex is not held that long
	loads   atomic.Uint64 // how often they were. Written by who has the token

	refused      error     // how the server refused boot.lua the last time; nil: it did not. For who has the token
	refusedUntil time.Time // it stands until then

	epoch    atomic.Pointer[Epoch]        // of the votes requested. Written by who has the token, and before any request
	verified atomic.Pointer[verification] // the last one

	// refusedSlot is one more than the hash slot of a request that was refused last because its script
	// accessed a key that it does not declare; 0: none was.
	refusedSlot atomic.Int32

	// Set on a Cluster: unnamed says that its map did not name this master when it was met, so that from
	// is the node's own; redirect sends a request on that belongs elsewhere, and says
	// whether it did; unreachable is called for each batch without an answer.
	unnamed     bool
	redirect    func(s *Server, r *request, answer error) bool
	unreachable func(*Server)

	dropped atomic.Bool // a Cluster names it no more. Set for good, before its lanes are closed
	strikes int         // towards that: see gone.go

	// noBatchUntil is until when requests go as commands of their own, because the server has
	// refused to take a batch as one. Always, on a Cluster: a script has keys of one slot.
	noBatchUntil atomic.Int64

	// noGrantsUntil is until when releases grant nothing, because the node did not report its epoch, so that
	// it does not know the script that grants.
	noGrantsUntil atomic.Int64

	moved  atomic.Uint64          // how often the Sentinels have named another master: see follow
	master atomic.Pointer[string] // which one they have named last; nil: none

	start sync.Once // starts the lanes' goroutines, with the first request
	lanes []lane
}

// maxSubscriptionDials bounds the dials of subscription connections to one server that hang at once.
// One that hangs forever does not end the subscriptions.
const maxSubscriptionDials = 4

// maxSingleDials is that for probes and boots, each of which dials by itself: more than hang at once with a dialer that
// ignores its context and takes two minutes to give up, as TCP does, so that a server that is back is found as soon.
const maxSingleDials = 100

func newServer(n *Node, c *redis.Client) *Server {
	s := &Server{
		n: n, from: c, addr: c.Options().Addr,
		loading: make(chan struct{}, 1), subscriptionDials: conn.NewLimit(maxSubscriptionDials),
		singleDials: conn.NewLimit(maxSingleDials), urgentDials: conn.NewLimit(probeSpacing * probeTime),
	}
	s.lanes = make([]lane, lanesPerServer)
	if n.alone {
		s.lanes = make([]lane, lanesAlone)
	}
	s.dials = conn.NewLimit(2 * len(s.lanes))
	s.epoch.Store(anyEpoch)
	for i := range s.lanes {
		l := &s.lanes[i]
		l.init()
		l.s, l.watchdog.l, l.first.l, l.first.begins = s, l, l, true
		for o := range l.names {
			l.names[o] = scriptName{l: l, op: op(o)}
		}
		l.connect()
	}
	return s
}

// Client is the client whose options the connections to the server have.
func (s *Server) Client() *redis.Client { return s.from }

// Moves is how often the Sentinels have named another master. A connection that was dialled before the last time may
// lead to an old one.
func (s *Server) Moves() uint64 { return s.moved.Load() }

// Master is the address of the master that the Sentinels have named last; "" if there are no Sentinels, or they have
// named none so far.
func (s *Server) Master() string {
	if addr := s.master.Load(); addr != nil {
		return *addr
	}
	return ""
}

// SubscriptionDials bounds the dials of subscription connections to the server.
func (s *Server) SubscriptionDials() conn.Limit { return s.subscriptionDials }

// Suspended reports whether the server is suspended.
func (s *Server) Suspended() bool { return s.suspended.Load() != nil }

// Unreachable has the slots of a Cluster's master looked up again, because the master could not be
// reached: a replica may have taken its place.
func (s *Server) Unreachable() {
	if s.unreachable != nil {
		s.unreachable(s)
	}
}

// push queues r in the lane of its key. If that is not possible, r is completed at once.
func (s *Server) push(r *request) {
	if state := s.suspended.Load(); state != nil && !state.allows(r) {
		r.complete(failed(state.err), notSent)
		return
	}
	s.start.Do(s.run)
	l := &s.lanes[int(r.e.t.lane)%len(s.lanes)]
	if r.inline && s.fast.Load() && l.connected() {
		if l.claim() {
			defer l.rest() // also when what the client's owner has put into the way panics on the caller's goroutine
			l.exchangeNow(r, time.Now())
			return
		}
	}
	if err := l.push(r); err != nil {
		if s.dropped.Load() {
			err = errGone
		}
		r.complete(failed(err), notSent)
	}
}

// run starts a goroutine for each lane. close ends them.
func (s *Server) run() {
	if conn.IsSentinelManaged(s.from) {
		s.n.wg.Add(1)
		go s.follow()
	}
	s.n.wg.Add(len(s.lanes))
	for i := range s.lanes {
		go s.lanes[i].run()
	}
}

// close ends the lanes. They are closed before it is decided whether any goroutine serves them:
// what gets into a lane before that has started its goroutine.
func (s *Server) close() {
	for i := range s.lanes {
		s.lanes[i].close()
	}
	s.start.Do(func() {}) // nothing to start any more
}

// noBatches has requests go as commands of their own, after the server has said err to a
// batch of them: for a while if others in the batch or the server's state are the reason,
// else for good.
func (s *Server) noBatches(err error) {
	switch {
	case conn.HasCode(err, "NOSCRIPT"):
	case conn.HasCode(err, "CROSSSLOT") || !neverRan(err):
		s.noBatchUntil.Store(math.MaxInt64)
	default:
		s.noBatchUntil.Store(int64(s.n.now().Add(time.Second)))
	}
}

// grantsNothingFor has releases grant nothing for that long.
func (s *Server) grantsNothingFor(d time.Duration) { s.noGrantsUntil.Store(int64(s.n.now().Add(d))) }

// takeLoading waits for the token of loading, until ctx ends; putLoading gives it back.
func (s *Server) takeLoading(ctx context.Context) error {
	select {
	case s.loading <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *Server) putLoading() { <-s.loading }
