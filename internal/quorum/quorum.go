// Package quorum turns the votes of N independent nodes into one lease.
//
// The protocol is Redlock (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/)
// with fencing tokens on top, which is what Kleppmann's critique of 2016 found missing
// ("How to do distributed locking"). A lease is won when a majority q = N/2+1 of the nodes
// granted the same owner, agree on its block of tokens, and did so before the validity that
// began ahead of the first request was over.
package quorum

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/pubsub"
	"github.com/flightlock/flightlock/internal/wait"
)

// fixedDrift is what validity loses besides ttl*DriftFactor: Redis expires keys with a
// precision of a millisecond, and so may a timer of ours be late.
const fixedDrift = 2 * time.Millisecond

// Config is what a Quorum is made of.
type Config struct {
	Nodes       []*node.Node
	NodeTimeout time.Duration // how long a node may take to answer one attempt
	DriftFactor float64       // share of the ttl by which clocks may run apart
	Owner       func() string // a new owner at each call, never the same twice

	// Tells says whether the holder of that name will tell when it lets go. nil: all do.
	Tells func(owner string) bool

	// Guarded says that a fresh grant of a node that lost its memory does not count for so long as
	// Quarantine says, which must be above 0. All nodes must be guardable then, and unused.
	Guarded    bool
	Quarantine time.Duration

	// MemoryName is for node.Guard. If it is set, nodes that can tell what they remember are asked even
	// if not Guarded: tokens go on above those that a node forgot.
	MemoryName func() string

	Told func(i int, s Quarantined) // a node has entered quarantine, or left it; one call may overtake another. nil: nobody wants to know

	// Blind hears, once, why a node does not tell what it takes to notice that it restarted
	// with old data. nil: nobody wants to know.
	Blind func(why error)

	// Same tells whether two nodes are one server.
	Same func(ctx context.Context, i, j int) (bool, error)
}

// Quorum asks all nodes at once and decides by majority. It is safe for concurrent use,
// never blocks, and starts no goroutine per request: replies drive it.
type Quorum struct {
	Config
	need       int
	subs       []*pubsub.Subscriptions // of each node
	deadlines  deadlines
	quarantine *quarantine // nil: there is none

	trip  atomic.Int64            // how long the last attempt took that the nodes decided, in ns
	twins atomic.Pointer[Failure] // set for good once two nodes proved to be one server

	ctx    context.Context // of the search for twins; ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // what start has started

	mu     sync.Mutex    // guards what follows
	search chan struct{} // closed when the search for twins has a result; nil if there is none
	closed bool
}

// New makes a Quorum.
func New(cfg Config) *Quorum {
	q := &Quorum{Config: cfg, need: len(cfg.Nodes)/2 + 1, deadlines: deadlines{timeout: cfg.NodeTimeout, epoch: time.Now()}}
	q.ctx, q.cancel = context.WithCancel(context.Background())
	for _, n := range cfg.Nodes {
		q.subs = append(q.subs, pubsub.New(n))
	}
	switch {
	case cfg.Guarded:
		q.quarantine = newQuarantine(q)
	case cfg.MemoryName != nil:
		for _, n := range cfg.Nodes {
			if n.Guardable() {
				n.SetGuard(node.Guard{Limit: cfg.Quarantine, Name: cfg.MemoryName})
			}
		}
	}
	return q
}

// Need is the number of votes that decide.
func (q *Quorum) Need() int { return q.need }

// Validity is how long a lease of ttl may be believed in, counted from just before the
// first request.
func (q *Quorum) Validity(ttl time.Duration) time.Duration {
	return ttl - time.Duration(float64(ttl)*q.DriftFactor) - fixedDrift
}

// Grant is a lease, or more of one.
type Grant struct {
	Until       time.Time // validity deadline
	First, Last int64     // the block of fencing tokens, empty when Last < First
	Rival       string    // of a refresh that looked: the contender that waits longest; "": nobody waits
	Reserved    bool      // of a refresh: the nodes have reserved a block, but it takes another refresh to make it ours
}

