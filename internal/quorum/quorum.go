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
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/group"
	"github.com/flightlock/flightlock/internal/node"
)

// fixedDrift is subtracted from the validity period, besides ttl*DriftFactor: Redis expires
// keys with a precision of a millisecond, and a timer of this process may be as late.
const fixedDrift = 2 * time.Millisecond

// Config configures a Quorum.
type Config struct {
	Nodes       []*node.Node
	NodeTimeout time.Duration // limit for a node's answer to one request
	DriftFactor float64       // share of the ttl by which clocks may differ
	Owner       func() string // a new owner at each call, never the same twice

	// NotifiesRelease reports whether owner's client publishes when it releases a key. Other
	// libraries do not. nil: all clients do. It is called with a Lease's mutex held, so it must not
	// block, nor use the Quorum.
	NotifiesRelease func(owner string) bool

	// Guarded: a new grant of a node that has lost its data does not count until Quarantine is
	// over, which must be above 0. All nodes must be guardable, and not in use yet.
	Guarded    bool
	Quarantine time.Duration

	// EpochName is for node.Guard. If it is set, guardable nodes report their epoch even if not
	// Guarded: so tokens stay above those of a node that lost its data.
	EpochName func() string

	// OnQuarantine is called when node i enters quarantine or leaves it. Calls may arrive out of
	// order. May be nil.
	OnQuarantine func(i int, s Quarantined)

	// OnApart is called when it was found that the scripts of node i may not access keys of two hash
	// slots, so that there is no quarantine, or with nil that they may. It must not block. May be nil.
	OnApart func(i int, why error)

	// Same reports whether two nodes are one server.
	Same func(ctx context.Context, i, j int) (bool, error)
}

// Quorum sends each request to all nodes at once and decides by majority. It is safe for
// concurrent use, and starts no goroutine per request: replies drive it. Its methods do not wait for
// a node, with two exceptions: those that close it, and, with a single node, an acquire or a release
// with inline.
type Quorum struct {
	Config
	need       int
	quarantine *quarantine // nil: there is none
	offers     offers

	rtt       atomic.Int64            // duration of the last attempt that the nodes decided, in ns
	duplicate atomic.Pointer[Failure] // set once two nodes have proved to be one server, and never cleared

	ctx    context.Context // of what tasks do; ends with Close
	cancel context.CancelFunc
	tasks  group.Group // searches for duplicates, bootstraps, and what waits for them

	mu     sync.Mutex    // guards search
	search chan struct{} // closed when the search for duplicates has a result; nil if none is under way
	// bit i: a search that began after the last report of node i has told it from all others
	distinct atomic.Uint64
}

// New makes a Quorum.
func New(cfg Config) *Quorum {
	q := &Quorum{Config: cfg, need: len(cfg.Nodes)/2 + 1}
	q.ctx, q.cancel = context.WithCancel(context.Background())
	for i, n := range cfg.Nodes {
		n.Vote = func(text string) { q.vote(i, text) }
	}
	switch {
	case cfg.Guarded:
		q.quarantine = newQuarantine(q)
	case cfg.EpochName != nil:
		for _, n := range cfg.Nodes {
			if n.Guardable() {
				n.SetGuard(node.Guard{Limit: cfg.Quarantine, Name: cfg.EpochName})
			}
		}
	}
	return q
}

// Need is the number of votes that decide.
func (q *Quorum) Need() int { return q.need }

// Validity is how long a lease of ttl is valid, counted from just before the first request
// was sent.
func (q *Quorum) Validity(ttl time.Duration) time.Duration {
	return ttl - time.Duration(float64(ttl)*q.DriftFactor) - fixedDrift
}

// Grant is what an acquire or a refresh brings.
type Grant struct {
	Until       time.Time // validity deadline
	First, Last int64     // the block of fencing tokens, empty when Last < First
	Rival       string    // of a refresh with namesRival: the contender that waits longest; "": none
	Reserved    bool      // of a refresh: the nodes have reserved a block, which the next refresh may make ours

	// Span is set for a lease that another's release has granted: the nodes keep the key for so long
	// only, until a refresh makes its ttl full.
	Span time.Duration
}

// Marked, as the contender of Prepare, stands for none: it gives the owner the mark of a lease that may be
// retained.
const Marked = "marked"

// Others, as the rival of Release, names none: it says that others wait, as a recall has reported.
const Others = "others"

