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

	"github.com/flightlock/flightlock/internal/node"
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

	// Same tells whether two nodes are one server.
	Same func(ctx context.Context, i, j int) (bool, error)
}

// Quorum asks all nodes at once and decides by majority. It is safe for concurrent use,
// never blocks, and starts no goroutine per request: replies drive it.
type Quorum struct {
	Config
	need int

	twins   atomic.Pointer[Failure] // set for good once two nodes proved to be one server
	verdict sync.Mutex              // guards checking
	check   *twinCheck              // the search for twins under way, nil if none
	wg      sync.WaitGroup
}

// New makes a Quorum.
func New(cfg Config) *Quorum {
	return &Quorum{Config: cfg, need: len(cfg.Nodes)/2 + 1}
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
}

// Prepare makes the lease of one attempt, with an owner of its own. It asks nobody yet.
func (q *Quorum) Prepare(key string, ttl time.Duration, tokens int64) *Lease {
	l := &Lease{q: q, target: node.NewTarget(key, q.Owner()), ttl: ttl, tokens: tokens, entries: make([]node.Entry, len(q.Nodes))}
	for i := range l.entries {
		l.entries[i].Init(q.Nodes[i], l.target, i)
	}
	return l
}

// Close waits for what the quorum itself has started. The nodes are closed by their owner.
func (q *Quorum) Close() { q.wg.Wait() }

// twinCheck is one search for two nodes that are the same server.
type twinCheck struct{ ended chan struct{} }

// suspect is called when node i answered "already yours" to an owner it had not seen: some
// other node of the list must be the same server. One search at a time finds out which;
// its goroutine ends with the last of its commands. The channel closes then.
func (q *Quorum) suspect(i int) <-chan struct{} {
	q.verdict.Lock()
	defer q.verdict.Unlock()
	if q.check == nil && q.twins.Load() != nil {
		known := make(chan struct{})
		close(known)
		return known
	}
	if q.check == nil {
		q.check = &twinCheck{ended: make(chan struct{})}
		q.wg.Add(1)
		go q.findTwin(i, q.check)
	}
	return q.check.ended
}

func (q *Quorum) findTwin(i int, c *twinCheck) {
	defer q.wg.Done()
	defer func() {
		q.verdict.Lock()
		q.check = nil
		q.verdict.Unlock()
		close(c.ended)
	}()
	for j := range q.Nodes {
		if j == i {
			continue
		}
		if same, err := q.Same(context.Background(), i, j); err == nil && same {
			q.twins.Store(&Failure{
				Op: "acquire", Reason: Misconfigured, Final: true, Need: q.need,
				Err: fmt.Errorf("Nodes[%d] (%s) and Nodes[%d] (%s) are the same server",
					min(i, j), q.Nodes[min(i, j)].Name(), max(i, j), q.Nodes[max(i, j)].Name()),
			})
			return
		}
	}
}
