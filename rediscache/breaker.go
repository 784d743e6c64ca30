package rediscache

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/redis/go-redis/v9"
)

// health is what is known of a server from its first failure until it answers; otherwise it is the zero
// value. A server that does not answer is left alone: after maxFailed failures in a row its requests fail at
// once, so that callers wait for their load only, until a probe is answered. On a Cluster each master counts
// for itself. All requests pass it: lookups, stores and invalidations.
//
// Lookups of a burst may also fail because this process is busy, or its connections are. Then the server is
// well, and loads without locks would make it worse. So the first failure begins probes, one request at a
// time, and a server is left alone only when one of them has failed, too. A probe has a connection of its
// own: in the pool of the client it would wait behind the lookups of the burst. Its failure says nothing if a
// request was answered meanwhile, however long ago that began: its queue moves.
//
// When a probe fails, so do the requests that have begun while it was under way. Otherwise those that began
// shortly before its end would hold up the callers that join their runs for another timeout. As long as it
// has not failed, they have all of their time: where it is answered, their replies may be on their way as
// well.
//
// A hit reads server.troubled, and nothing else.
type health struct {
	failed    int           // requests in a row
	confirmed error         // by a probe, which has failed; nil: not
	answered  bool          // a request was, since the last probe began
	probed    bool          // from the first failure on
	probe     chan struct{} // closed when the probe that is under way has failed; nil: none is
	refused   error         // by the last probe: it lets in nobody else, though it may answer those who are in
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
	err = s.inTurn(ctx, func() error {
		if s.troubled.Load() > 0 {
			got, failed := send(ctx, s, []string{key}, func(ctx context.Context, keys []string) (
				map[string]string, map[string]error) {
				entry, err := guarded("rdb", func() (string, error) { return s.getOnly(ctx, key) })
				return map[string]string{key: entry}, failedAll(keys, err)
			})
			entry = got[key]
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

// admit leaves out keys whose servers are down. If they are on one server, probe is the one that is under way
// there.
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

// note counts for each server once whether a request to it has failed, and puts the reasons for that into
// failed.
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
			reason = s.failed(m, key, why)
		}
		reasons[m] = reason
		if outage && reason != nil {
			failed[key] = reason
		}
	}
}

// untilFailed makes a request that fails when a probe does, if there is one. It has a goroutine of its own
// then, because a client reads a reply until the deadline of its ctx, even if that is canceled.
func untilFailed[T any](ctx context.Context, probe <-chan struct{}, keys []string, r request[T]) (
	map[string]T, map[string]error) {
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

// isOutage reports whether err is the server's fault. The end of the caller's own ctx is not, nor is a pool
// without a free connection, nor a refusal of this command. A server that refuses every command, or every
// login, is left alone as well: each lookup of a refused login would dial again. So it is not as long as it
// answers on connections that it let in before: see ping.
func isOutage(ctx context.Context, err error) bool {
	if clock.Ended(ctx) != nil {
		return false
	}
	var refused redis.Error
	if !errors.As(err, &refused) {
		return !errors.Is(err, redis.ErrClosed) && !errors.Is(err, redis.ErrPoolTimeout)
	}
	return conn.Says(err, conn.Always) || conn.HasCode(err, "CLUSTERDOWN") || conn.RefusesLogin(err)
}

// state returns an error if the server is down, and when the probe that is under way has failed; nil: none
// is.
func (m *master) state() (probe <-chan struct{}, down error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.answered { // the failure of the probe that is under way will say nothing
		return nil, nil
	}
	return m.probe, m.down()
}

// succeeded notes that the server has answered a request. Its probe ends when it is over: if it ended now,
// each failure in a queue that moves would begin another one.
func (m *master) succeeded() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.probed {
		m.failed, m.confirmed, m.answered = 0, nil, true
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

// failed counts a request that has failed with err, and returns why its server is left alone, if it is, or
// err with what the server has answered to the login of a probe: go-redis reports the end of a connection,
// and not what the server has said before that, such as that all its connections are in use. nil if neither
// is known.
func (s *server) failed(m *master, key string, err error) (reason error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.probed && s.tasks.Go(func() { s.probe(m, key) }) {
		m.probe, m.probed = make(chan struct{}), true
		s.troubled.Add(1)
	}
	m.failed++
	if down := m.down(); down != nil || m.refused == nil {
		return down
	}
	return fmt.Errorf("%w: a new connection is refused: %w", err, m.refused)
}

// probe asks for the key until it is answered on a connection of its own, a request is, or the Cache is
// closed. By then the key may have moved to another server: what matters is that requests are answered again.
//
// The first probe has half the time of a lookup for each step, since callers wait for it, and so have those
// that say nothing. Once one has failed, the others have all of it: a server that needs more than half is
// left alone for a while at most, and not for ever.
func (s *server) probe(m *master, key string) {
	for timeout := s.lookups / 2; s.ended.Err() == nil; {
		over, fails := m.judge(s.ping(key, timeout))
		switch {
		case over:
			s.troubled.Add(-1)
			return
		case !fails:
			continue
		}
		timeout = s.lookups
		if s.cluster != nil {
			// go-redis asks who the masters are when a server names another one for a slot, and else once a minute: it
			// would go to a master that has died for as long, although a replica has taken over.
			s.cluster.ReloadState(context.Background())
		}
		select {
		case <-time.After(probeEvery):
		case <-s.ended.Done():
		}
		m.mu.Lock()
		m.probe = make(chan struct{})
		m.mu.Unlock()
	}
}

// pingSteps is how many answers a ping waits for, at most: of the handshake, which go-redis makes, and its
// own.
const pingSteps = 5

// ping asks for the key on a connection of its own, which the server has to accept within timeout, and to
// answer each time within timeout. A deadline that this process notices late is put off by as much (see
// conn.Conn), or if that of the dial is, there is no error: nothing is known of the server. If it refuses the
// login, it is asked on a connection of the client's that it let in before, if there is one; refused is that
// refusal.
func (s *server) ping(key string, timeout time.Duration) (refused, err error) {
	ctx, cancel := context.WithTimeoutCause(context.Background(), pingSteps*timeout, errTimeout)
	defer cancel()
	key = s.prefix + key
	ask := func(c redis.Cmdable) error {
		_, err := do(ctx, s, timeout, func(ctx context.Context) (int64, error) {
			return c.Exists(ctx, key).Result()
		})
		return err
	}
	like, ours := s.rdb.(*redis.Client)
	switch {
	case s.cluster != nil: // which may ask for the slots
		like, err = do(ctx, s, timeout, func(ctx context.Context) (*redis.Client, error) {
			return s.cluster.MasterForKey(ctx, key)
		})
	case !ours: // the user's own
		err = ask(s.rdb)
	}
	if like == nil {
		return nil, err
	}
	due := time.Now().Add(timeout)
	dialing, dialed := context.WithDeadlineCause(ctx, due, errTimeout)
	own, err := conn.DialOnce(dialing, like.Options(), timeout, conn.NewLimit(1), func(*redis.Options) {})
	dialed()
	if err != nil {
		if time.Since(due) >= conn.MinGrace {
			err = nil
		}
		return nil, err
	}
	defer own.Close()
	if err = conn.Said(own.Exists(ctx, key).Err()); !conn.RefusesLogin(err) {
		return nil, err
	}
	refused = err
	if like.PoolStats().IdleConns > 0 { // which was let in before, and may continue
		err = ask(like)
	}
	return refused, err
}

// judge notes the outcome of a probe. It is over if the server answers. If it fails, it is repeated after a
// pause, and otherwise, if requests were answered and the probe was not, at once.
func (m *master) judge(refused, err error) (over, fails bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	answered := m.answered
	m.refused, m.answered = refused, false
	switch {
	case err == nil && refused != nil: // it answers those who are in, and is asked again what it says to others
		m.failed, m.confirmed = 0, nil
		return false, true
	case err == nil || !isOutage(context.Background(), err) || answered && m.failed == 0:
		m.health = health{}
		return true, false
	case answered:
		return false, false
	}
	// It is no timeout, even if err is one: the caller goes on to its load at once, without a lock.
	m.confirmed = fmt.Errorf("flightlock: the cache does not answer: %v (it is probed every %v)", within(err),
		probeEvery)
	close(m.probe)
	m.probe = nil
	return false, true
}