// Share makes l a read lease, of which many may have the key at a time: the scripts of its requests are
// others, see lua/readers.lua, and a read lease that another's release has granted has the key alone until it
// is refreshed. All else is as for any other lease: any two majorities share a node, and there either the
// readers have the key or one lease that is not theirs. Share is called before Prepare or Offer.
func (l *Lease) Share() { l.target.Share() }

// Prepare makes l the lease of one attempt, with an owner of its own. It sends nothing.
// contender is the name under which this process waits for the key, "" for the first attempt:
// the attempt takes the turn that is reserved for the contender, or registers it as waiting.
func (q *Quorum) Prepare(l *Lease, key string, ttl time.Duration, tokens int64, contender string) {
	l.q, l.scratch = q, newScratch(len(q.Nodes))
	l.scratch.ttl, l.scratch.tokens = ttl, tokens
	owner := q.Owner()
	if contender == Marked {
		owner, contender = owner+node.RetainMark, ""
	}
	if l.target.Shared() {
		owner += node.ShareMark
	}
	l.target.Init(key, owner, contender)
	l.entries = l.one[:]
	if len(q.Nodes) > len(l.one) {
		l.entries = make([]node.Entry, len(q.Nodes))
	}
	for i := range l.entries {
		l.entries[i].Init(q.Nodes[i], &l.target, i)
	}
}

// Leave removes contender from the nodes: its want is withdrawn, or its turn passes to the next. A
// node that does not answer is not asked again: the want, and the turn, expire there.
func (q *Quorum) Leave(key, contender string) {
	t := new(node.Target)
	// an owner that nobody is: contender may be that of a lease that was detached
	t.Init(key, contender+"-", contender)
	p := &node.TurnPass{Contender: contender}
	for i, n := range q.Nodes {
		e := new(node.Entry)
		e.Init(n, t, i)
		e.Release(new(node.RequestBuf), nil, false, p)
	}
}

// CloseWatches ends all watches.
func (q *Quorum) CloseWatches() {
	for _, n := range q.Nodes {
		n.CloseWatches()
	}
}

// Close ends the watches, and waits for the goroutines of the quorum until ctx ends: a comparison of nodes
// may be in a client that is not ours. Their owner closes the nodes first, which ends the open rounds.
func (q *Quorum) Close(ctx context.Context) error {
	q.tasks.Close()
	q.cancel()
	q.CloseWatches()
	return q.tasks.Wait(ctx)
}

// reportDuplicate is called when node i answered "already yours" to an owner that is new to it:
// another node of the list must be the same server. One search at a time finds out which.
func (q *Quorum) reportDuplicate(i int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.distinct.And(^(uint64(1) << i))
	if q.search != nil || q.duplicate.Load() != nil {
		return
	}
	ended := make(chan struct{})
	if q.tasks.Go(func() { q.findDuplicate(i, ended) }) {
		q.search = ended
	}
}

// searchEnded is closed when no search for duplicates is under way.
func (q *Quorum) searchEnded() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.search != nil {
		return q.search
	}
	ended := make(chan struct{})
	close(ended)
	return ended
}

// findDuplicate compares node i with all others at once, so that a node that does not answer
// does not delay the result. ended is closed when the first duplicate is found, or when there
// is none.
func (q *Quorum) findDuplicate(i int, ended chan struct{}) {
	end := sync.OnceFunc(func() {
		q.mu.Lock()
		q.search = nil
		q.mu.Unlock()
		close(ended)
	})
	var wg sync.WaitGroup
	var unclear atomic.Bool
	for j := range q.Nodes {
		if j == i {
			continue
		}
		wg.Go(func() {
			same, err := q.Same(q.ctx, i, j)
			if same || err != nil {
				unclear.Store(true)
			}
			if err == nil && same {
				q.duplicate.Store(q.duplicateFailure(min(i, j), max(i, j)))
				end()
			}
		})
	}
	wg.Wait()
	if !unclear.Load() {
		q.distinct.Or(1 << i)
	}
	end()
}

func (q *Quorum) duplicateFailure(i, j int) *Failure {
	return &Failure{
		Op: "acquire", Reason: Misconfigured, Final: true, Need: q.need,
		Err: fmt.Errorf("nodes[%d] (%s) and nodes[%d] (%s) are the same server", i, q.Nodes[i].Name(), j,
			q.Nodes[j].Name()),
	}
}
