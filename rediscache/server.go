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

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/redis/go-redis/v9"
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

// server is where the entries are. Each of its requests ends after a timeout, whatever the client's own
// timeouts are: half of LookupTimeout for lookups, of which a Get may make two before it loads, and
// all of it for writes. All are safe to repeat, and safe if the server executes them late or twice, since
// go-redis may send them again: a lookup leaves an entry as it is or makes a tombstone, a store
// compares a stamp that never comes back, and another tombstone costs a load.
type server struct {
	rdb       redis.UniversalClient
	lookups   time.Duration // their timeout
	writes    time.Duration
	tombstone time.Duration
	honours   bool                       // rdb ends a request with its ctx
	cluster   bool                       // rdb is a ClusterClient
	direct    atomic.Bool                // and knows the commands: see learnCommands
	learning  atomic.Bool                // it asks for them now
	hanging   conn.Limit                 // of requests on goroutines of their own, where rdb does not
	compared  atomic.Pointer[comparison] // the last one; nil: there was none
	ahead     atomic.Int64               // before that: by how many microseconds its clock is ahead of ours at least
}

// maxHanging is how many requests may hang at once in a client that ignores their ctx.
const maxHanging = 1024

func newServer(rdb redis.UniversalClient, timeout, tombstone time.Duration) *server {
	s := &server{rdb: rdb, lookups: timeout / 2, writes: timeout, tombstone: tombstone, hanging: conn.NewLimit(maxHanging)}
	switch rdb := rdb.(type) {
	case *redis.Client:
		s.honours = rdb.Options().ContextTimeoutEnabled
	case *redis.ClusterClient:
		s.honours, s.cluster = rdb.Options().ContextTimeoutEnabled, true
	}
	return s
}

// pipelines reports whether requests for one key are pipelines, too, and cost more. Before its first request that is
// no pipeline, a ClusterClient asks some master for its commands, for up to 5 s if that master hangs, and all such
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

// limitedGet is a GET, and its ctx, which has a deadline that no timer watches: go-redis makes it the
// deadline of the socket, also of a dial. It is for hits: a context.WithTimeout for each would cost more
// than everything else that is done for it here. Both are one allocation, as many as the GET alone.
//
// go-redis asks for Done once per command, and again where it may wait otherwise: for a connection, and
// between its attempts to dial or to send. Only then is there a timer.
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

// inTime is err, or errTimeout for an end of a request's ctx that was not an end of the caller's, of which
// go-redis says no more.
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

// ping asks for the key on a connection of its own, which the server has to accept within timeout, and to answer
// each time within timeout. A deadline that this process notices late is put off by as much (see conn.Conn), or if
// that of the dial is, there is no error: nothing is known of the server. If it refuses the login, it is asked on a
// connection of the client's that it let in before, if there is one; refused is that refusal.
func (s *server) ping(key string, timeout time.Duration) (refused, err error) {
	ctx, cancel := context.WithTimeoutCause(context.Background(), pingSteps*timeout, errTimeout)
	defer cancel()
	var like *redis.Client
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
		entries, failed, err := s.getMany(ctx, []string{key})
		if err == nil {
			err = failed[key]
		}
		if err != nil {
			return stored{}, inTime(ctx, err)
		}
		s.learnCommands(key)
		return entries[0], nil
	}
	if !s.honours {
		return do(ctx, s, s.lookups, func(ctx context.Context) (stored, error) { return storedIn(s.rdb.Get(ctx, key)) })
	}
	deadline := time.Now().Add(s.lookups)
	if before, limited := ctx.Deadline(); !limited || deadline.Before(before) {
		g := &limitedGet{Context: ctx, deadline: deadline}
		g.cmd = *redis.NewStringCmd(g, "get", key)
		defer g.stop()
		_ = s.rdb.Process(g, &g.cmd) // the command has its error
		x, err := storedIn(&g.cmd)
		return x, inTime(g.Context, err)
	}
	return storedIn(s.rdb.Get(ctx, key))
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

// comparison is what a reply has said of the server's clock.
type comparison struct {
	at     time.Time // by our clocks
	server int64     // in microseconds
}

// now is the time by the server's clock, in microseconds. What has passed since the last comparison is counted by both
// of our clocks, and the one that says more counts: the monotonic one stands still while the machine sleeps, and the
// wall clock may be set back. A process that only has hits would take old entries for fresh ones for as long.
func (s *server) now() int64 {
	if c := s.compared.Load(); c != nil {
		return c.server - clock.Left(clock.Now(), c.at).Microseconds()
	}
	return time.Now().UnixMicro() + s.ahead.Load()
}

