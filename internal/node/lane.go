package node

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/redis/go-redis/v9"
)

const (
	// lanesPerServer is how many batches may be in progress to one server at once. With two, the
	// server works on one batch while the answers of the other are handed out. All requests for one
	// key use the same lane, so they keep their order.
	lanesPerServer = 2

	// lanesAlone is that for the only node of a quorum: no other node competes for the
	// processors.
	lanesAlone = 4

	// maxBatch bounds a batch: the first caller in it waits for the last one's answer, and
	// the server does nothing else meanwhile. A request keeps it busy for some 2 us.
	maxBatch = 128

	// minBatchCmd is the smallest batch that goes as one script. Below, the script that
	// holds all others costs more than it saves.
	minBatchCmd = 4

	// maxQueued bounds what waits for a server. A queue that moves has at most one request for each
	// caller, who waits as well; one that does not is stalled, and refuses. Refreshes and releases,
	// of which there are no more than locks, are not refused for that.
	maxQueued = 1 << 17

	// maxRegistering bounds what waits for a server because of attempts that are lost already, and are
	// written only to get their contender a place there (see Entry.Release): some batches.
	maxRegistering = 4 * maxBatch
)

// A lane is the way to one server for a share of the keys: requests collect in its queue while a
// batch is in progress, then go together as the next batch.
//
// One batch at a time is what keeps the order: a request is written only after every
// earlier one of the lane was answered, or lost with its connection. So a release needs
// no more than its place in the queue to come after the acquire it undoes; only a lost
// connection leaves a request indeterminate, and that is a debt (see Entry).
//
// The alternatives that were measured and dropped: a goroutine per node and request on a
// pool of connections is 3 to 7 times slower with a thousand callers and keeps no order;
// a pipelining layer that replays batches on new connections puts an undo before its
// acquire.
//
// What a lane's server is given for its answers is counted from when they were requested: see watchdog. A
// connection of the lane's own shows when that is.
//
// A caller that may block, and finds the lane idle, is a batch of one: it writes and reads
// by itself, which saves two switches between goroutines (see exchangeNow).
//
// So two goroutines may use the connection, run's and such a caller's, but never at once: the one that has
// made the queue busy (take, claim) owns the lane until rest. "The lane is busy", at a function, means that
// its caller is that one.
type lane struct {
	queue
	s        *Server
	watchdog watchdog

	client *redis.Client             // with one connection, which nobody else uses, and which waits long for answers
	quick  *redis.Client             // the same, and waits no longer than a caller may
	conn   atomic.Pointer[conn.Conn] // that connection, see uses; nil before the first

	dialing atomic.Pointer[context.CancelFunc] // ends the dial of it that began last

	// For the goroutine that made the queue busy.
	calls         calls
	epoch         *Epoch        // in which the batch in progress asks for votes
	by            *scripts      // of that epoch
	strict        bool          // they make the strict check; or they did not, and prove has made up for it
	verified      *verification // the last one when it was written
	asked         time.Time     // when it was about to be written
	written       time.Time     // when it was
	lasted        time.Duration // from then to its answer, by the clock that says more
	cmds          []*redis.Cmd  // of the batch in progress, from calls
	all           []redis.Cmder // cmds, and what goes before some of them
	batchCmd      batchCmd      // instead, if the batch is one command
	answers       []response    // of the batch in progress
	first         scriptName    // of the first command of the batch in progress
	names         [opBatch + 1]scriptName
	grantsNothing bool   // the node's epoch cannot be had: releases are to grant nothing
	moved         uint64 // s.moved when the connections were last given up for another master: see followMaster
	long, brief   ctxCache
}

// flushed is called just before the first byte of the batch in progress is written.
func (l *lane) flushed() {
	l.written = time.Now()
	l.begin(l.written)
	l.watchdog.flushed()
}

// run serves the lane until it is closed and empty.
func (l *lane) run() {
	defer l.s.n.wg.Done()
	batch := make([]*request, 0, maxBatch)
	defer l.long.end() // closed and empty: nobody makes the lane busy any more
	defer l.brief.end()
	answering := true
	for {
		batch = l.take(batch[:0], maxBatch)
		if len(batch) == 0 {
			return
		}
		if state := l.s.suspended.Load(); state != nil {
			has := l.hasConnection()
			batch = completeBut(func(r *request) bool { return has && state.allows(r) }, batch, failed(state.err))
		}
		switch {
		case len(batch) == 0: // nothing is left to be sent
		case !answering && l.s.n.closing.Load(): // one batch was trial enough
			completeAll(batch, failed(ErrClosed))
		default:
			answering = l.exchange(l.bounded(), batch)
			if !answering && l.s.silent.Load() != 0 { // what has waited is not to wait for another try
				completeAll(l.refuse(), failed(ErrStalled))
			}
		}
		clear(batch)
		l.rest()
	}
}