// Prepare makes l the lease of one attempt, with an owner of its own. It asks nobody yet.
// contender is who asks, if it has asked before: its attempt takes a turn that is kept for
// it, or gets it a place among those who wait.
func (q *Quorum) Prepare(l *Lease, key string, ttl time.Duration, tokens int64, contender string) {
	l.q, l.errand = q, newErrand(len(q.Nodes))
	l.errand.ttl, l.errand.tokens = ttl, tokens
	l.target.Init(key, q.Owner(), contender)
	l.entries = l.one[:]
	if len(q.Nodes) > len(l.one) {
		l.entries = make([]node.Entry, len(q.Nodes))
	}
	for i := range l.entries {
		l.entries[i].Init(q.Nodes[i], &l.target, i)
	}
}

// Leave takes back what contender may have on the nodes: its want, or its turn, which
// passes on. It is tried once.
func (q *Quorum) Leave(key, contender string) {
	t := new(node.Target)
	t.Init(key, contender, contender) // contender was the owner of an attempt, which is over
	p := &node.Parting{Contender: contender}
	for i, n := range q.Nodes {
		e := new(node.Entry)
		e.Init(n, t, i)
		e.Release(new(node.Place), nil, false, p)
	}
}

// CloseWatches ends all watches and waits for what serves them, until ctx ends. The owner of the nodes
// may close these at the same time.
func (q *Quorum) CloseWatches(ctx context.Context) error {
	errs := make([]error, len(q.subs))
	var wg sync.WaitGroup
	for i, subs := range q.subs {
		wg.Go(func() { errs[i] = subs.Close(ctx) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Close ends the rounds that are open still, and the watches, and waits for what the quorum itself has
// started, until ctx ends: what compares nodes may be in somebody else's client. The nodes are closed by
// their owner, before.
func (q *Quorum) Close(ctx context.Context) error {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.cancel()
	q.deadlines.stop()
	return errors.Join(q.CloseWatches(ctx), wait.For(ctx, q.wg.Wait))
}

// start runs f on a goroutine that Close waits for, and says whether it does: not any more
// once the quorum is closed.
func (q *Quorum) start(f func()) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.startLocked(f)
}

func (q *Quorum) startLocked(f func()) bool {
	if !q.closed {
		q.wg.Go(f)
	}
	return !q.closed
}

// suspect is called when node i answered "already yours" to an owner it had not seen: some
// other node of the list must be the same server. One search at a time finds out which.
func (q *Quorum) suspect(i int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.search != nil || q.twins.Load() != nil {
		return
	}
	ended := make(chan struct{})
	if q.startLocked(func() { q.findTwin(i, ended) }) {
		q.search = ended
	}
}

// searched is closed when no search for twins is under way.
func (q *Quorum) searched() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.search != nil {
		return q.search
	}
	ended := make(chan struct{})
	close(ended)
	return ended
}

// findTwin compares node i with all others, at once: one that does not answer must not keep
// the others from being found out. ended is closed with the first twin found, or when
// there is none.
func (q *Quorum) findTwin(i int, ended chan struct{}) {
	end := sync.OnceFunc(func() {
		q.mu.Lock()
		q.search = nil
		q.mu.Unlock()
		close(ended)
	})
	var wg sync.WaitGroup
	for j := range q.Nodes {
		if j == i {
			continue
		}
		wg.Go(func() {
			if same, err := q.Same(q.ctx, i, j); err == nil && same {
				q.twins.Store(q.twinFailure(min(i, j), max(i, j)))
				end()
			}
		})
	}
	wg.Wait()
	end()
}

func (q *Quorum) twinFailure(i, j int) *Failure {
	return &Failure{
		Op: "acquire", Reason: Misconfigured, Final: true, Need: q.need,
		Err: fmt.Errorf("Nodes[%d] (%s) and Nodes[%d] (%s) are the same server", i, q.Nodes[i].Name(), j, q.Nodes[j].Name()),
	}
}
