package node

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// server is one Redis process that answers requests: a standalone server, or one master
// of a Cluster.
type Server struct {
	n      *Node
	from   *redis.Client // whose options those of the lanes have
	addr   string
	prompt atomic.Bool // the last exchange got its answers, well within a caller's time

	answered  atomic.Int64 // the instant of the last answer
	silent    atomic.Int64 // the instant in which the first exchange began that has had none in its time since then; 0: none has
	failed    atomic.Int64 // the instant of the last exchange without an answer, if none has had one since; 0: it has
	suspended atomic.Pointer[suspension]
	letIn     time.Time // when a probe was let in last, after logins had been refused. For the goroutine that probes

	subscriptionDials conn.Limit // dials of subscription connections
	dials             conn.Limit // what its lanes dial

	loading  chan struct{}                // has a token while scripts are loaded: a mutex is not held that long
	loads    atomic.Uint64                // how often they were. Written by who has the token
	epoch    atomic.Pointer[Epoch]        // in which votes are asked for. Written by who has the token, and before the first request
	verified atomic.Pointer[verification] // the last one

	// Set on a Cluster: unnamed says that its map did not name this master when it was met, so that from
	// is the node's own; redirect sends a request on that belongs elsewhere, and says
	// whether it did; unreachable hears of each batch that got no answer.
	unnamed     bool
	redirect    func(s *Server, r *request, answer error) bool
	unreachable func(*Server)

	dropped atomic.Bool // a Cluster names it no more. Set for good, before its lanes are closed
	strikes int         // towards that: see gone.go

	// apart is until when requests go as commands of their own, because the server has
	// refused to take a batch as one. Always, on a Cluster: a script has keys of one slot.
	apart atomic.Int64

	start sync.Once // starts the lanes' goroutines, with the first request
	lanes []lane
}

// maxSubscriptionDials bounds the dials of subscription connections to one server that hang at once.
// One that hangs forever does not end the subscriptions.
const maxSubscriptionDials = 4

