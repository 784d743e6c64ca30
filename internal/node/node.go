// Package node is one Redis deployment that casts one vote: a standalone server, a
// Sentinel-managed master or a whole Redis Cluster.
//
// A request goes Entry -> link.Link -> Redis (on a Cluster a router chooses the link), and its
// Reply goes to the Sink that was passed with it. A caller does not wait for a node, unless it asks inline,
// and is the only one that does: then it reads the reply itself, to save two switches between goroutines. The
// quorum above decides when an answer is too late, and this package continues to find out what became of the
// request, so that no key of an attempt or lease that is over stays on the node.
package node

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/group"
	"github.com/redis/go-redis/v9"
)

// closeTimeout bounds Close, whatever the servers do.
const closeTimeout = 2 * conn.TransportTimeout

// Node is one voter. It is safe for concurrent use.
type Node struct {
	name     string
	client   redis.UniversalClient
	timeout  time.Duration   // NodeTimeout
	alone    bool            // the only node of its quorum
	began    time.Time       // of instants
	commands atomic.Uint64   // requests written, of all kinds
	took     atomic.Int64    // how long the last answer took, in ns; unanswered: a request was late since
	life     context.Context // ends with Close: only releases are written from then on
	end      context.CancelFunc
	debts    debts
	guard    *Guard         // nil: all votes count
	route    func(*request) // hands a request to the server that must answer it
	server   *Server        // the only server; nil on a Cluster
	router   *router        // finds masters; nil if not a Cluster

	// Changed is called when the node was suspended, with the reason, or with nil when it is back. It
	// is set before the first request, and called by a goroutine of its own.
	Changed func(name string, err error)

	// Verified is called when the node's epoch cannot be verified, with the reason, or with nil
	// when it was, one call after the other. It is set before the first request, and must not block.
	Verified func(name string, err error)

	// Unnamed is called once if a server refuses a name for its connections, with the reason. It is set before
	// the first request, and must not block.
	Unnamed func(name string, err error)

	// Observe is called for every exchange: how long it took, and why it had no answer, or an
	// error for one. nil: nobody wants to. It is set before the first request, and must not
	// block.
	Observe func(took time.Duration, err error)

	// Vote gets the messages to the client's inbox that are votes (IsVote), on the goroutine that reads, with no
	// mutex held. It must not block. Votes come whether there is a Watch for them or not, as long as the inbox
	// is subscribed. It is set before the first request.
	Vote func(text string)

	// Unheard is called when no messages come from the node, so that who waits polls, with the reason, or with
	// nil when they come again. It is set before the first request, and must not block.
	Unheard func(name string, err error)

	// Moded is called with the Mode of the node when that was found, and when it is another one. It is set
	// before the first request, and must not block.
	Moded func(name, mode string)

	// Polled says that nobody subscribes to the node. It is set before the first request.
	Polled bool

	unnamed sync.Once              // calls Unnamed
	found   atomic.Bool            // a link has booted, so that Mode has something to say
	moded   atomic.Pointer[string] // the Mode that Moded was called with last; nil: none
	topics  topics

	wg sync.WaitGroup // every goroutine of this node

	mu      sync.Mutex // guards what follows
	servers []*Server
	closed  bool
	lastErr error // the last transport error, until the node answers again

	unverified error // see Unverified
}

// closeTime is closeTimeout for that.
func (n *Node) closeTime() time.Duration { return CloseTime(n.timeout) }

// CloseTime is how long Close of a node takes at most.
func CloseTime(nodeTimeout time.Duration) time.Duration { return max(closeTimeout, 4*nodeTimeout) }

// ExchangeTime bounds one batch from the search for a connection to the last answer: a client may
// take half a minute to find out that it cannot dial. It is below closeTime, because Close waits for
// batches that are in progress.
func (n *Node) ExchangeTime() time.Duration { return n.closeTime() / 8 * 7 }

// New makes a node of a client that somebody else built and will close. What asks for votes has
// connections of its own, made with that client's options, but for those that locking needs
// otherwise (see conn.DialOnce), and messages arrive on them. What compares nodes shares the client's.
// timeout is NodeTimeout; alone says that it is the only node of its quorum.
func New(client redis.UniversalClient, timeout time.Duration, alone bool) (*Node, error) {
	n := &Node{client: client, timeout: timeout, alone: alone, began: clock.Now().Add(-1)}
	n.life, n.end = context.WithCancel(context.Background())
	n.debts.open = map[*Entry]*time.Timer{}
	switch c := client.(type) {
	case *redis.Client:
		n.name = c.Options().Addr
		n.server = n.addServer(c.Options())
		n.route = n.server.push
	case *redis.ClusterClient:
		n.name = fmt.Sprintf("cluster%v", c.Options().Addrs)
		n.router = newRouter(n, c)
		n.route = n.router.route
	default:
		return nil, fmt.Errorf("%T cannot be a node", client)
	}
	return n, nil
}

// Server is the node's only server, nil if the node is a Cluster.
func (n *Node) Server() *Server { return n.server }

