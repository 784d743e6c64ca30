package node

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// exchange writes a batch, waits for its answers and completes every request in it. It
// says whether the server answered.
//
// Requests whose script the server did not know go again, in the same order, after the
// scripts were loaded: still before anything that waits in the lane's queue. What has
// become obsolete meanwhile does not: an acquire must not be written after the answer to
// the release that undoes it, which the server may have known the script of.
//
// A batch that the server refused to begin with goes again too, each request by itself: one
// of them may have a key that the server's user must not touch, which is no affair of the
// others.
func (l *lane) exchange(ctx context.Context, batch []*request) bool {
	s := l.s
	apart, loaded := false, false
	l.followMaster(ctx)
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
		if sent && l.elsewhere(loaded) { // else there is no connection to give up
			l.disconnect(ctx)
		}
		batch = l.completeEach(ctx, batch, sent, try < 3)
		l.forget()
		if len(batch) == 0 {
			return lostBy == nil
		}
		l.watchdog.begin(batch)
		err := l.load(ctx, loads)
		loaded = err == nil // else a server that refuses to load them is dialled again for each release
		l.watchdog.end()
		if conn.IsReply(err) {
			apart = true // the script of a batch is one that votes, too
			s.grantsNothingFor(time.Second)
			batch = completeBut(func(r *request) bool { return !r.op.votes() }, batch, failed(err))
			if len(batch) == 0 {
				return true
			}
		} else if err != nil {
			s.grantsNothingFor(time.Second)
			completeAll(batch, failed(err))
			return false
		}
	}
}