func newServer(n *Node, c *redis.Client) *Server {
	s := &Server{
		n: n, from: c, addr: c.Options().Addr, loading: make(chan struct{}, 1), subscriptionDials: conn.NewLimit(maxSubscriptionDials),
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

// connect makes l's clients. Nothing is dialled yet.
func (l *lane) connect() {
	n := l.s.n
	o := conn.Options(l.s.from, n.timeout, l.s.dials, func(c *conn.Conn) {
		c.OnWrite = l.watchdog.wrote
		l.conn.Store(c)
	}, func() { l.boundReads(false) })
	o.ReadTimeout, o.WriteTimeout = n.TransportTime(), n.TransportTime()
	l.client = redis.NewClient(o)
	l.quick = conn.WithTimeout(l.client, n.timeout)
}

// connected reports whether l has had a connection that was greeted.
func (l *lane) connected() bool {
	c := l.conn.Load()
	return c != nil && !c.Strict()
}

// exact has no read deadline on l's connection extended, or again.
func (l *lane) exact(yes bool) {
	if c := l.conn.Load(); c != nil {
		c.SetExact(yes)
	}
}

// strict has each answer on l's connection come within NodeTimeout, or not any more.
func (l *lane) boundReads(yes bool) {
	if c := l.conn.Load(); c != nil {
		c.SetStrict(yes)
	}
}

// Client is the client whose options the connections to the server have.
func (s *Server) Client() *redis.Client { return s.from }

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

// push queues r in the lane of its key. When that cannot be, r is settled at once.
func (s *Server) push(r *request) {
	if state := s.suspended.Load(); state != nil && !state.allows(r) {
		r.settle(failed(state.err), notSent)
		return
	}
	s.start.Do(s.run)
	l := &s.lanes[int(r.e.t.lane)%len(s.lanes)]
	if r.inline && s.prompt.Load() && l.connected() {
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
		r.settle(failed(err), notSent)
	}
}

// run starts a goroutine for each lane. close ends them.
func (s *Server) run() {
	s.n.wg.Add(len(s.lanes))
	for i := range s.lanes {
		go s.lanes[i].run()
	}
}

// close ends the lanes. They are closed before it is settled whether anybody serves them:
// what gets into a lane before that has started its goroutine.
func (s *Server) close() {
	for i := range s.lanes {
		s.lanes[i].close()
	}
	s.start.Do(func() {}) // nothing to start any more
}

// exchange writes a batch, waits for its answers and settles every request in it. It
// says whether the server answered.
//
// Requests whose script the server did not know go again, in the same order, after the
// scripts were loaded: still before anything that waits in the lane's queue. What has
// become moot meanwhile does not: an acquire must not be written after the answer to
// the release that undoes it, which the server may have known the script of.
//
// A batch that the server refused to begin with goes again too, each request by itself: one
// of them may have a key that the server's user must not touch, which is no affair of the
// others.
func (l *lane) exchange(ctx context.Context, batch []*request) bool {
	s := l.s
	apart := false
	for try := 0; ; try++ {
		if batch = unwritten(batch); len(batch) == 0 {
			return true
		}
		loads := s.loads.Load()
		l.watchdog.begin(batch)
		sent, lostBy, refused := l.write(ctx, batch, apart)
		l.watchdog.end()
		if refused {
			apart = true
			continue
		}
		if l.elsewhere(try > 0) {
			l.disconnect(ctx)
		}
		batch = l.settleEach(ctx, batch, sent, try < 3)
		l.forget()
		if len(batch) == 0 {
			return lostBy == nil
		}
		l.watchdog.begin(batch)
		err := l.load(ctx, loads)
		l.watchdog.end()
		if conn.IsReply(err) {
			apart = true // the script of a batch is one that votes, too
			batch = settleBut(func(r *request) bool { return !r.op.votes() }, batch, failed(err))
			if len(batch) == 0 {
				return true
			}
		} else if err != nil {
			settleAll(batch, failed(err))
			return false
		}
	}
}

// exchangeNow writes one request and waits for its answer on the goroutine of a caller
// that may block for NodeTimeout. If no answer comes by then, the connection is given up
// and the request is in doubt. If it has to be dialled again, and is not there by then, the lane goes on with it. That is the price for not waiting on another goroutine, and
// it is paid once: a server that was not prompt is asked by the lane's own goroutine, and
// late answers are waited for, until it is prompt again.
func (l *lane) exchangeNow(r *request, now time.Time) {
	if rep, moot := r.moot(l.s.n.at(now)); moot {
		r.settle(rep, notSent)
		return
	}
	timeout := l.s.n.timeout
	defer l.forget()
	if r.op == opAcquire {
		r.e.t.begin(clock.Now())
	}
	if r.op == opRelease { // a caller of Release has been promised that it takes no longer
		l.exact(true)
		defer l.exact(false)
	}
	returned := false
	defer func() { // what the client's owner has put into the way may panic: the goroutine is its caller's, the request is not
		if !returned {
			r.settle(failed(errPanicked), sentHow(l.first.written, errPanicked))
		}
	}()
	got, sent := l.writeOne(l.brief.context(now, timeout, timeout/8), r, now)
	returned = true
	switch {
	case !sent && !conn.IsReply(got.err): // to find out more than that
		l.putBack(r)
	case !l.settle(r, got, sent, true):
		l.missed = conn.HasCode(got.err, "NOSCRIPT")
		l.putBack(r) // to have the scripts loaded
	}
}

// errPanicked is why a request has no answer on whose way to the node something has panicked.
var errPanicked = errors.New("what the client has in the way to the server has panicked")

// response is what a request got: a value, or an error of the server or of the way to it.
type response struct {
	val any
	err error
}

func responseOf(cmd *redis.Cmd) response { return response{cmd.Val(), cmd.Err()} }

// settle ends r by the answer that it got, or sends it on. It says no when the
// server did not know the script and heal allows for another try.
func (l *lane) settle(r *request, got response, sent, heal bool) bool {
	rep, err := outcome(r.op, got)
	if rep.Kind == Granted && l.tooOld() {
		rep = failed(errOld)
	}
	if rep.Kind == Granted && l.epoch != anyEpoch {
		if l.s.n.guard.Changed != nil {
			rep.Epoch = l.epoch
		}
		if l.s.n.isUnverified.Load() { // somebody else has verified it
			l.s.n.setUnverified(nil)
		}
	}
	switch {
	case invalidates(err):
		l.s.invalidate()
	case l.by != l.epoch.usual && r.op.votes() && rep.Kind != Failed:
		l.s.recordVerified(l.verified, l.epoch, l.asked)
		l.by = l.epoch.usual // once is enough
	}
	switch {
	case heal && conn.HasCode(err, "NOSCRIPT", "EPOCH"):
		return false
	case l.s.redirect != nil && conn.IsReply(err) && l.s.redirect(l.s, r, err):
	case l.s.redirect != nil && conn.HasCode(err, "TRYAGAIN") && r.narrow():
		l.s.n.route(r)
	default:
		r.settle(rep, sentHow(sent, err))
	}
	return true
}

// outcome is what became of a request that was executed. When a connection is cut,
// go-redis gives the error to the whole pipeline; what was answered before that has its
// value nevertheless.
func outcome(op op, got response) (Reply, error) {
	if got.err != nil && !conn.IsReply(got.err) {
		if rep := parse(op, got.val, nil); rep.Kind != Failed {
			return rep, nil
		}
	}
	return parse(op, got.val, got.err), got.err
}

// write sends the batch on one connection and reads what comes back, into l.answers. It says
// whether any of it may have reached the connection, and what kept the server from
// answering all of it; or that the server refused the batch as a whole. It blocks until
// ctx ends at most.
func (l *lane) write(ctx context.Context, batch []*request, apart bool) (sent bool, err error, refused bool) {
	l.answers = l.answers[:0]
	began := time.Now()
	l.begin(began)
	if !apart && len(batch) >= minTogether && l.s.n.at(began) >= instant(l.s.apart.Load()) {
		return l.writeTogether(ctx, batch, began)
	}
	sent, err = l.writeEach(ctx, batch, began)
	return sent, err, false
}

// begin chooses the scripts for the batch, by what is known now. It is called again when the batch is
// written, which may have waited for a connection until then.
//
// After a batch that took longer than NodeTimeout, the scripts are those that take the closer look: if
// the next batch takes long as well, its grants need no proof afterwards (see tooOld). A server that
// refuses the look (Blind) is not asked for it more often than usual.
func (l *lane) begin(now time.Time) {
	l.epoch, l.verified, l.asked = l.s.epoch.Load(), l.s.verified.Load(), now
	l.by, l.strict = l.epoch.strict, true
	slow := l.lasted > l.s.n.timeout && l.epoch.NoInfo == nil
	if !slow && l.verified.counts(l.epoch, now) {
		l.by, l.strict = l.epoch.usual, false
	}
}

// writeEach sends the batch as a pipeline of a command for each request.
func (l *lane) writeEach(ctx context.Context, batch []*request, began time.Time) (sent bool, err error) {
	l.cmds, l.all = l.cmds[:0], l.all[:0]
	for i, r := range batch {
		if r.asking {
			l.all = append(l.all, redis.NewCmd(ctx, "ASKING"))
		}
		c := l.calls.at(i)
		name := &l.names[r.op]
		if i == 0 {
			name = l.first.of(r.op)
		}
		cmd := c.of(r, name)
		l.cmds, l.all = append(l.cmds, cmd), append(l.all, cmd)
	}
	l.s.n.commands.Add(uint64(len(batch)))
	err = l.execute(ctx, l.all...)
	if err != nil && !l.first.written {
		unsent(l.cmds, err)
	}
	for _, cmd := range l.cmds {
		l.answers = append(l.answers, responseOf(cmd))
	}
	var said error
	if l.first.written && conn.IsReply(err) {
		err, said = nil, refusal(l.answers)
	}
	l.s.heard(err, said, began, l.took(began))
	return l.first.written, err
}

// took is how long the batch under way, which began then, has taken: as soon as it was written, since that.
func (l *lane) took(began time.Time) time.Duration {
	if l.first.written {
		began = l.written
	}
	now := time.Now()
	l.lasted = -clock.Left(now, began)
	return now.Sub(began)
}

// errOld is the error of a grant that is not counted as a vote, because its answer was handled too late:
// since the last look another server may have replaced this one for a while, see epoch.go. It takes a
// process that was stopped or had no processor. The key is set on the server, and is released as after
// any failure.
var errOld = errors.New("granted so long after it was asked for that the server may have been replaced meanwhile")

// tooOld reports whether the grants of the batch that was answered need a proof before they count as
// votes: its scripts took no closer look, and the answer took more than nine times NodeTimeout (one,
// and the maxGrace by which the watchdog may put it off). See errOld.
func (l *lane) tooOld() bool {
	return l.epoch != anyEpoch && !l.strict && l.lasted > (1+conn.MaxGrace)*l.s.n.timeout
}

// settleEach settles the requests of a batch by their answers, and returns those whose script the
// server did not know. Grants that need a proof are settled last: the proof is another request to the
// server, and nothing else that was answered has to wait for it.
func (l *lane) settleEach(ctx context.Context, batch []*request, sent, heal bool) (unknown []*request) {
	unknown = batch[:0]
	var old []*request
	for i, r := range batch {
		got := l.answers[i]
		switch {
		case l.tooOld() && r.grantedBy(got):
			l.answers[len(old)] = got
			old = append(old, r)
		case !l.settle(r, got, sent, heal):
			unknown = append(unknown, r)
		}
	}
	if old != nil {
		l.settleOld(ctx, old)
	}
	return unknown
}

// settleOld settles the grants of a batch that need a proof, after it has asked the server for one. The
// answer to old[i] is l.answers[i]: settleEach has moved it there. A request without a sink was
// reported as late before. If all were, nobody waits for these grants, and no proof is asked for.
func (l *lane) settleOld(ctx context.Context, old []*request) {
	if slices.ContainsFunc(old, func(r *request) bool { return r.sink != nil }) {
		l.watchdog.begin(old)
		l.prove(ctx)
		l.watchdog.end()
	}
	for i, r := range old {
		l.settle(r, l.answers[i], true, false)
	}
}

// grantedBy reports whether got is a grant, and r is still wanted. If r is being released already, its
// grant is not put aside for a proof: the release may stand behind it in the same batch, and r has to
// be settled first.
func (r *request) grantedBy(got response) bool {
	if !r.op.votes() {
		return false
	}
	rep, _ := outcome(r.op, got)
	_, moot := r.moot(r.e.n.now())
	return rep.Kind == Granted && !moot
}

// prove asks the server for its epoch once more, and sets l.strict if it is still the one in which the
// batch asked for votes. Then the server had that epoch when it granted them, because this answer is
// newer than the grants. A boot that another caller began would prove nothing: it may be older.
func (l *lane) prove(ctx context.Context) {
	if err := l.s.takeLoading(ctx); err != nil {
		return
	}
	defer l.s.putLoading()
	_ = l.s.boot(ctx, "", func(m Epoch, err error) { l.strict = err == nil && m.Name == l.epoch.Name })
}

// execute has commands executed in order. One alone costs a third less if it is no pipeline.
func (l *lane) execute(ctx context.Context, all ...redis.Cmder) error {
	if len(all) == 1 {
		return l.client.Process(ctx, all[0])
	}
	pipe := l.client.Pipeline()
	_ = pipe.BatchProcess(ctx, all...)
	_, err := pipe.Exec(ctx)
	return err
}

// writeTogether sends the batch as one command. If the server refuses that, although it may
// not refuse each request, it is left alone with batches for a while. The answers of a
// batch come all or not at all: a connection that dies leaves every request in doubt.
func (l *lane) writeTogether(ctx context.Context, batch []*request, began time.Time) (sent bool, err error, refused bool) {
	s := l.s
	cmd := l.together.of(ctx, batch, l.first.of(opBatch))
	s.n.commands.Add(uint64(len(batch)))
	err = l.execute(ctx, cmd)
	each, _ := cmd.Val().([]any)
	for i := range batch {
		got := response{err: err} // and no value, if the answer does not fit the batch
		if len(each) == len(batch) {
			got = inBatch(each[i])
		}
		l.answers = append(l.answers, got)
	}
	if l.first.written && conn.IsReply(err) {
		refused = neverRan(err) && !conn.HasCode(err, "NOSCRIPT")
		s.keepApart(err)
		err = nil
	}
	if refused { // each request will be asked for by itself
		s.felt(nil, refusal(l.answers), l.took(began))
	} else {
		s.heard(err, refusal(l.answers), began, l.took(began))
	}
	return l.first.written, err, refused
}

// keepApart has requests go as commands of their own, after the server has said err to a
// batch of them: for a while if others in the batch or the server's state are the reason,
// else for good.
func (s *Server) keepApart(err error) {
	switch {
	case conn.HasCode(err, "NOSCRIPT"):
	case conn.HasCode(err, "CROSSSLOT") || !neverRan(err):
		s.apart.Store(math.MaxInt64)
	default:
		s.apart.Store(int64(s.n.now().add(time.Second)))
	}
}

// writeOne is write for a request by itself, which costs less than a pipeline of one.
func (l *lane) writeOne(ctx context.Context, r *request, now time.Time) (got response, sent bool) {
	c := l.calls.at(0)
	l.begin(now)
	cmd := c.of(r, l.first.of(r.op))
	l.s.n.commands.Add(1)
	err := l.quick.Process(ctx, cmd)
	got = responseOf(cmd)
	l.answers = append(l.answers[:0], got)
	var said error
	if conn.IsReply(err) && l.first.written {
		err, said = nil, refusal(l.answers)
	}
	if l.first.written || conn.IsReply(err) { // else the lane finds out
		l.s.felt(err, said, l.took(now))
	}
	return got, l.first.written
}

// forget lets go of what the last batch was about.
func (l *lane) forget() {
	l.calls.forget(len(l.answers))
	l.together.forget()
	clear(l.answers)
}

// unsent gives every command the reason why there was no connection for it. go-redis
// leaves that out when the reason is an answer of the server to the handshake, such as a
// wrong password.
func unsent(cmds []*redis.Cmd, err error) {
	for _, cmd := range cmds {
		cmd.SetErr(err)
	}
}

// A scriptName is the name of a script as the argument of a command. Which one it is, in which epoch and whether with
// a closer look, is decided when the command is written, and not when it is made: there may be a dial between.
//
// That of a batch's first command tells besides that go-redis came as far as writing it. Errors do not tell: a timeout
// may mean that the batch went out and was not answered, or that the server did not even take part in the
// handshake of a new connection, and only the first leaves a doubt.
type scriptName struct {
	l       *lane
	op      op
	begins  bool // it is that of a batch's first command
	written bool // by the goroutine that executes the batch
}

// of begins anew, for a command of that kind.
func (n *scriptName) of(o op) *scriptName {
	n.op, n.written = o, false
	return n
}

// MarshalBinary is called when the command is written.
func (n *scriptName) MarshalBinary() ([]byte, error) {
	if n.begins && !n.written {
		n.written = true
		n.l.flushed()
	}
	return n.l.by.names[n.op], nil
}

// String is for who logs commands.
func (n *scriptName) String() string { return n.op.String() }

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

// load puts the scripts into the server's cache, unless somebody has done so since the
// caller saw loads. The lane is busy.
func (l *lane) load(ctx context.Context, loads uint64) error {
	s := l.s
	if err := s.takeLoading(ctx); err != nil {
		return err
	}
	defer s.putLoading()
	if s.loads.Load() != loads {
		return nil
	}
	if s.n.guard != nil {
		err := s.boot(ctx, "", func(Epoch, error) {})
		if errors.Is(err, conn.ErrLogin) || err != nil && !conn.IsReply(err) { // ask has not loaded them. Connections of before may go on: for what is held they will do
			_ = l.loadScripts(ctx, []lua.Script{lua.Refresh, lua.Release})
		}
		return err
	}
	began := time.Now()
	err := l.loadScripts(ctx, lua.All)
	s.observe(time.Since(began), err)
	if err == nil {
		s.loads.Add(1)
	}
	return err
}

// loadScripts loads scripts on l's connection.
func (l *lane) loadScripts(ctx context.Context, scripts []lua.Script) error {
	l.boundReads(true)
	defer l.boundReads(false)
	return loadScripts(ctx, l.client, scripts)
}

// settleBut settles those of batch that are not to be sent, and gives the rest: those that pass.
func settleBut(pass func(*request) bool, batch []*request, rep Reply) []*request {
	rest := batch[:0]
	for _, r := range batch {
		if pass(r) {
			rest = append(rest, r)
		} else {
			r.settle(rep, notSent)
		}
	}
	return rest
}

// fate is what is known of a request that has ended.
type fate uint8

const (
	notSent  fate = iota // the server never saw it and never will
	answered             // the server has executed or refused it
	lost                 // its connection died first: the server may still execute it
)

// sentHow tells the fate of a request that ended with err, in a batch that was sent or not.
func sentHow(sent bool, err error) fate {
	switch {
	case !sent:
		return notSent
	case err == nil || conn.IsReply(err):
		return answered
	}
	return lost
}

// settleAll settles what is not to be sent.
func settleAll(batch []*request, rep Reply) {
	for _, r := range batch {
		r.settle(rep, notSent)
	}
}