// compareClocks learns the server's time from a reply that says it.
func (s *server) compareClocks(sent time.Time, serverTime int64) {
	now := clock.Now()
	s.compared.Store(&comparison{now.Add(-now.Sub(sent) / 2), serverTime})
}

// notBefore is now, or the time at which the stamp was made, if that is later: then our clock is behind. A process
// that only has hits learns no more of the server's clock than that, and would take old entries for fresh ones.
func (s *server) notBefore(stamp string, now int64) int64 {
	if s.compared.Load() != nil {
		return now
	}
	made, ok := madeAt(stamp)
	if !ok || made <= now {
		return now
	}
	for ahead := made - time.Now().UnixMicro(); ; {
		if old := s.ahead.Load(); old >= ahead || s.ahead.CompareAndSwap(old, ahead) {
			return made
		}
	}
}

// getMany is get for many keys: one MGET, or a pipeline on a Cluster, where the keys are on several
// servers. failed has the errors of single keys.
func (s *server) getMany(ctx context.Context, keys []string) (entries []stored, failed map[string]error, err error) {
	if !s.cluster {
		replies, err := do(ctx, s, s.lookups, func(ctx context.Context) ([]any, error) {
			return s.rdb.MGet(ctx, keys...).Result()
		})
		if err != nil {
			return nil, nil, err
		}
		entries = make([]stored, len(keys))
		for i, reply := range replies {
			if text, ok := reply.(string); ok { // else there is nothing, or no string
				entries[i] = storedText(text)
			}
		}
		return entries, nil, nil
	}
	cmds, err := do(ctx, s, s.lookups, func(ctx context.Context) ([]*redis.StringCmd, error) {
		p := s.rdb.Pipeline()
		cmds := make([]*redis.StringCmd, len(keys))
		for i, key := range keys {
			cmds[i] = p.Get(ctx, key)
		}
		_, err := p.Exec(ctx)
		for _, cmd := range cmds {
			switch {
			case cmd.Val() != "": // it is answered: see runAll
				cmd.SetErr(nil)
			case err != nil && !errors.Is(err, redis.Nil) && cmd.Err() == nil: // there is no such entry
				cmd.SetErr(notSent(err))
			}
		}
		return cmds, nil
	})
	if err != nil {
		return nil, nil, err
	}
	entries, failed = make([]stored, len(keys)), map[string]error{}
	for i, cmd := range cmds {
		if entries[i], err = storedIn(cmd); err != nil {
			failed[keys[i]] = err
		}
	}
	return entries, failed, nil
}

// getManyToLoad is getToLoad for many keys, in one pipeline.
func (s *server) getManyToLoad(ctx context.Context, keys []string) (list []found, failed map[string]error) {
	sent := time.Now()
	list, failed = make([]found, len(keys)), map[string]error{}
	args := func(int) []any { return []any{random(), millis(s.tombstone)} }
	replies := s.runAll(ctx, lookupScript, keys, s.lookups, args)
	for i, cmd := range replies {
		reply, err := cmd.Result()
		if err == nil {
			list[i], err = s.found(sent, reply)
		}
		if err != nil {
			failed[keys[i]] = err
		}
	}
	return list, failed
}

// putMany is put for many keys, in one pipeline. stored says of each whether it was.
func (s *server) putMany(
	ctx context.Context, keys []string, ws map[string]*writing,
) (stored []bool, failed map[string]error) {
	stored, failed = make([]bool, len(keys)), map[string]error{}
	for i, cmd := range s.runAll(ctx, storeScript, keys, s.writes, func(i int) []any { return ws[keys[i]].args() }) {
		n, err := cmd.Int64()
		if err != nil {
			failed[keys[i]] = err
		}
		stored[i] = n == 1
	}
	return stored, failed
}

// found is what a lookup before a load returns.
type found struct {
	entry stored
	now   int64 // the server's
}

// getToLoad is the lookup before a load.
func (s *server) getToLoad(ctx context.Context, key string) (found, error) {
	if s.pipelines() {
		list, failed := s.getManyToLoad(ctx, []string{key})
		return list[0], failed[key]
	}
	sent := time.Now()
	reply, err := do(ctx, s, s.lookups, func(ctx context.Context) (any, error) {
		return lookupScript.Run(ctx, s.rdb, []string{key}, random(), millis(s.tombstone)).Result()
	})
	if err != nil {
		return found{}, err
	}
	return s.found(sent, reply)
}

