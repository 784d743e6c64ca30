package rediscache

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/group"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/semaphore"
)

//go:embed *.lua
var sources embed.FS

var lookupScript, storeScript, invalidateScript = script("lookup.lua"), script("store.lua"), script("invalidate.lua")

// script is what the scripts have in common, and the one in the file.
func script(file string) *redis.Script {
	prelude, _ := sources.ReadFile("prelude.lua") // they are part of the binary
	source, _ := sources.ReadFile(file)
	return redis.NewScript(string(prelude) + string(source))
}

// server is where the entries are, at the keys of their users with a prefix. Each of its requests ends after a timeout,
// whatever the client's own timeouts are: half of LookupTimeout for lookups, of which a Get may make two before it
// loads, and all of it for writes. All are safe to repeat, and safe if the server executes them late or twice, since
// go-redis may send them again: a lookup leaves an entry as it is or makes a tombstone, a store compares a stamp that
// never comes back, and another tombstone costs a load.
type server struct {
	rdb       redis.UniversalClient
	tasks     *group.Group
	ended     context.Context      // when the Cache is closed
	cluster   *redis.ClusterClient // rdb, if it is one
	prefix    string
	lookups   time.Duration // their timeout
	writes    time.Duration
	tombstone time.Duration
	honours   bool                // rdb ends a request with its ctx
	hanging   conn.Limit          // of requests on goroutines of their own, where rdb does not
	callers   *semaphore.Weighted // lookups of callers that are under way: see inTurn
	only      *master             // of a client that is no ClusterClient
	masters   sync.Map            // of a Cluster by address, and only at ""
	troubled  atomic.Int32        // how many of them are probed: see health
}

// master is one of the servers that have the entries.
type master struct {
	clock serverClock

	mu      sync.Mutex // guards what follows; no request is made under it
	health  health
	refused error // by the last probe: it lets in nobody else, though it may answer those who are in
}

const (
	maxHanging = 1024 // requests at once, in a client that ignores their ctx

	// maxPipeline is how many invalidations one pipeline has.
	maxPipeline = 500

	// perConnection is how many lookups callers make at once for each connection of rdb's pool. A burst of more waits
	// here, in order and without a timeout, and not for connections, until the time of each lookup is over.
	perConnection = 2
	usualPool     = 32 // of a client that is the user's own
)

func newServer(
	rdb redis.UniversalClient, tasks *group.Group, ended context.Context, prefix string, timeout, tombstone time.Duration,
) *server {
	s := &server{
		rdb: rdb, tasks: tasks, ended: ended, prefix: prefix, lookups: timeout / 2, writes: timeout, tombstone: tombstone,
		hanging: conn.NewLimit(maxHanging), only: &master{},
	}
	s.masters.Store("", s.only)
	pool := usualPool
	switch rdb := rdb.(type) {
	case *redis.Client:
		s.honours, pool = rdb.Options().ContextTimeoutEnabled, rdb.Options().PoolSize
	case *redis.ClusterClient:
		s.cluster, s.honours, pool = rdb, rdb.Options().ContextTimeoutEnabled, rdb.Options().PoolSize
	}
	s.callers = semaphore.NewWeighted(int64(perConnection * max(pool, 1)))
	return s
}

// inTurn makes a caller's lookup when it may be made. Those of runs do not wait: they are few, and each has
// LookupTimeout in all.
func (s *server) inTurn(ctx context.Context, lookup func() error) error {
	if !s.callers.TryAcquire(1) {
		if ctx.Value(seam.OfRun{}) != nil {
			return lookup()
		}
		if err := s.callers.Acquire(ctx, 1); err != nil {
			return err
		}
	}
	defer s.callers.Release(1)
	return lookup()
}

// of is the server that has key. While the slots of a Cluster are not known yet, its servers are one: go-redis would
// ask for them here, for each key as long as it likes, but not with a ctx that has ended.
func (s *server) of(key string) *master {
	if s.cluster == nil {
		return s.only
	}
	owner, err := s.cluster.MasterForKey(endedCtx, s.prefix+key)
	if err != nil {
		return s.only
	}
	m, known := s.masters.Load(owner.Options().Addr)
	if !known {
		m, _ = s.masters.LoadOrStore(owner.Options().Addr, &master{})
	}
	return m.(*master)
}