// IsCluster reports whether the node is a whole Redis Cluster.
func (n *Node) IsCluster() bool { return n.router != nil }

// Name says which node this is, for errors and logs.
func (n *Node) Name() string { return n.name }

// Rename gives the node another name, before the first request.
func (n *Node) Rename(name string) { n.name = name }

// Commands is how many requests were written to the node so far, of all kinds.
func (n *Node) Commands() uint64 { return n.commands.Load() }

// Debts returns how many releases the node has not acknowledged yet.
func (n *Node) Debts() int { return n.debts.count() }

// LastErr is the last transport error, nil once the node has answered since. It is
// why a node that did not answer in time did not.
func (n *Node) LastErr() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lastErr
}

// Late reports whether the last answer came after NodeTimeout: too late to be a vote, and the
// next one will hardly be sooner. Of a Cluster it is the last answer of any of its masters.
func (n *Node) Late() bool { return n.took.Load() > int64(n.timeout) }

// unanswered is the time of an answer that is not there.
const unanswered = math.MaxInt64

// noAnswer notes that the node has had its time for an answer, and is the error of that.
func (n *Node) noAnswer() error {
	err, took := fmt.Errorf("%w %v", errLate, n.timeout), n.took.Load()
	switch {
	case took <= int64(n.timeout):
		n.took.Store(unanswered)
	case took != unanswered:
		err = fmt.Errorf("%w, which is NodeTimeout: the last answer took %v", err,
			time.Duration(took).Round(time.Microsecond))
	}
	return err
}

// heard records how a batch went.
func (n *Node) heard(err error) {
	n.mu.Lock()
	n.lastErr = err
	n.mu.Unlock()
}

// Close ends the node: requests not yet written fail with ErrClosed, releases among them, and those that are
// owed, are still tried once. It returns when every goroutine has ended, but for those of await, or with
// ctx's error; a goroutine that waits on a stalled server ends within CloseTime, when its exchange is given
// up.
func (n *Node) Close(ctx context.Context) error {
	n.end()
	n.CloseWatches()
	n.debts.hurry()
	n.debts.close()
	err := group.For(ctx, func() { // until the last goroutine of the node has ended
		if n.router != nil {
			n.router.close() // what it still has is in the links then
		}
		n.closeServers(ctx)
		n.wg.Wait()
	})
	if err != nil {
		return fmt.Errorf("node %s: %w", n.name, err)
	}
	return nil
}

func (n *Node) reportUnnamed(err error) {
	if err != nil && n.Unnamed != nil {
		n.unnamed.Do(func() { n.Unnamed(n.name, err) })
	}
}

// addServer adds one Redis process.
func (n *Node) addServer(of *redis.Options) *Server {
	s := newServer(n, of)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.servers = append(n.servers, s)
	if n.closed {
		s.link.Shut()
		n.wg.Go(s.close)
	}
	return s
}

// begin counts a goroutine that is about to begin, unless the node is closed. It ends with wg.Done.
func (n *Node) begin() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return false
	}
	n.wg.Add(1)
	return true
}

// dropServer ends the link of a server that has no use any more.
func (n *Node) dropServer(s *Server) {
	n.mu.Lock()
	n.servers = slices.DeleteFunc(n.servers, func(other *Server) bool { return other == s })
	n.mu.Unlock()
	n.wg.Go(func() {
		s.close()
		if s.down { // as far as anybody was told
			n.reportState(nil)
		}
		n.debts.hurry() // those of requests that it had are for another one
	})
}

// closeServers waits until what the servers have was answered, for ExchangeTime at most, and then ends their
// links.
func (n *Node) closeServers(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, n.ExchangeTime())
	defer cancel()
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	n.each(func(s *Server) { s.link.Shut() })
	n.each(func(s *Server) { _ = s.drain(ctx) })
	n.each((*Server).close)
}

// TurnTime is how long a key is kept for the contender whose turn it is: a notice must
// reach it and its acquire must come back. Each may take as long as a node may take to
// answer, which nodeTimeout is. One that has died costs the others that much, once.
func TurnTime(nodeTimeout time.Duration) time.Duration {
	return min(max(2*nodeTimeout, 100*time.Millisecond), time.Second)
}

// TurnOf begins what the key holds while it is kept for a contender, whose name follows.
const TurnOf = "flightlock:turn:"

// SameServer finds out whether a and b are one server: what is written to a is looked
// for on b. It works through proxies and needs no rights beyond those of a lock.
func SameServer(ctx context.Context, a, b redis.UniversalClient, nonce string) (bool, error) {
	key := Reserved + "same}:" + nonce
	if err := a.Set(ctx, key, nonce, 10*time.Second).Err(); err != nil {
		return false, err
	}
	defer a.Del(context.WithoutCancel(ctx), key)
	got, err := b.Get(ctx, key).Result()
	if errors.Is(err, redis.Nil) {
		return false, nil
	}
	return got == nonce, err
}
