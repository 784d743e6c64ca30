package rediscache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/group"
	"github.com/redis/go-redis/v9"
)

// breaker leaves a server alone that does not answer: after maxFailed failures in a row its requests fail at once, so
// that callers wait for their load only, until a probe is answered. On a Cluster each master counts for itself. All
// requests pass it: lookups, stores and invalidations.
//
// Lookups of a burst may also fail because this process is busy, or its connections are. Then the server is well, and
// loads without locks would make it worse. So the first failure begins probes, one request at a time, and a server is
// left alone only when one of them has failed, too. A probe has a connection of its own: in the pool of the client it
// would wait behind the lookups of the burst. Its failure says nothing if a request was answered meanwhile, however
// long ago that began: its queue moves.
//
// When a probe fails, so do the requests that have begun while it was under way. Otherwise those that began shortly
// before its end would hold up the callers that join their runs for another timeout. As long as it has not failed, they
// have all of their time: where it is answered, their replies may be on their way as well.
//
// A hit reads troubled, and nothing else.
type breaker struct {
	s        *server
	tasks    *group.Group
	closed   <-chan struct{}
	troubled atomic.Bool // some server has failed last

	mu      sync.Mutex // guards servers and what they contain; no request is made under it
	servers map[string]*health
}

// health is one server's, as long as it is probed.
type health struct {
	failed    int           // requests in a row
	confirmed error         // by a probe, which has failed: leftAlone. nil: not
	answered  bool          // a request was, since the last probe began
	probe     chan struct{} // closed when the probe that is under way has failed; nil: none is
	probed    chan struct{} // closed when the first probe is over
	refused   error         // by the last probe: the server lets in nobody else, though it may answer those who are in
}

// down is the error of requests, nil if they are made.
func (h *health) down() error {
	if h == nil || h.failed < maxFailed {
		return nil
	}
	return h.confirmed
}

const (
	maxFailed  = 2
	probeEvery = 250 * time.Millisecond
)

// leftAlone is the error of requests while a server is down. It is no timeout, even if why is one: the caller goes on
// to its load at once, without a lock.
func leftAlone(why error) error {
	return fmt.Errorf("rediscache: the server does not answer: %v (it is probed every %v)", within(why), probeEvery)
}

// get is the lookup of a hit.
func (b *breaker) get(ctx context.Context, key string) (x stored, err error) {
	if b.troubled.Load() {
		failed := send(ctx, b, []string{key}, func(ctx context.Context, _ []string) ([]stored, map[string]error) {
			x, err := b.s.get(ctx, key)
			if err != nil {
				return nil, map[string]error{key: err}
			}
			return []stored{x}, nil
		}, func(_ string, found stored) { x = found })
		return x, failed[key]
	}
	x, err = b.s.get(ctx, key)
	if err != nil || b.troubled.Load() { // which it may not have been when this request began
		failed := map[string]error{}
		if err != nil {
			failed[key] = err
		}
		b.note(ctx, []string{key}, failed)
		err = failed[key]
	}
	return x, err
}

// send makes a request for keys, except those whose servers are down, and passes the results to got. failed has the
// errors of the others.
func send[T any](ctx context.Context, b *breaker, keys []string,
	request func(ctx context.Context, keys []string) ([]T, map[string]error), got func(key string, result T),
) (failed map[string]error) {
	keys, probe, failed := b.admit(keys)
	if len(keys) == 0 {
		return failed
	}
	results, some := untilFailed(ctx, probe, keys, request)
	maps.Copy(failed, some)
	for i, key := range keys {
		if failed[key] == nil {
			got(key, results[i])
		}
	}
	b.note(ctx, keys, failed)
	return failed
}

// admit leaves out keys whose servers are down. If they are on one server, probe is the one that is under way there.
func (b *breaker) admit(keys []string) (asked []string, probe <-chan struct{}, failed map[string]error) {
	failed = map[string]error{}
	if !b.troubled.Load() {
		return keys, nil, failed
	}
	for _, key := range keys {
		of, down := b.state(b.s.owner(key))
		if down != nil {
			failed[key] = down
			continue
		}
		asked = append(asked, key)
		if !b.s.cluster || len(keys) == 1 { // else servers have probes of their own
			probe = of
		}
	}
	return asked, probe, failed
}

