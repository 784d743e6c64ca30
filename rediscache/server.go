package rediscache

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
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

var (
	lookupScript, storeScript                  = script("lookup.lua"), script("store.lua")
	invalidateScript, expireScript, markScript = script("invalidate.lua"), script("expire.lua"),
		script("mark.lua")
	clearScript, generationScript       = script("clear.lua"), script("generation.lua")
	tagScript, untagScript, leaveScript = script("tag.lua"), script("untag.lua"), script("leave.lua")
)

// script is what the scripts have in common, and the one in the file.
func script(file string) *redis.Script {
	prelude, _ := sources.ReadFile("prelude.lua") // they are part of the binary
	source, _ := sources.ReadFile(file)
	return redis.NewScript(string(prelude) + string(source))
}

// server is where the entries are, at the keys of their users with a prefix. Each of its requests ends after
// a timeout, whatever the client's own timeouts are: half of LookupTimeout for lookups, of which a Get may
// make two before it loads, and all of it for writes. All are safe to repeat, and safe if the server executes
// them late or twice, since go-redis may send them again: a lookup leaves an entry as it is or makes a
// tombstone, a store compares a stamp that never comes back, and another tombstone costs a load.
type server struct {
	rdb       redis.UniversalClient
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

	noMGet atomic.Int64 // until when MGET is not sent, in Unix seconds, because a server has refused it

	tasks group.Group     // what probes and repeats
	ended context.Context // when it is closed
	end   func()
}

// master is one of the servers that have the entries.
type master struct {
	clock serverClock

	mu sync.Mutex // guards what follows; no request is made under it
	health
}

const (
	maxHanging = 1024 // requests at once, in a client that ignores their ctx

	// maxPipeline is how many invalidations one pipeline has.
	maxPipeline = 500

	// perConnection is how many lookups callers make at once for each connection of rdb's pool. A burst of more
	// waits here, in order and without a timeout, and not for connections, until the time of each lookup is
	// over.
	perConnection = 2
	usualPool     = 32 // of a client that is the user's own
)