// exchangeNow writes one request and waits for its answer on the goroutine of a caller that may
// block for NodeTimeout. If no answer comes by then, the connection is given up and the request is
// indeterminate. If it has to be dialled again, and is not there by then, the lane goes on with it.
// That is the price for not waiting on another goroutine, and it is paid once: a server that was
// not fast is asked by the lane's own goroutine, and late answers are waited for, until it is fast
// again.
func (l *lane) exchangeNow(r *request, now time.Time) {
	if rep, obsolete := r.obsolete(l.s.n.at(now)); obsolete {
		r.complete(rep, notSent)
		return
	}
	if l.moved != l.s.moved.Load() { // which may take a dial
		l.putBack(r)
		return
	}
	timeout := l.s.n.timeout
	defer l.forget()
	if r.op == opAcquire {
		r.e.t.begin(clock.Now())
	}
	if r.op == opRelease { // a caller of Release has been promised that it takes no longer, unless it was stopped
		l.exact(true)
		defer l.exact(false)
	}
	returned := false
	// What the client's owner has put into its path, such as a hook, may panic: the goroutine is its caller's, the
	// request is not.
	defer func() {
		if !returned {
			r.complete(failed(errPanicked), sentHow(l.first.written, errPanicked))
		}
	}()
	got, sent := l.writeOne(l.brief.context(now, timeout, timeout/8), r, now)
	returned = true
	switch {
	case !sent && !conn.IsReply(got.err), refusesAll(got.err): // to find out more, and to give the connection up
		l.putBack(r)
	case !l.complete(r, got, sent, true):
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

// complete ends r by the answer that it got, or sends it on. It says no when the
// server did not know the script and heal allows for another try.
func (l *lane) complete(r *request, got response, sent, heal bool) bool {
	rep, err := outcome(r.op, got)
	if rep.Kind == Replayed && r.e.wasGranted() { // by somebody's release: the node has said so
		rep.Kind = Granted
	}
	if rep.Kind == Granted && l.tooOld() {
		rep = failed(errOld)
	}
	if l.epoch != anyEpoch {
		if l.s.n.guard.Changed != nil && (r.op.votes() || rep.Kind == Renewed && !r.e.unforgotten()) {
			rep.Epoch = l.epoch
		}
		if rep.Kind == Granted && l.s.n.isUnverified.Load() { // somebody else has verified it
			l.s.n.setUnverified(nil)
		}
	}
	switch {
	case invalidates(err):
		l.s.invalidate()
	case l.by != l.epoch.usual && (r.op.votes() && rep.Kind != Failed || rep.Verified):
		l.s.recordVerified(l.verified, l.epoch, l.asked)
		l.by = l.epoch.usual // once is enough
	}
	switch {
	case heal && (conn.HasCode(err, "NOSCRIPT", "EPOCH") || l.s.refusesMarker(r, err)):
		return false
	case l.s.redirect != nil && conn.IsReply(err) && l.s.redirect(l.s, r, err):
	case l.s.redirect != nil && conn.HasCode(err, "TRYAGAIN") && r.narrow():
		l.s.n.route(r)
	default:
		r.complete(rep, sentHow(sent, err))
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
	if !apart && len(batch) >= minBatchCmd && l.s.n.at(began) >= clock.Instant(l.s.noBatchUntil.Load()) {
		return l.writeBatch(ctx, batch, began)
	}
	sent, err = l.writeEach(ctx, batch, began)
	return sent, err, false
}

// begin chooses the scripts for the batch, by what is known now. It is called again when the batch is
// written, which may have waited for a connection until then.
//
// After a batch that took longer than NodeTimeout, the scripts are those that make the strict check: if
// the next batch takes long as well, its grants need no proof afterwards (see tooOld). A server that
// does not report its process (Epoch.NoInfo) makes that check no more often than usual.
func (l *lane) begin(now time.Time) {
	l.epoch, l.verified, l.asked = l.s.epoch.Load(), l.s.verified.Load(), now
	l.by, l.strict = l.epoch.strict, true
	l.grantsNothing = int64(l.s.n.at(now)) < l.s.noGrantsUntil.Load()
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
		name := &l.names[r.script()]
		if i == 0 {
			name = l.first.of(r.script())
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
	l.heard(err, said, began)
	return l.first.written, err
}

// heard notes how an exchange of the lane went. One that has timed out and for which the server was
// suspended before is no reason to do so again: the server may have answered a probe since.
func (l *lane) heard(err, refused error, began time.Time) {
	if conn.TimedOut(err) && l.watchdog.hasBlamed() {
		l.s.recordExchange(err, refused, l.took(began))
		return
	}
	l.s.heard(err, refused, began, l.took(began))
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
// since the last strict check another server may have replaced this one for a while, see epoch.go. That
// takes a process that was stopped or had no processor. The key is set on the server, and is released as after
// any failure.
var errOld = errors.New("granted so long after it was asked for that the server may have been replaced meanwhile")

// tooOld reports whether the grants of the batch that was answered need a proof before they count as
// votes: its scripts made no strict check, and the answer took more than nine times NodeTimeout (one,
// and the conn.MaxGrace by which the watchdog may put it off). See errOld.
func (l *lane) tooOld() bool {
	return l.epoch != anyEpoch && !l.strict && l.lasted > (1+conn.MaxGrace)*l.s.n.timeout
}

// completeEach completes the requests of a batch by their answers, and returns those whose script the
// server did not know. Grants that need a proof are completed last: the proof is another request to the
// server, and nothing else that was answered has to wait for it.
func (l *lane) completeEach(ctx context.Context, batch []*request, sent, heal bool) (unknown []*request) {
	unknown = batch[:0]
	var old []*request
	for i, r := range batch {
		got := l.answers[i]
		switch {
		case l.tooOld() && r.grantedBy(got):
			l.answers[len(old)] = got
			old = append(old, r)
		case !l.complete(r, got, sent, heal):
			unknown = append(unknown, r)
		}
	}
	if old != nil {
		l.completeOld(ctx, old)
	}
	return unknown
}

// completeOld completes the grants of a batch that need a proof, after it has asked the server for one. The
// answer to old[i] is l.answers[i]: completeEach has moved it there. A request without a sink was
// reported as late before. If all were, nobody waits for these grants, and no proof is asked for.
func (l *lane) completeOld(ctx context.Context, old []*request) {
	if slices.ContainsFunc(old, func(r *request) bool { return r.sink != nil }) {
		l.watchdog.begin(old)
		l.prove(ctx)
		l.watchdog.end()
	}
	for i, r := range old {
		l.complete(r, l.answers[i], true, false)
	}
}

// grantedBy reports whether got is a grant, and r is still wanted. If r is being released already, its
// grant is not put aside for a proof: the release may stand behind it in the same batch, and r has to
// be completed first.
func (r *request) grantedBy(got response) bool {
	if !r.op.votes() {
		return false
	}
	rep, _ := outcome(r.op, got)
	_, obsolete := r.obsolete(r.e.n.now())
	return rep.Kind == Granted && !obsolete
}

// prove asks the server for its epoch once more, and sets l.strict if it is still the one in which the
// batch asked for votes. Then the server had that epoch when it granted them, because this answer is
// newer than the grants. A boot that another caller began would prove nothing: it may be older.
func (l *lane) prove(ctx context.Context) {
	if err := l.s.takeLoading(ctx); err != nil {
		return
	}
	defer l.s.putLoading()
	_ = l.s.boot(ctx, "", false, func(m Epoch, err error) { l.strict = err == nil && m.Name == l.epoch.Name })
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

// writeBatch sends the batch as one command. If the server refuses that, although it may
// not refuse each request, it is left alone with batches for a while. The answers of a
// batch come all or not at all: a connection that dies leaves every request indeterminate.
func (l *lane) writeBatch(ctx context.Context, batch []*request, began time.Time) (sent bool, err error, refused bool) {
	s := l.s
	cmd := l.batchCmd.of(ctx, batch, l.first.of(opBatch))
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
		s.noBatches(err)
		err = nil
	}
	if refused { // each request will be asked for by itself
		s.recordExchange(nil, refusal(l.answers), l.took(began))
	} else {
		l.heard(err, refusal(l.answers), began)
	}
	return l.first.written, err, refused
}

// writeOne is write for a request by itself, which costs less than a pipeline of one.
func (l *lane) writeOne(ctx context.Context, r *request, now time.Time) (got response, sent bool) {
	c := l.calls.at(0)
	l.begin(now)
	cmd := c.of(r, l.first.of(r.script()))
	l.s.n.commands.Add(1)
	err := l.quick.Process(ctx, cmd)
	got = responseOf(cmd)
	l.answers = append(l.answers[:0], got)
	var said error
	if conn.IsReply(err) && l.first.written {
		err, said = nil, refusal(l.answers)
	}
	if l.first.written || conn.IsReply(err) { // else the lane finds out
		l.s.recordExchange(err, said, l.took(now))
	}
	return got, l.first.written
}

// forget lets go of what the last batch was about.
func (l *lane) forget() {
	l.calls.forget(len(l.answers))
	l.batchCmd.forget()
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
		err := s.recentRefusal()
		ran := err == nil
		if ran {
			err = s.boot(ctx, "", true, func(Epoch, error) {})
			ran = err == nil || conn.IsReply(err) && !errors.Is(err, conn.ErrLogin)
		}
		if !ran {
			// boot has not loaded them. Connections of before may go on: for what is held they will do.
			_ = l.loadScripts(ctx, lua.Voteless)
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