func (s *server) found(sent time.Time, reply any) (f found, err error) {
	if list, ok := reply.([]any); ok && len(list) == 2 {
		value, _ := list[0].(string)
		now, _ := list[1].(string)
		if f.now, ok = digits([]byte(now)); ok && now != "" {
			s.compareClocks(sent, f.now)
			f.entry = storedText(value)
			return f, nil
		}
	}
	return f, fmt.Errorf("rediscache: the server replied %.100q to a lookup", fmt.Sprint(reply))
}

// writing is what a store writes.
type writing struct {
	kind           string
	stamp          string // that was looked up
	fresh, expires time.Duration
	took           time.Duration
	payload        []byte
}

func (w *writing) args() []any {
	return []any{
		random(), w.stamp, w.kind,
		micros(w.fresh), micros(w.expires), millis(w.expires), tookText(w.took), w.payload,
	}
}

// put stores an entry if it has the stamp still.
func (s *server) put(ctx context.Context, key string, w *writing) (stored bool, err error) {
	if s.pipelines() {
		stored, failed := s.putMany(ctx, []string{key}, map[string]*writing{key: w})
		return stored[0], failed[key]
	}
	n, err := do(ctx, s, s.writes, func(ctx context.Context) (int64, error) {
		return storeScript.Run(ctx, s.rdb, []string{key}, w.args()...).Int64()
	})
	return n == 1, err
}

// maxPipeline is how many invalidations one pipeline has.
const maxPipeline = 500

// invalidate replaces entries by tombstones, in one pipeline, and returns those keys for which that failed.
func (s *server) invalidate(ctx context.Context, keys []string) (failed map[string]error) {
	failed = map[string]error{}
	args := func(int) []any { return []any{random(), millis(s.tombstone)} }
	for i, cmd := range s.runAll(ctx, invalidateScript, keys, s.writes, args) {
		if err := cmd.Err(); err != nil {
			failed[keys[i]] = err
		}
	}
	return failed
}

// runAll runs a script for each key, in one pipeline. A server that does not know the script is sent
// it with the keys that were refused.
func (s *server) runAll(
	ctx context.Context, script *redis.Script, keys []string, timeout time.Duration, args func(i int) []any,
) []*redis.Cmd {
	replies, caller := make([]*redis.Cmd, len(keys)), ctx
	send := func(which []int, add func(p redis.Pipeliner, i int) *redis.Cmd) {
		sent, err := do(ctx, s, timeout, func(ctx context.Context) ([]*redis.Cmd, error) {
			p := s.rdb.Pipeline()
			cmds := make([]*redis.Cmd, len(which))
			for n, i := range which {
				cmds[n] = add(p, i)
			}
			_, err := p.Exec(ctx)
			for _, cmd := range cmds {
				switch {
				case cmd.Val() != nil: // while a master hangs, go-redis has its error for what others have answered, too
					cmd.SetErr(nil)
				case cmd.Err() == nil:
					cmd.SetErr(notSent(err))
				default:
					cmd.SetErr(inTime(caller, cmd.Err()))
				}
			}
			return cmds, nil
		})
		for n, i := range which {
			if err != nil { // and nothing may be read of commands that are under way
				replies[i] = redis.NewCmdResult(nil, err)
			} else {
				replies[i] = sent[n]
			}
		}
	}
	all := make([]int, len(keys))
	for i := range all {
		all[i] = i
	}
	send(all, func(p redis.Pipeliner, i int) *redis.Cmd { return script.EvalSha(ctx, p, keys[i:i+1], args(i)...) })
	var unknown []int
	for i, cmd := range replies {
		if err := cmd.Err(); err != nil && strings.HasPrefix(err.Error(), "NOSCRIPT") {
			unknown = append(unknown, i)
		}
	}
	if len(unknown) > 0 {
		send(unknown, func(p redis.Pipeliner, i int) *redis.Cmd { return script.Eval(ctx, p, keys[i:i+1], args(i)...) })
	}
	return replies
}

// notSent is the error of a command that go-redis has left without a reply and without an error: if the
// server refuses the login of a connection (its password, maxclients), only Exec, which returned err,
// reports that.
func notSent(err error) error {
	if err == nil {
		return errors.New("rediscache: the request was not sent")
	}
	return err
}

// relearn has go-redis ask a Cluster who its masters are, in the background. It does that by itself when a server
// names another one for a slot, and else once a minute: it would go to a master that has died for as long, although a
// replica has taken over.
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