func newServer(rdb redis.UniversalClient, prefix string, timeout, tombstone time.Duration) *server {
	s := &server{
		rdb: rdb, prefix: prefix, lookups: timeout / 2, writes: timeout, tombstone: tombstone,
		hanging: conn.NewLimit(maxHanging), only: &master{},
	}
	s.ended, s.end = context.WithCancel(context.Background())
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

// close ends what probes and repeats, and waits for it, a while longer than a request that is under way may
// take.
func (s *server) close(ctx context.Context) error {
	s.end()
	s.tasks.Close()
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*s.writes)
	defer cancel()
	return s.tasks.Wait(grace)
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

// of is the server that has key. While the slots of a Cluster are not known yet, its servers are one:
// go-redis would ask for them here, for each key as long as it likes, but not with a ctx that has ended.
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

// limitedGet is a GET, and its ctx, which has a deadline that no timer watches: go-redis makes it the
// deadline of the socket, also of a dial. It is for hits: a context.WithTimeout for each would cost more than
// everything else that is done for it here. Both are one allocation, as many as the GET alone.
//
// go-redis asks for Done once per command, and again where it may wait otherwise: for a connection, and
// between its attempts to dial or to send. Only then is there a timer.
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

// inTime is err, or errTimeout for an end of a request's ctx that was not an end of the caller's, of which
// go-redis says no more.
func inTime(ctx context.Context, err error) error {
	if err == context.DeadlineExceeded && ctx.Err() == nil { //nolint:errorlint // others say more
		return errTimeout
	}
	return err
}

// do makes a request that ends after the timeout. If a hook of the client's panics, it has failed: many
// requests are made on goroutines of this package, where a panic would end the process.
func do[T any](ctx context.Context, s *server, timeout time.Duration,
	request func(ctx context.Context) (T, error)) (v T, err error) {
	limited, cancel := context.WithTimeoutCause(ctx, timeout, errTimeout)
	defer cancel()
	guardedRequest := func() (T, error) { return guarded("rdb", func() (T, error) { return request(limited) }) }
	if s.honours {
		v, err = guardedRequest()
	} else {
		v, err = conn.Await(limited, s.hanging, guardedRequest, nil)
	}
	return v, inTime(ctx, err)
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

// process makes a request of one key. If that does not say how far its keys are apart, a ClusterClient asks
// some master first, for up to 5 s if that hangs, whatever the ctx, and all such requests wait for it.
func (s *server) process(ctx context.Context, cmd *redis.StringCmd) (string, error) {
	cmd.SetStepCount(1)
	_ = s.rdb.Process(ctx, cmd) // the command has its error
	return cmd.Result()
}

// lacks reports whether a server does not have a command. A right that is missing is an error: it can be
// given.
func lacks(err error, command string) bool {
	return conn.RefusesCommand(err, command) && !conn.NoRights(err)
}

// lookUp is one MGET, or a pipeline on a Cluster, where the keys are on several servers, and where MGET is
// refused: an address may be that of a Cluster (CROSSSLOT), or of a proxy that does not have the command.
// What is no string counts as nothing.
func (s *server) lookUp(ctx context.Context, keys []string) (got map[string]read, failed map[string]error) {
	if s.cluster != nil || time.Now().Unix() < s.noMGet.Load() {
		return pipeline(ctx, s, s.lookups, keys, func(p redis.Pipeliner, key string) *redis.Cmd {
			return p.Do(ctx, "get", s.prefix+key)
		}, func(_ string, reply any) (read, error) {
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
	switch {
	case conn.RefusesSlots(err), lacks(err, "mget"):
		s.noMGet.Store(time.Now().Add(refusedFor).Unix())
		return s.lookUp(ctx, keys)
	case err != nil:
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

// read is what a lookup has found: an entry, "" if there is none; and the server's time, in microseconds, if
// the reply says it, else 0.
type read struct {
	entry string
	now   int64
	exact bool // for a Peek
}

// reserve is the lookup before a load, which leaves a tombstone where there is nothing.
func (s *server) reserve(ctx context.Context,
	keys []string) (found map[string]read, failed map[string]error) {
	sent := time.Now()
	return run(ctx, s, lookupScript, keys, s.lookups, s.tombstoneArg, func(key string, reply any) (read, error) {
		if list, ok := reply.([]any); ok && len(list) == 2 {
			entry, _ := list[0].(string)
			text, _ := list[1].(string)
			if now, ok := digits(text); ok {
				s.of(key).clock.compare(sent, now)
				return read{entry: entry, now: now}, nil
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

	tags       []string
	generation int64 // in which the load began: see tags
}

// put stores entries that have their stamps still, and says of each whether it had.
func (s *server) put(ctx context.Context, ws map[string]*writing) (map[string]bool, map[string]error) {
	return run(ctx, s, storeScript, slices.Collect(maps.Keys(ws)), s.writes, func(key string) []any {
		w := ws[key]
		return []any{
			w.stamp, string(rune(w.kind)), w.fresh.Microseconds(), w.expires.Microseconds(), millis(w.expires),
			fmt.Sprintf("%0*d", tookLen, min(max(w.took, 0), longestRun).Microseconds()), w.payload,
		}
	}, func(_ string, reply any) (bool, error) { return reply == int64(1), nil })
}

// invalidate replaces entries by tombstones, in one pipeline, and returns those keys for which that failed.
func (s *server) invalidate(ctx context.Context, keys []string) (failed map[string]error) {
	return s.touch(ctx, invalidateScript, keys, millis(s.tombstone))
}

// touch runs a script that replies nothing for each key, and returns those for which that failed.
func (s *server) touch(ctx context.Context, script *redis.Script, keys []string, args ...any,
) (failed map[string]error) {
	_, failed = run(ctx, s, script, keys, s.writes, func(string) []any { return args },
		func(string, any) (bool, error) { return true, nil })
	return failed
}

func (s *server) tombstoneArg(string) []any { return []any{millis(s.tombstone)} }

// run runs a script for each key, in one pipeline. A server that does not know the script, or that refuses
// EVALSHA, is sent it with the keys that were refused.
func run[T any](ctx context.Context, s *server, script *redis.Script, keys []string, timeout time.Duration,
	args func(key string) []any, result func(key string, reply any) (T, error),
) (got map[string]T, failed map[string]error) {
	type eval func(ctx context.Context, c redis.Scripter, keys []string, args ...any) *redis.Cmd
	return send(ctx, s, keys,
		func(ctx context.Context, keys []string) (got map[string]T, failed map[string]error) {
			with := func(eval eval, keys []string) (map[string]T, map[string]error) {
				return pipeline(ctx, s, timeout, keys, func(p redis.Pipeliner, key string) *redis.Cmd {
					return eval(ctx, p, []string{s.prefix + key}, append([]any{random()}, args(key)...)...)
				}, result)
			}
			got, failed = with(script.EvalSha, keys)
			var refused []string
			for key, err := range failed {
				if lacks(err, "evalsha") || redis.HasErrorPrefix(err, "NOSCRIPT") {
					refused = append(refused, key)
					delete(failed, key)
				}
			}
			if len(refused) > 0 {
				more, still := with(script.Eval, refused)
				maps.Copy(got, more)
				maps.Copy(failed, still)
			}
			return got, failed
		})
}

// pipeline sends a command for each key together, and gets what result makes of each reply. A reply that is
// nil is no error.
func pipeline[T any](ctx context.Context, s *server, timeout time.Duration, keys []string,
	add func(p redis.Pipeliner, key string) *redis.Cmd, result func(key string, reply any) (T, error),
) (got map[string]T, failed map[string]error) {
	sent, err := do(ctx, s, timeout, func(limited context.Context) ([]*redis.Cmd, error) {
		p := s.rdb.Pipeline()
		cmds := make([]*redis.Cmd, len(keys))
		for i, key := range keys {
			cmds[i] = add(p, key)
		}
		_, err := p.Exec(limited)
		return cmds, err
	})
	if sent == nil { // nothing may be read of commands that are under way
		return nil, failedAll(keys, err)
	}
	got, failed = make(map[string]T, len(keys)), map[string]error{}
	for i, key := range keys {
		reply, why := sent[i].Result()
		if reply == nil && why == nil {
			why = cmp.Or(err, errNotSent)
		}
		// while a master hangs, go-redis has its error for all replies
		if reply != nil || errors.Is(why, redis.Nil) {
			got[key], why = result(key, reply)
		}
		if why != nil {
			failed[key] = inTime(ctx, why)
		}
	}
	return got, failed
}

// errNotSent is the error of a command that go-redis has left without a reply and without an error, if Exec
// has none either: Exec alone reports that the server refuses the login of a connection (its password,
// maxclients).
var errNotSent = errors.New("flightlock: the request was not sent")

// random is 64 random bits, as 16 hexadecimal digits.
func random() string { return fmt.Sprintf("%016x", rand.Uint64()) }