var endedCtx, _ = context.WithTimeout(context.Background(), 0)

// limitedGet is a GET, and its ctx, which has a deadline that no timer watches: go-redis makes it the deadline of the
// socket, also of a dial. It is for hits: a context.WithTimeout for each would cost more than everything else that is
// done for it here. Both are one allocation, as many as the GET alone.
//
// go-redis asks for Done once per command, and again where it may wait otherwise: for a connection, and between its
// attempts to dial or to send. Only then is there a timer.
type limitedGet struct {
	context.Context // the caller's
	deadline        time.Time
	cmd             redis.StringCmd

	mu    sync.Mutex      // guards what follows
	asked int             // how often for Done
	now   context.Context // the caller's, or that with a timer
	stop  func()          // ends the timer
}

func (g *limitedGet) Deadline() (time.Time, bool) { return g.deadline, true }

func (g *limitedGet) Done() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.asked++; g.asked == 2 {
		g.now, g.stop = context.WithDeadlineCause(g.Context, g.deadline, errTimeout)
	}
	return g.now.Done()
}

func (g *limitedGet) Err() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.now.Err()
}

func (g *limitedGet) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stop()
}

// errTimeout says that the server has not answered in time.
var errTimeout = fmt.Errorf("flightlock: the cache has not answered in time: %w", context.DeadlineExceeded)

// inTime is err, or errTimeout for an end of a request's ctx that was not an end of the caller's, of which go-redis
// says no more.
func inTime(ctx context.Context, err error) error {
	if err == context.DeadlineExceeded && ctx.Err() == nil { //nolint:errorlint // others say more
		return errTimeout
	}
	return err
}

// do makes a request that ends after the timeout. If a hook of the client's panics, it has failed: many requests are
// made on goroutines of this package, where a panic would end the process.
func do[T any](
	ctx context.Context, s *server, timeout time.Duration, request func(ctx context.Context) (T, error),
) (T, error) {
	limited, cancel := context.WithTimeoutCause(ctx, timeout, errTimeout)
	defer cancel()
	guardedRequest := func() (T, error) { return guarded("rdb", func() (T, error) { return request(limited) }) }
	if s.honours {
		v, err := guardedRequest()
		return v, inTime(ctx, err)
	}
	v, err := conn.Await(limited, s.hanging, guardedRequest, nil)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		err = errTimeout
	}
	return v, err
}

// pingSteps is how many answers a ping waits for, at most: of the handshake, which go-redis makes, and its own.
const pingSteps = 5

// ping asks for the key on a connection of its own, which the server has to accept within timeout, and to answer each
// time within timeout. A deadline that this process notices late is put off by as much (see conn.Conn), or if that of
// the dial is, there is no error: nothing is known of the server. If it refuses the login, it is asked on a connection
// of the client's that it let in before, if there is one; refused is that refusal.
func (s *server) ping(key string, timeout time.Duration) (refused, err error) {
	ctx, cancel := context.WithTimeoutCause(context.Background(), pingSteps*timeout, errTimeout)
	defer cancel()
	key = s.prefix + key
	ask := func(c redis.Cmdable) error {
		_, err := do(ctx, s, timeout, func(ctx context.Context) (int64, error) { return c.Exists(ctx, key).Result() })
		return err
	}
	var like *redis.Client
	switch rdb := s.rdb.(type) {
	case *redis.Client:
		like = rdb
	case *redis.ClusterClient: // which may ask for the slots
		if like, err = do(ctx, s, timeout, func(ctx context.Context) (*redis.Client, error) {
			return rdb.MasterForKey(ctx, key)
		}); err != nil {
			return nil, err
		}
	default: // the user's own
		return nil, ask(rdb)
	}
	var late atomic.Bool
	own, err := conn.DialOnce(ctx, like, timeout, conn.NewLimit(1), func(error) {}, func(o *redis.Options) {
		dial := o.Dialer
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			due := time.Now().Add(timeout)
			ctx, cancel := context.WithDeadlineCause(ctx, due, errTimeout)
			defer cancel()
			c, err := dial(ctx, network, addr)
			late.Store(err != nil && time.Since(due) >= conn.MinGrace)
			return c, err
		}
	})
	switch {
	case err == nil:
		defer own.Close()
		err := conn.Said(own.Exists(ctx, key).Err())
		if !refusesLogin(err) {
			return nil, err
		}
		if refused = err; like.PoolStats().IdleConns > 0 { // which was let in before, and may continue
			err = ask(like)
		}
		return refused, err
	case late.Load():
		return nil, nil
	}
	return nil, err
}

