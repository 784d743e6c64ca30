package rediscache

import (
	"context"
	_ "embed" // the scripts are part of the binary
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/semaphore"
)

//go:embed prelude.lua
var prelude string

//go:embed lookup.lua
var lookupSource string

//go:embed store.lua
var storeSource string

//go:embed invalidate.lua
var invalidateSource string

var (
	lookupScript     = redis.NewScript(prelude + lookupSource)
	storeScript      = redis.NewScript(prelude + storeSource)
	invalidateScript = redis.NewScript(prelude + invalidateSource)
)

// server is where the entries are, at the keys of their users with a prefix. Each of its requests ends after a timeout,
// whatever the client's own timeouts are: half of LookupTimeout for lookups, of which a Get may make two before it
// loads, and all of it for writes. All are safe to repeat, and safe if the server executes them late or twice, since
// go-redis may send them again: a lookup leaves an entry as it is or makes a tombstone, a store compares a stamp that
// never comes back, and another tombstone costs a load.
type server struct {
	rdb       redis.UniversalClient
	prefix    string
	lookups   time.Duration // their timeout
	writes    time.Duration
	tombstone time.Duration
	honours   bool                // rdb ends a request with its ctx
	cluster   bool                // rdb is a ClusterClient
	direct    atomic.Bool         // and knows the commands: see learnCommands
	learning  atomic.Bool         // it asks for them now
	hanging   conn.Limit          // of requests on goroutines of their own, where rdb does not
	callers   *semaphore.Weighted // lookups of callers that are under way: see enter

	clock  serverClock             // its own, of a client that is no ClusterClient
	mu     sync.RWMutex            // guards clocks
	clocks map[string]*serverClock // of a Cluster, by owner
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

func newServer(rdb redis.UniversalClient, prefix string, timeout, tombstone time.Duration) *server {
	s := &server{
		rdb: rdb, prefix: prefix, lookups: timeout / 2, writes: timeout, tombstone: tombstone,
		hanging: conn.NewLimit(maxHanging), clocks: map[string]*serverClock{},
	}
	pool := usualPool
	switch rdb := rdb.(type) {
	case *redis.Client:
		s.honours, pool = rdb.Options().ContextTimeoutEnabled, rdb.Options().PoolSize
	case *redis.ClusterClient:
		s.honours, s.cluster, pool = rdb.Options().ContextTimeoutEnabled, true, rdb.Options().PoolSize
	}
	s.callers = semaphore.NewWeighted(int64(perConnection * max(pool, 1)))
	return s
}

// enter waits until a caller's lookup may be made. in says that leave is to be called. Those of runs do not wait: they
// are few, and each has LookupTimeout in all.
func (s *server) enter(ctx context.Context) (in bool, err error) {
	if s.callers.TryAcquire(1) {
		return true, nil
	}
	if ctx.Value(seam.OfRun{}) != nil {
		return false, nil
	}
	err = s.callers.Acquire(ctx, 1)
	return err == nil, err
}

func (s *server) leave(in bool) {
	if in {
		s.callers.Release(1)
	}
}

// owner is the server that has key. While the slots of a Cluster are not known yet, its servers are one, "": go-redis
// would ask for them here, for each key as long as it likes, but not with a ctx that has ended.
func (s *server) owner(key string) string {
	if cluster, ok := s.rdb.(*redis.ClusterClient); ok {
		if master, err := cluster.MasterForKey(ended, s.prefix+key); err == nil {
			return master.Options().Addr
		}
	}
	return ""
}

// ended is a ctx that has ended.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// clockOf is the clock of the server that has key.
func (s *server) clockOf(key string) *serverClock {
	if !s.cluster {
		return &s.clock
	}
	owner := s.owner(key)
	s.mu.RLock()
	c := s.clocks[owner]
	s.mu.RUnlock()
	if c != nil {
		return c
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c = s.clocks[owner]; c == nil {
		c = &serverClock{}
		s.clocks[owner] = c
	}
	return c
}

// pipelines reports whether requests for one key are pipelines, too, and cost more. Before its first request that is no
// pipeline, a ClusterClient asks some master for its commands, for up to 5 s if that master hangs, and all such
// requests wait for that, whatever their ctx and their master.
func (s *server) pipelines() bool { return s.cluster && !s.direct.Load() }

// learnCommands has a ClusterClient ask for the commands while nobody waits. If that takes long, it may have been in
// vain, and is repeated. Nothing waits for the goroutine, which ends by the timeouts of the client.
func (s *server) learnCommands(key string) {
	if !s.learning.CompareAndSwap(false, true) {
		return
	}
	go func() {
		defer s.learning.Store(false)
		began := time.Now()
		_, err := guarded("rdb", func() (string, error) { return s.rdb.Get(context.Background(), key).Result() })
		if (err == nil || errors.Is(err, redis.Nil)) && time.Since(began) < s.lookups {
			s.direct.Store(true)
		}
	}()
}

// limitedGet is a GET, and its ctx, which has a deadline that no timer watches: go-redis makes it the deadline of the
// socket, also of a dial. It is for hits: a context.WithTimeout for each would cost more than everything else that is
// done for it here. Both are one allocation, as many as the GET alone.
//
// go-redis asks for Done once per command, and again where it may wait otherwise: for a connection, and between its
// attempts to dial or to send. Only then is there a timer.
type limitedGet struct {
	context.Context // the caller's
	deadline        time.Time
	asked           atomic.Int32 // how often for Done
	once            sync.Once
	timed           atomic.Pointer[timedContext]
	cmd             redis.StringCmd
}

// timedContext is the caller's ctx with a timer.
type timedContext struct {
	context.Context
	cancel context.CancelFunc
}

func (g *limitedGet) Deadline() (time.Time, bool) { return g.deadline, true }

func (g *limitedGet) Done() <-chan struct{} {
	if g.asked.Add(1) == 1 {
		return g.Context.Done()
	}
	g.once.Do(func() {
		ctx, cancel := context.WithDeadlineCause(g.Context, g.deadline, errTimeout)
		g.timed.Store(&timedContext{ctx, cancel})
	})
	return g.timed.Load().Done()
}

func (g *limitedGet) Err() error {
	if t := g.timed.Load(); t != nil {
		return t.Err()
	}
	return g.Context.Err()
}

// stop ends the timer, if there is one.
func (g *limitedGet) stop() {
	if t := g.timed.Load(); t != nil {
		t.cancel()
	}
}

// errTimeout says that the server has not answered in time.
var errTimeout = fmt.Errorf("rediscache: the server has not answered in time: %w", context.DeadlineExceeded)

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
	var like *redis.Client
	key = s.prefix + key
	switch rdb := s.rdb.(type) {
	case *redis.Client:
		like = rdb
	case *redis.ClusterClient:
		master, err := do(ctx, s, timeout, func(ctx context.Context) (*redis.Client, error) { // may ask for the slots
			return rdb.MasterForKey(ctx, key)
		})
		if err != nil {
			return nil, err
		}
		like = master
	default: // the user's own
		_, err := do(ctx, s, timeout, func(ctx context.Context) (int64, error) { return rdb.Exists(ctx, key).Result() })
		return nil, err
	}
	var late atomic.Bool
	own, err := conn.DialOnce(ctx, like, timeout, conn.NewLimit(1), func(o *redis.Options) {
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
		refused = err
		if like.PoolStats().IdleConns > 0 { // which was let in before, and may continue
			_, err = do(ctx, s, timeout, func(ctx context.Context) (int64, error) {
				return like.Exists(ctx, key).Result()
			})
		}
		return refused, err
	case late.Load():
		return nil, nil
	}
	return nil, err
}

// get is the lookup of a hit: nothing if there is nothing.
func (s *server) get(ctx context.Context, key string) (stored, error) {
	if s.pipelines() {
		entries, failed := s.getMany(ctx, []string{key})
		if err := failed[key]; err != nil {
			return stored{}, inTime(ctx, err)
		}
		s.learnCommands(s.prefix + key)
		return entries[0], nil
	}
	full := s.prefix + key
	if !s.honours {
		return do(ctx, s, s.lookups, func(ctx context.Context) (stored, error) { return storedIn(s.rdb.Get(ctx, full)) })
	}
	deadline := time.Now().Add(s.lookups)
	if before, limited := ctx.Deadline(); !limited || deadline.Before(before) {
		g := &limitedGet{Context: ctx, deadline: deadline}
		g.cmd = *redis.NewStringCmd(g, "get", full)
		defer g.stop()
		_ = s.rdb.Process(g, &g.cmd) // the command has its error
		x, err := storedIn(&g.cmd)
		return x, inTime(g.Context, err)
	}
	return storedIn(s.rdb.Get(ctx, full))
}

func storedIn(cmd *redis.StringCmd) (x stored, err error) {
	x.bytes, err = cmd.Bytes()
	if err != nil {
		if errors.Is(err, redis.Nil) {
			err = nil
		}
		return stored{}, err
	}
	x.text = cmd.Val()
	return x, nil
}

// The requests for many keys return a result for each, in their order, and the errors of those that have failed.

// getMany is get for many keys: one MGET, or a pipeline on a Cluster, where the keys are on several servers.
func (s *server) getMany(ctx context.Context, keys []string) (entries []stored, failed map[string]error) {
	if s.cluster {
		cmds := s.pipeline(ctx, s.lookups, len(keys), func(p redis.Pipeliner, i int) *redis.Cmd {
			return p.Do(ctx, "get", s.prefix+keys[i])
		})
		return eachReply(keys, cmds, func(_ int, reply any) (stored, error) { return storedReply(reply), nil })
	}
	full := make([]string, len(keys))
	for i, key := range keys {
		full[i] = s.prefix + key
	}
	replies, err := do(ctx, s, s.lookups, func(ctx context.Context) ([]any, error) {
		return s.rdb.MGet(ctx, full...).Result()
	})
	if err != nil {
		return make([]stored, len(keys)), failedAll(keys, err)
	}
	entries = make([]stored, len(keys))
	for i, reply := range replies {
		entries[i] = storedReply(reply)
	}
	return entries, nil
}

// storedReply is nothing for what is not there, or no string.
func storedReply(reply any) (x stored) {
	if text, ok := reply.(string); ok {
		x = stored{text, []byte(text)}
	}
	return x
}

func failedAll(keys []string, err error) map[string]error {
	failed := make(map[string]error, len(keys))
	for _, key := range keys {
		failed[key] = err
	}
	return failed
}

// eachReply gives what result makes of each reply. One that is nil is no error.
func eachReply[T any](keys []string, cmds []*redis.Cmd, result func(i int, reply any) (T, error)) (
	list []T, failed map[string]error) {
	list, failed = make([]T, len(keys)), map[string]error{}
	for i, cmd := range cmds {
		reply, err := cmd.Result()
		if err == nil || errors.Is(err, redis.Nil) {
			list[i], err = result(i, reply)
		}
		if err != nil {
			failed[keys[i]] = err
		}
	}
	return list, failed
}

// found is what a lookup before a load returns.
type found struct {
	entry stored
	now   int64 // the server's
}

// reserve is the lookup before a load, which leaves a tombstone where there is nothing.
func (s *server) reserve(ctx context.Context, keys []string) ([]found, map[string]error) {
	sent := time.Now()
	cmds := s.run(ctx, lookupScript, keys, s.lookups, func(int) []any { return []any{random(), millis(s.tombstone)} })
	return eachReply(keys, cmds, func(i int, reply any) (f found, err error) {
		if list, ok := reply.([]any); ok && len(list) == 2 {
			value, _ := list[0].(string)
			now, _ := list[1].(string)
			if f.now, ok = digits([]byte(now)); ok && now != "" {
				s.clockOf(keys[i]).compare(sent, f.now)
				f.entry = storedReply(value)
				return f, nil
			}
		}
		return f, fmt.Errorf("rediscache: the server replied %.100q to a lookup", fmt.Sprint(reply))
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
func (s *server) put(ctx context.Context, keys []string, ws map[string]*writing) ([]bool, map[string]error) {
	cmds := s.run(ctx, storeScript, keys, s.writes, func(i int) []any {
		w := ws[keys[i]]
		return []any{
			random(), w.stamp, string(rune(w.kind)),
			micros(w.fresh), micros(w.expires), millis(w.expires), tookText(w.took), w.payload,
		}
	})
	return eachReply(keys, cmds, func(_ int, reply any) (bool, error) { return reply == int64(1), nil })
}

// invalidate replaces entries by tombstones, in one pipeline.
func (s *server) invalidate(ctx context.Context, keys []string) (done []struct{}, failed map[string]error) {
	cmds := s.run(ctx, invalidateScript, keys, s.writes, func(int) []any { return []any{random(), millis(s.tombstone)} })
	return eachReply(keys, cmds, func(int, any) (none struct{}, _ error) { return none, nil })
}

// run runs a script for each key, in one pipeline. A server that does not know the script is sent it with the keys that
// were refused.
func (s *server) run(
	ctx context.Context, script *redis.Script, keys []string, timeout time.Duration, args func(i int) []any,
) []*redis.Cmd {
	replies := s.pipeline(ctx, timeout, len(keys), func(p redis.Pipeliner, i int) *redis.Cmd {
		return script.EvalSha(ctx, p, []string{s.prefix + keys[i]}, args(i)...)
	})
	var unknown []int
	for i, cmd := range replies {
		if err := cmd.Err(); err != nil && strings.HasPrefix(err.Error(), "NOSCRIPT") {
			unknown = append(unknown, i)
		}
	}
	if len(unknown) == 0 {
		return replies
	}
	again := s.pipeline(ctx, timeout, len(unknown), func(p redis.Pipeliner, n int) *redis.Cmd {
		i := unknown[n]
		return script.Eval(ctx, p, []string{s.prefix + keys[i]}, args(i)...)
	})
	for n, i := range unknown {
		replies[i] = again[n]
	}
	return replies
}

// pipeline sends n commands together. Each has its own error.
func (s *server) pipeline(
	ctx context.Context, timeout time.Duration, n int, add func(p redis.Pipeliner, i int) *redis.Cmd,
) []*redis.Cmd {
	sent, err := do(ctx, s, timeout, func(limited context.Context) ([]*redis.Cmd, error) {
		p := s.rdb.Pipeline()
		cmds := make([]*redis.Cmd, n)
		for i := range cmds {
			cmds[i] = add(p, i)
		}
		_, err := p.Exec(limited)
		for _, cmd := range cmds {
			switch {
			case cmd.Val() != nil: // while a master hangs, go-redis has its error for what others have answered, too
				cmd.SetErr(nil)
			case cmd.Err() == nil:
				cmd.SetErr(notSent(err))
			default:
				cmd.SetErr(inTime(ctx, cmd.Err()))
			}
		}
		return cmds, nil
	})
	if err == nil {
		return sent
	}
	failed := make([]*redis.Cmd, n) // nothing may be read of commands that are under way
	for i := range failed {
		failed[i] = redis.NewCmdResult(nil, err)
	}
	return failed
}

// notSent is the error of a command that go-redis has left without a reply and without an error: if the server refuses
// the login of a connection (its password, maxclients), only Exec, which returned err, reports that.
func notSent(err error) error {
	if err == nil {
		return errors.New("rediscache: the request was not sent")
	}
	return err
}

// relearn has go-redis ask a Cluster who its masters are, in the background. It does that by itself when a server names
// another one for a slot, and else once a minute: it would go to a master that has died for as long, although a replica
// has taken over.
func (s *server) relearn() {
	if cluster, is := s.rdb.(*redis.ClusterClient); is {
		cluster.ReloadState(context.Background())
	}
}

// random is 64 random bits, as 16 hexadecimal digits.
func random() string {
	const hex = "0123456789abcdef"
	var b [16]byte
	r := rand.Uint64()
	for i := range b {
		b[i] = hex[r&15]
		r >>= 4
	}
	return string(b[:])
}