// note counts for each server once whether a request to it has failed, and puts the reasons for that into failed.
func (b *breaker) note(ctx context.Context, keys []string, failed map[string]error) {
	troubled := b.troubled.Load()
	reasons := map[string]error{} // of servers that are counted
	for _, key := range keys {
		why := failed[key]
		if why == nil && !troubled {
			continue
		}
		server := b.s.owner(key)
		reason, counted := reasons[server]
		outage := why != nil && b.isOutage(ctx, why)
		switch {
		case counted:
		case why == nil:
			b.succeeded(server)
		case outage:
			reason = b.reason(ctx, b.failed(key), why)
		}
		reasons[server] = reason
		if outage && reason != nil {
			failed[key] = reason
		}
	}
}

// errGoexit is the error of a request that has ended its goroutine.
var errGoexit = errors.New("rediscache: a hook of rdb called runtime.Goexit")

// untilFailed makes a request that fails when a probe does, if there is one. It has a goroutine of its own then,
// because a client reads a reply until the deadline of its ctx, even if that is canceled.
func untilFailed[T any](ctx context.Context, probe <-chan struct{}, keys []string,
	request func(ctx context.Context, keys []string) ([]T, map[string]error),
) ([]T, map[string]error) {
	if probe == nil {
		return request(ctx, keys)
	}
	type result struct {
		list   []T
		failed map[string]error
	}
	done := make(chan result, 1)
	go func() { // ends with the request, which has its timeout
		r := result{failed: failedAll(keys, errGoexit)}
		defer func() { done <- r }()
		got, err := guarded("rdb", func() (result, error) {
			list, failed := request(ctx, keys)
			return result{list, failed}, nil
		})
		if r = got; err != nil {
			r.failed = failedAll(keys, err)
		}
	}()
	select {
	case r := <-done:
		return r.list, r.failed
	case <-probe:
		return nil, failedAll(keys, errTimeout)
	}
}

// invalidate replaces entries by tombstones, and returns those keys for which that failed. It sends nothing to servers
// that are down.
func (b *breaker) invalidate(ctx context.Context, keys []string) (failed map[string]error) {
	return send(ctx, b, keys, b.s.invalidate, func(string, struct{}) {})
}

// isOutage reports whether err is the server's fault. The end of the caller's own ctx is not, nor is a pool without a
// free connection, nor a refusal of this command. A server that refuses every command, or every login, is left alone as
// well: each lookup of a refused login would dial again. So it is not as long as it answers on connections that it let
// in before: see ping.
func (b *breaker) isOutage(ctx context.Context, err error) bool {
	if clock.Ended(ctx) != nil {
		return false
	}
	var refused redis.Error
	if !errors.As(err, &refused) {
		return !errors.Is(err, redis.ErrClosed) && !errors.Is(err, redis.ErrPoolTimeout)
	}
	return redis.IsLoadingError(err) || redis.IsClusterDownError(err) || redis.IsMasterDownError(err) ||
		conn.HasCode(err, "BUSY") || refusesLogin(err)
}

// refusesLogin reports whether err is a reply to a login, or to a command before one. Those without a code of their own
// are for a password without its user, a database that the server does not have, and too many clients. DENIED is the
// protected mode.
func refusesLogin(err error) bool {
	var reply redis.Error
	return conn.HasCode(err, "WRONGPASS", "NOAUTH") || errors.As(err, &reply) &&
		slices.ContainsFunc([]string{"ERR AUTH ", "ERR DB index ", "ERR max number of clients ", "DENIED "},
			func(text string) bool { return strings.HasPrefix(reply.Error(), text) })
}