// getOnly is get of a server that is well as far as is known.
func (s *server) getOnly(ctx context.Context, key string) (entry string, err error) {
	full, deadline := s.prefix+key, time.Now().Add(s.lookups)
	switch before, limited := ctx.Deadline(); {
	case !s.honours:
		entry, err = do(ctx, s, s.lookups, func(ctx context.Context) (string, error) {
			if s.cluster == nil {
				return s.rdb.Get(ctx, full).Result() // which may be the user's own
			}
			return s.process(ctx, redis.NewStringCmd(ctx, "get", full))
		})
	case limited && before.Before(deadline):
		entry, err = s.process(ctx, redis.NewStringCmd(ctx, "get", full))
	default:
		g := &limitedGet{Context: ctx, deadline: deadline, now: ctx, stop: func() {}}
		g.cmd = *redis.NewStringCmd(g, "get", full)
		defer g.end()
		entry, err = s.process(g, &g.cmd)
		err = inTime(ctx, err)
	}
	if errors.Is(err, redis.Nil) {
		return "", nil
	}
	return entry, err
}

// process makes a request of one key. If that does not say how far its keys are apart, a ClusterClient asks some master
// first, for up to 5 s if that hangs, whatever the ctx, and all such requests wait for it.
func (s *server) process(ctx context.Context, cmd *redis.StringCmd) (string, error) {
	cmd.SetStepCount(1)
	_ = s.rdb.Process(ctx, cmd) // the command has its error
	return cmd.Result()
}

// lookUp is one MGET, or a pipeline on a Cluster, where the keys are on several servers. What is no string counts as
// nothing.
func (s *server) lookUp(ctx context.Context, keys []string) (got map[string]read, failed map[string]error) {
	if s.cluster != nil {
		cmds := s.pipeline(ctx, s.lookups, keys, func(p redis.Pipeliner, key string) *redis.Cmd {
			return p.Do(ctx, "get", s.prefix+key)
		})
		return eachReply(keys, cmds, func(_ string, reply any) (read, error) {
			entry, _ := reply.(string)
			return read{entry: entry}, nil
		})
	}
	full := make([]string, len(keys))
	for i, key := range keys {
		full[i] = s.prefix + key
	}
	replies, err := do(ctx, s, s.lookups, func(ctx context.Context) ([]any, error) {
		return s.rdb.MGet(ctx, full...).Result()
	})
	if err != nil {
		return nil, failedAll(keys, err)
	}
	got = make(map[string]read, len(keys))
	for i, reply := range replies {
		entry, _ := reply.(string)
		got[keys[i]] = read{entry: entry}
	}
	return got, map[string]error{}
}

func failedAll(keys []string, err error) map[string]error {
	failed := make(map[string]error, len(keys))
	for _, key := range keys {
		failed[key] = err
	}
	return failed
}

// eachReply gets what result makes of each reply. One that is nil is no error.
func eachReply[T any](keys []string, cmds []*redis.Cmd, result func(key string, reply any) (T, error)) (
	got map[string]T, failed map[string]error) {
	got, failed = make(map[string]T, len(keys)), map[string]error{}
	for i, key := range keys {
		reply, err := cmds[i].Result()
		if err == nil || errors.Is(err, redis.Nil) {
			got[key], err = result(key, reply)
		}
		if err != nil {
			failed[key] = err
		}
	}
	return got, failed
}

// read is what a lookup has found: an entry, "" if there is none; and the server's time, in microseconds, if the reply
// says it, else 0.
type read struct {
	entry string
	now   int64
}

// reserve is the lookup before a load, which leaves a tombstone where there is nothing.
func (s *server) reserve(ctx context.Context, keys []string) (found map[string]read, failed map[string]error) {
	sent := time.Now()
	return run(ctx, s, lookupScript, keys, s.lookups, s.tombstoneArg, func(key string, reply any) (read, error) {
		if list, ok := reply.([]any); ok && len(list) == 2 {
			entry, _ := list[0].(string)
			text, _ := list[1].(string)
			if now, ok := digits(text); ok && text != "" {
				s.of(key).clock.compare(sent, now)
				return read{entry, now}, nil
			}
		}
		return read{}, fmt.Errorf("flightlock: the cache replied %.100q to a lookup", fmt.Sprint(reply))
	})
}