// bounded is the context of the next exchange. It lasts for ExchangeTime at most; once the node closes,
// it ends ExchangeTime after Close began, so that Close does not wait for one exchange after the other.
func (l *lane) bounded() context.Context {
	n, now := l.s.n, time.Now()
	least, more := n.ExchangeTime()/4*3, n.ExchangeTime()/4
	if n.closing.Load() {
		least, more = 0, max(0, time.Duration(n.closeBy.Load()-int64(n.at(now))))
	}
	return l.long.context(now, least, more)
}

// failedDials is how many dials of a lane may fail, over the life of the node, until go-redis refuses further ones by
// itself, for up to a second after the server is back: it counts up to PoolSize, and a dial that succeeds resets
// nothing. A lane has one connection whatever its PoolSize, which costs 8 bytes each.
const failedDials = 1 << 10

// errDialGivenUp is the error of a dial that hung while the server has answered another.
var errDialGivenUp = errors.New("dial given up: the server has answered a later one")

// connect makes l's clients. Nothing is dialled yet.
func (l *lane) connect() {
	n := l.s.n
	o := conn.Options(l.s.from, n.timeout, l.s.dials, func(c *conn.Conn) {
		c.OnUse, c.OnWrite = func() { l.uses(c) }, l.watchdog.wrote
	}, func(unnamed error) {
		if c := l.conn.Load(); c != nil {
			c.Greeted()
			c.SetStrict(false)
		}
		if unnamed != nil {
			n.reportUnnamed(unnamed)
		}
	})
	l.s.redial(o)
	dial := o.Dialer
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, giveUp := context.WithCancel(ctx)
		defer giveUp()
		l.dialing.Store(&giveUp)
		c, err := dial(ctx, network, addr)
		if err != nil && errors.Is(ctx.Err(), context.Canceled) {
			err = errDialGivenUp
		}
		return c, err
	}
	o.ReadTimeout, o.WriteTimeout = n.TransportTime(), n.TransportTime()
	o.PoolSize = failedDials
	l.client = redis.NewClient(o)
	l.quick = conn.WithTimeout(l.client, n.timeout)
}

// uses makes c l's connection: it is about to be written to. Not each one that is dialled is, not even the last: a
// dial that was given up may end while another connection is in use, and that one is used again.
func (l *lane) uses(c *conn.Conn) {
	if l.conn.Load() != c {
		l.conn.Store(c)
		l.watchdog.moved()
	}
}

// connected reports whether l has had a connection that was greeted.
func (l *lane) connected() bool {
	c := l.conn.Load()
	return c != nil && !c.Strict()
}

// hasConnection reports whether l need not dial, as far as is known. The lane is busy.
func (l *lane) hasConnection() bool { return l.client.PoolStats().IdleConns > 0 }

// exact sets whether read deadlines on l's connection are exact, or are extended while this process is late.
func (l *lane) exact(yes bool) {
	if c := l.conn.Load(); c != nil {
		c.SetExact(yes)
	}
}

// boundReads sets whether each answer on l's connection must arrive within NodeTimeout.
func (l *lane) boundReads(yes bool) {
	if c := l.conn.Load(); c != nil {
		c.SetStrict(yes)
	}
}

// ctxCache gives a lane's exchanges the context that bounds them. A context lasts for a
// while and serves many exchanges, because making one costs as much as a small exchange.
type ctxCache struct {
	ctx    context.Context
	cancel context.CancelFunc
	until  time.Time // when another one is due
}

// context has at least that time left from now on, and at most so much more.
func (p *ctxCache) context(now time.Time, least, more time.Duration) context.Context {
	if p.ctx == nil || !now.Before(p.until) {
		p.end()
		p.ctx, p.cancel = context.WithTimeout(context.Background(), least+more)
		p.until = now.Add(more)
	}
	return p.ctx
}

func (p *ctxCache) end() {
	if p.cancel != nil {
		p.cancel()
	}
}
