package rediscache

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/redis/go-redis/v9"
)

// health is what is known of a server from its first failure until it answers; otherwise it is the zero value. A
// server that does not answer is left alone: after maxFailed failures in a row its requests fail at once, so
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
// A hit reads server.troubled, and nothing else.
type health struct {
	failed    int           // requests in a row
	confirmed error         // by a probe, which has failed; nil: not
	answered  bool          // a request was, since the last probe began
	probe     chan struct{} // closed when the probe that is under way has failed; nil: none is
	probed    chan struct{} // closed when the first probe is over; nil: it is not probed
}

// down is the error of requests, nil if they are made.
func (h *health) down() error {
	if h.failed < maxFailed {
		return nil
	}
	return h.confirmed
}

const (
	maxFailed  = 2
	probeEvery = 250 * time.Millisecond
)

// get is the lookup of a hit, in its turn: "" if there is nothing.
func (s *server) get(ctx context.Context, key string) (entry string, err error) {
	err = s.inTurn(ctx, func() (err error) {
		if s.troubled.Load() > 0 {
			got, failed := send(ctx, s, []string{key}, s.lookUp)
			entry = got[key].entry
			return failed[key]
		}
		entry, err = s.getOnly(ctx, key)
		if err != nil || s.troubled.Load() > 0 { // which it may not have been when this request began
			failed := map[string]error{key: err}
			s.note(ctx, []string{key}, failed)
			err = failed[key]
		}
		return err
	})
	return entry, err
}

// getMany is get for many keys.
func (s *server) getMany(ctx context.Context, keys []string) (got map[string]read, failed map[string]error) {
	err := s.inTurn(ctx, func() error {
		got, failed = send(ctx, s, keys, s.lookUp)
		return nil
	})
	if err != nil {
		failed = failedAll(keys, err)
	}
	return got, failed
}

// request is for many keys: it gets the results of some, and failed has the errors of the others.
type request[T any] func(ctx context.Context, keys []string) (got map[string]T, failed map[string]error)

// send makes a request for keys, except those whose servers are down.
func send[T any](ctx context.Context, s *server, keys []string, r request[T]) (
	got map[string]T, failed map[string]error) {
	asked, probe, down := s.admit(keys)
	if len(asked) == 0 {
		return nil, down
	}
	got, failed = untilFailed(ctx, probe, asked, r)
	s.note(ctx, asked, failed)
	maps.Copy(failed, down)
	return got, failed
}

// admit leaves out keys whose servers are down. If they are on one server, probe is the one that is under way there.
func (s *server) admit(keys []string) (asked []string, probe <-chan struct{}, failed map[string]error) {
	if s.troubled.Load() == 0 {
		return keys, nil, nil
	}
	failed = map[string]error{}
	for _, key := range keys {
		of, down := s.of(key).state()
		if down != nil {
			failed[key] = down
			continue
		}
		asked = append(asked, key)
		if s.cluster == nil || len(keys) == 1 { // else servers have probes of their own
			probe = of
		}
	}
	return asked, probe, failed
}

// note counts for each server once whether a request to it has failed, and puts the reasons for that into failed.
func (s *server) note(ctx context.Context, keys []string, failed map[string]error) {
	troubled := s.troubled.Load() > 0
	if len(failed) == 0 && !troubled {
		return
	}
	reasons := map[*master]error{} // of servers that are counted
	for _, key := range keys {
		why, m := failed[key], s.of(key)
		if why == nil && !troubled { // an answer says nothing of what has failed behind it
			continue
		}
		reason, counted := reasons[m]
		outage := why != nil && isOutage(ctx, why)
		switch {
		case counted:
		case why == nil:
			m.succeeded()
		case outage:
			reason = s.reason(ctx, m, s.failed(m, key), why)
		}
		reasons[m] = reason
		if outage && reason != nil {
			failed[key] = reason
		}
	}
}

// untilFailed makes a request that fails when a probe does, if there is one. It has a goroutine of its own then,
// because a client reads a reply until the deadline of its ctx, even if that is canceled.
func untilFailed[T any](
	ctx context.Context, probe <-chan struct{}, keys []string, r request[T],
) (map[string]T, map[string]error) {
	if probe == nil {
		return r(ctx, keys)
	}
	var got map[string]T
	failed, done := failedAll(keys, errNotSent), make(chan struct{})
	go func() { // ends with the request, which has its timeout; a hook of the user's may call runtime.Goexit
		defer close(done)
		got, failed = r(ctx, keys)
	}()
	select {
	case <-done:
		return got, failed
	case <-probe:
		return nil, failedAll(keys, errTimeout)
	}
}