// writing is what a store writes.
type writing struct {
	kind           byte
	stamp          string // that was looked up
	fresh, expires time.Duration
	took           time.Duration
	payload        []byte
}

// put stores entries that have their stamps still, and says of each whether it had.
func (s *server) put(ctx context.Context, keys []string, ws map[string]*writing) (map[string]bool, map[string]error) {
	return run(ctx, s, storeScript, keys, s.writes, func(key string) []any {
		w := ws[key]
		return []any{
			w.stamp, string(rune(w.kind)),
			micros(w.fresh), micros(w.expires), millis(w.expires), tookText(w.took), w.payload,
		}
	}, func(_ string, reply any) (bool, error) { return reply == int64(1), nil })
}

// invalidate replaces entries by tombstones, in one pipeline, and returns those keys for which that failed.
func (s *server) invalidate(ctx context.Context, keys []string) (failed map[string]error) {
	_, failed = run(ctx, s, invalidateScript, keys, s.writes, s.tombstoneArg, func(string, any) (bool, error) {
		return true, nil
	})
	return failed
}

func (s *server) tombstoneArg(string) []any { return []any{millis(s.tombstone)} }

// run runs a script for each key, in one pipeline. A server that does not know the script is sent it with the keys that
// were refused.
func run[T any](ctx context.Context, s *server, script *redis.Script, keys []string, timeout time.Duration,
	args func(key string) []any, result func(key string, reply any) (T, error),
) (got map[string]T, failed map[string]error) {
	type eval func(ctx context.Context, c redis.Scripter, keys []string, args ...any) *redis.Cmd
	return send(ctx, s, keys, func(ctx context.Context, keys []string) (map[string]T, map[string]error) {
		pipeline := func(keys []string, eval eval) []*redis.Cmd {
			return s.pipeline(ctx, timeout, keys, func(p redis.Pipeliner, key string) *redis.Cmd {
				return eval(ctx, p, []string{s.prefix + key}, append([]any{random()}, args(key)...)...)
			})
		}
		replies := pipeline(keys, script.EvalSha)
		var refused []string
		var at []int
		for i, cmd := range replies {
			if err := cmd.Err(); err != nil && strings.HasPrefix(err.Error(), "NOSCRIPT") {
				refused, at = append(refused, keys[i]), append(at, i)
			}
		}
		if len(refused) > 0 {
			for n, cmd := range pipeline(refused, script.Eval) {
				replies[at[n]] = cmd
			}
		}
		return eachReply(keys, replies, result)
	})
}

// pipeline sends a command for each key together. Each has its own error.
func (s *server) pipeline(
	ctx context.Context, timeout time.Duration, keys []string, add func(p redis.Pipeliner, key string) *redis.Cmd,
) []*redis.Cmd {
	sent, err := do(ctx, s, timeout, func(limited context.Context) ([]*redis.Cmd, error) {
		p := s.rdb.Pipeline()
		cmds := make([]*redis.Cmd, len(keys))
		for i, key := range keys {
			cmds[i] = add(p, key)
		}
		_, err := p.Exec(limited)
		for _, cmd := range cmds {
			switch {
			case cmd.Val() != nil: // while a master hangs, go-redis has its error for what others have answered, too
				cmd.SetErr(nil)
			case cmd.Err() == nil:
				cmd.SetErr(cmp.Or(err, errNotSent))
			default:
				cmd.SetErr(inTime(ctx, cmd.Err()))
			}
		}
		return cmds, nil
	})
	if err == nil {
		return sent
	}
	failed := make([]*redis.Cmd, len(keys)) // nothing may be read of commands that are under way
	for i := range failed {
		failed[i] = redis.NewCmdResult(nil, err)
	}
	return failed
}

// errNotSent is the error of a command that go-redis has left without a reply and without an error, if Exec has none
// either: Exec alone reports that the server refuses the login of a connection (its password, maxclients).
var errNotSent = errors.New("flightlock: the request was not sent")

// random is 64 random bits, as 16 hexadecimal digits.
func random() string { return fmt.Sprintf("%016x", rand.Uint64()) }