// state returns an error if a server is down, and when the probe that is under way has failed; nil: none is.
func (b *breaker) state(server string) (probe <-chan struct{}, down error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	h := b.servers[server]
	if h == nil || h.answered { // the failure of the probe that is under way will say nothing
		return nil, nil
	}
	return h.probe, h.down()
}

func (b *breaker) down() (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, h := range b.servers {
		if h.down() != nil {
			n++
		}
	}
	return n
}

// failed counts a request that has failed. nil: the Cache is closed.
func (b *breaker) failed(key string) *health {
	server := b.s.owner(key)
	b.mu.Lock()
	defer b.mu.Unlock()
	h := b.servers[server]
	if h == nil {
		h = &health{probe: make(chan struct{}), probed: make(chan struct{})}
		if !b.tasks.Go(func() { b.probe(h, server, key) }) {
			return nil
		}
		b.servers[server] = h
		b.troubled.Store(true)
	}
	h.failed++
	return h
}

// reason is why the server of a request is left alone, if it is, or why it has closed the connection on which the
// request has failed with err; nil if neither is known. go-redis reports the end of a connection, and not what the
// server has said before that: that all its connections are in use, for instance. It says so to a probe, too, which is
// awaited for as long as one has for its first step.
func (b *breaker) reason(ctx context.Context, h *health, err error) error {
	if h == nil {
		return nil
	}
	closed := closedBy(err)
	if closed {
		select {
		case <-h.probed:
		case <-time.After(b.s.lookups / 2):
		case <-ctx.Done():
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if down := h.down(); down != nil || !closed {
		return down
	}
	return h.refused
}

// closedBy reports whether err is the end of a connection that there was.
func closedBy(err error) bool {
	var op *net.OpError
	var call *os.SyscallError // go-redis unwraps the errors of a handshake
	switch {
	case conn.TimedOut(err):
		return false
	case errors.As(err, &op):
		return op.Op != "dial"
	}
	return errors.As(err, &call) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// succeeded notes that a server has answered a request. Its probe ends when it is over: if it ended now, each failure
// in a queue that moves would begin another one.
func (b *breaker) succeeded(server string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if h := b.servers[server]; h != nil {
		h.failed, h.confirmed, h.answered = 0, nil, true
	}
}

// probe asks for the key until it is answered, a request is, or the Cache is closed. By then the key may have moved to
// another server: what matters is that requests are answered again.
//
// The first probe has half the time of a lookup for each step, since callers wait for it, and so have those that say
// nothing. Once one has failed, the others have all of it: a server that needs more than half is left alone for a while
// at most, and not for ever.
func (b *breaker) probe(h *health, server, key string) {
	for timeout := b.s.lookups / 2; ; {
		refused, err := b.s.ping(key, timeout)
		pause := time.Duration(0)
		switch b.judge(h, server, refused, err) {
		case over:
			return
		case fails:
			timeout, pause = b.s.lookups, probeEvery
			b.s.relearn()
		}
		select {
		case <-time.After(pause):
		case <-b.closed:
			return
		}
		b.mu.Lock()
		if h.probe == nil {
			h.probe = make(chan struct{})
		}
		b.mu.Unlock()
	}
}

// verdict is what follows after a probe.
type verdict uint8

const (
	over  verdict = iota // the server answers
	again                // it has answered requests, and not the probe, which is repeated at once
	fails                // it is repeated after a pause
)

// judge notes the outcome of a probe.
func (b *breaker) judge(h *health, server string, refused, err error) verdict {
	b.mu.Lock()
	defer b.mu.Unlock()
	h.refused = refused
	select {
	case <-h.probed:
	default:
		close(h.probed)
	}
	answered := h.answered
	h.answered = false
	switch {
	case err == nil || !b.isOutage(context.Background(), err) || answered && h.failed == 0:
		delete(b.servers, server)
		b.troubled.Store(len(b.servers) > 0)
		return over
	case answered:
		return again
	}
	h.confirmed = leftAlone(err)
	close(h.probe)
	h.probe = nil
	return fails
}