// isOutage reports whether err is the server's fault. The end of the caller's own ctx is not, nor is a pool without a
// free connection, nor a refusal of this command. A server that refuses every command, or every login, is left alone as
// well: each lookup of a refused login would dial again. So it is not as long as it answers on connections that it let
// in before: see ping.
func isOutage(ctx context.Context, err error) bool {
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

// state returns an error if the server is down, and when the probe that is under way has failed; nil: none is.
func (m *master) state() (probe <-chan struct{}, down error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.health.answered { // the failure of the probe that is under way will say nothing
		return nil, nil
	}
	return m.health.probe, m.health.down()
}

// succeeded notes that the server has answered a request. Its probe ends when it is over: if it ended now, each failure
// in a queue that moves would begin another one.
func (m *master) succeeded() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if h := &m.health; h.probed != nil {
		h.failed, h.confirmed, h.answered = 0, nil, true
	}
}

// down is how many servers are.
func (s *server) down() (n int64) {
	s.masters.Range(func(_, m any) bool {
		if _, down := m.(*master).state(); down != nil {
			n++
		}
		return true
	})
	return n
}

// failed counts a request that has failed, and returns a channel that is closed when the first probe is over; nil: the
// Cache is closed.
func (s *server) failed(m *master, key string) (probed <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := &m.health
	if h.probed == nil {
		if !s.tasks.Go(func() { s.probe(m, key) }) {
			return nil
		}
		h.probe, h.probed, m.refused = make(chan struct{}), make(chan struct{}), nil
		s.troubled.Add(1)
	}
	h.failed++
	return h.probed
}

// reason is why the server of a request is left alone, if it is, or why it has closed the connection on which the
// request has failed with err; nil if neither is known. go-redis reports the end of a connection, and not what the
// server has said before that: that all its connections are in use, for instance. It says so to a probe, too, which is
// awaited for as long as one has for its first step.
func (s *server) reason(ctx context.Context, m *master, probed <-chan struct{}, err error) error {
	var dial *net.OpError // no other error of a socket is one of a dial
	closed := !conn.TimedOut(err) && !conn.IsReply(err) && !(errors.As(err, &dial) && dial.Op == "dial")
	if closed && probed != nil {
		select {
		case <-probed:
		case <-time.After(s.lookups / 2):
		case <-ctx.Done():
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if down := m.health.down(); down != nil || !closed {
		return down
	}
	return m.refused
}

// probe asks for the key until it is answered, a request is, or the Cache is closed. By then the key may have moved to
// another server: what matters is that requests are answered again.
//
// The first probe has half the time of a lookup for each step, since callers wait for it, and so have those that say
// nothing. Once one has failed, the others have all of it: a server that needs more than half is left alone for a while
// at most, and not for ever.
func (s *server) probe(m *master, key string) {
	for timeout := s.lookups / 2; ; {
		over, fails := m.judge(s.ping(key, timeout))
		pause := time.Duration(0)
		switch {
		case over:
			s.troubled.Add(-1)
			return
		case fails:
			timeout, pause = s.lookups, probeEvery
			if s.cluster != nil {
				// go-redis asks who the masters are when a server names another one for a slot, and else once a minute: it
				// would go to a master that has died for as long, although a replica has taken over.
				s.cluster.ReloadState(context.Background())
			}
		}
		select {
		case <-time.After(pause):
		case <-s.ended.Done():
			return
		}
		if fails {
			m.mu.Lock()
			m.health.probe = make(chan struct{})
			m.mu.Unlock()
		}
	}
}

// judge notes the outcome of a probe. It is over if the server answers. If it fails, it is repeated after a pause, and
// otherwise, if requests were answered and the probe was not, at once.
func (m *master) judge(refused, err error) (over, fails bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := &m.health
	m.refused = refused
	select {
	case <-h.probed:
	default:
		close(h.probed)
	}
	answered := h.answered
	h.answered = false
	switch {
	case err == nil || !isOutage(context.Background(), err) || answered && h.failed == 0:
		*h = health{}
		return true, false
	case answered:
		return false, false
	}
	// It is no timeout, even if err is one: the caller goes on to its load at once, without a lock.
	h.confirmed = fmt.Errorf("flightlock: the cache does not answer: %v (it is probed every %v)", within(err), probeEvery)
	close(h.probe)
	h.probe = nil
	return false, true
}
