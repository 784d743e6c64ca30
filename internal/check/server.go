package check

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/redis/go-redis/v9"
)

// serverInfo is what one Redis process reports to a user that has only the rights that locking
// needs. Next to each value is the error if it could not be determined.
type serverInfo struct {
	Addr    string
	User    string // whose rights were used
	Cluster bool   // a master of a Cluster that the client knows to be one

	Err error         // the server cannot be used at all: nothing below was determined
	RTT time.Duration // of one command

	Hello    map[string]string // what HELLO reports, which no ACL can forbid: version, mode, role
	HelloErr error
	Info     map[string]string // INFO
	InfoErr  error
	Settings map[string]string // CONFIG GET of what judgePersistence needs, and INFO does not have
	ConfErr  error

	Clock    clockInfo
	ClockErr error

	Refused   []string // commands of the lock scripts that failed, each with its error
	ScriptErr error    // no script can be run
	NoScript  bool     // because the server answers other commands, and none
	Apart     error    // scripts may not access keys of two hash slots

	NoKey     bool // no key with the prefix can be on this master, so the rest was not tried
	PubSubErr error
}

// clockInfo compares a server's clock with that of this process, which counts validity.
type clockInfo struct {
	Offset, OffsetMargin time.Duration // how far it is ahead
	Drift, DriftMargin   float64       // how much it gains, per unit of time
}

// Times of an inspection.
const (
	stepTime    = 2 * time.Second // of one step at least; ten times NodeTimeout, and longestStep at most
	longestStep = 10 * time.Second
	driftTime   = 500 * time.Millisecond // between two readings of the clock, for its rate
	samples     = 5                      // of the clock; the one with the shortest round trip counts
)

// inspect queries all servers of a node concurrently. It needs only the rights that locking needs,
// and returns what is known when ctx ends, if not earlier. A call that hangs in a socket ends later,
// on the goroutine that run started for it. prefix is that of lock keys; nonce makes names that no
// other check uses. An error reports that the servers of a Cluster are not known.
func inspect(ctx context.Context, client redis.UniversalClient, prefix, nonce string, step time.Duration,
	run func(func())) ([]serverInfo, error) {
	servers, err := await(ctx, run, func() ([]*redis.Client, error) { return node.Masters(ctx, client) })
	if err != nil {
		return nil, err
	}
	cluster, _ := client.(*redis.ClusterClient)
	of := func(i int) serverInfo {
		o := servers[i].Options()
		return serverInfo{Addr: o.Addr, User: o.Username, Cluster: cluster != nil}
	}
	all := make([]serverInfo, len(servers))
	for i, r := range each(ctx, run, len(servers), func(i int) (serverInfo, error) {
		c := conn.WithTimeout(servers[i], step)
		in := &inspection{ctx: ctx, step: step, c: c, key: keyOn(ctx, cluster, servers[i], prefix, nonce),
			got: of(i)}
		in.inspect()
		return in.got, nil
	}) {
		if all[i] = r.v; r.err != nil {
			all[i] = of(i)
			all[i].Err = r.err
		}
	}
	return all, nil
}

var errNoAnswer = errors.New("no answer in the time for the check")

// await returns what f returns, or errNoAnswer once ctx has ended. run starts f.
func await[T any](ctx context.Context, run func(func()), f func() (T, error)) (T, error) {
	return conn.AwaitOn(ctx, run, f, nil, func() error { return errNoAnswer })
}

// result is what a call has returned.
type result[T any] struct {
	v   T
	err error
}

// each makes n calls at once, and returns their results, which are errNoAnswer for those that have none when
// ctx ends.
func each[T any](ctx context.Context, run func(func()), n int, call func(i int) (T, error)) []result[T] {
	all := make([]result[T], n)
	var wg sync.WaitGroup
	for i := range all {
		wg.Go(func() { all[i].v, all[i].err = await(ctx, run, func() (T, error) { return call(i) }) })
	}
	wg.Wait()
	return all
}

// keyOn returns an unused lock key whose slot server has; "" if there is none, for example because
// the prefix has a hash tag whose slot is elsewhere.
func keyOn(ctx context.Context, cluster *redis.ClusterClient, server *redis.Client, prefix,
	nonce string) string {
	const tries = 4096 // a master with few slots may need many
	for i := range tries {
		key := fmt.Sprintf("%sflightlock-check:%s:%d", prefix, nonce, i)
		if cluster == nil {
			return key
		}
		if c, err := cluster.MasterForKey(ctx, key); err == nil && c.Options().Addr == server.Options().Addr {
			return key
		}
	}
	return ""
}

// inspection queries one server. A command without a reply ends it: further commands would get none
// either, and each would take its full timeout.
type inspection struct {
	ctx  context.Context
	step time.Duration // for one step, which may be several commands
	c    *redis.Client
	key  string // an unused lock key; "" if this server can have none
	got  serverInfo
	dead error
}

func (in *inspection) inspect() {
	in.hello()
	in.got.Err = in.dead
	if in.askAboutLogin() {
		if err := conn.RefusedLogin(in.ctx, in.c, in.step); err != nil {
			in.got.Err = err
		}
	}
	if in.got.Err != nil {
		return
	}
	base := time.Now()
	first, err := in.readClock(base)
	in.info()
	in.config()
	if in.got.NoKey = in.key == ""; !in.got.NoKey {
		in.scripts()
		in.pubsub()
	}
	if in.got.ClockErr = err; err == nil {
		in.got.RTT = min(in.got.RTT, 2*first.margin)
		in.clock(base, first)
	}
}

// do makes one call, unless an earlier call got no reply.
func (in *inspection) do(call func(ctx context.Context) error) error {
	if in.dead != nil {
		return in.dead
	}
	ctx, cancel := context.WithTimeout(in.ctx, in.step)
	defer cancel()
	err := call(ctx)
	switch {
	case err != nil && !conn.IsReply(err), conn.Says(err, conn.Always):
		in.dead = err
	}
	return err
}

// hello reads version, mode and role, and measures a round trip.
func (in *inspection) hello() {
	// establishes the connection
	_ = in.do(func(ctx context.Context) error { return in.c.Do(ctx, "HELLO").Err() })
	began := time.Now()
	in.got.HelloErr = in.do(func(ctx context.Context) error {
		v, err := in.c.Do(ctx, "HELLO").Result()
		in.got.Hello = pairs(v)
		return err
	})
	in.got.RTT = time.Since(began)
}

// askAboutLogin reports whether HELLO failed in a way that may be a refused login: the connection was
// closed, maybe after an answer that go-redis does not return, or there is a reply, which may be to a
// step of the login (AUTH, SELECT, CLIENT SETNAME) and then is the reply to every command. Those that
// say by themselves what is wrong need no second login.
func (in *inspection) askAboutLogin() bool {
	err := in.got.HelloErr
	return err != nil && !conn.TimedOut(err) && !conn.Says(err, conn.Always|conn.Rights)
}

// pairs reads a map from the reply of either protocol version.
func pairs(v any) map[string]string {
	m := map[string]string{}
	switch v := v.(type) {
	case map[any]any:
		for k, val := range v {
			m[fmt.Sprint(k)] = fmt.Sprint(val)
		}
	case []any:
		for i := 0; i+1 < len(v); i += 2 {
			m[fmt.Sprint(v[i])] = fmt.Sprint(v[i+1])
		}
	}
	return m
}

func (in *inspection) info() {
	in.got.InfoErr = in.do(func(ctx context.Context) error {
		text, err := in.c.Info(ctx).Result()
		in.got.Info = map[string]string{}
		for line := range strings.Lines(text) {
			if k, v, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
				in.got.Info[k] = v
			}
		}
		return err
	})
}

func (in *inspection) config() {
	in.got.Settings = map[string]string{}
	for _, name := range []string{"appendfsync", "no-appendfsync-on-rewrite"} {
		in.got.ConfErr = in.do(func(ctx context.Context) error {
			got, err := in.c.ConfigGet(ctx, name).Result()
			for k, v := range got {
				in.got.Settings[k] = v
			}
			return err
		})
		if in.got.ConfErr != nil {
			return
		}
	}
}

// scripts tries the commands of the lock scripts within a script, then these scripts, and on a Cluster
// what goes before one. A server that is no member of a Cluster, as far as is known, may nevertheless
// be several: so keys of several slots are tried.
func (in *inspection) scripts() {
	keys, alive := []string{in.key}, in.dead == nil
	if !in.got.Cluster {
		for _, tag := range node.SpreadTags() {
			keys = append(keys, in.key+"{"+tag+"}")
		}
	}
	for _, key := range keys {
		in.got.ScriptErr = in.do(func(ctx context.Context) error { return in.tryScripts(ctx, key) })
		if in.got.ScriptErr != nil || len(in.got.Refused) > 0 {
			break
		}
	}
	if !in.got.Cluster && in.got.ScriptErr == nil {
		_ = in.do(func(ctx context.Context) (err error) {
			in.got.Apart, err = node.TrySlots(ctx, in.c)
			return err
		})
	}
	in.got.NoScript = alive && conn.TimedOut(in.got.ScriptErr) && in.ctx.Err() == nil
	if in.got.Cluster && in.got.ScriptErr == nil { // it goes before a script whose slot moves
		err := in.do(func(ctx context.Context) error { return in.c.Do(ctx, "ASKING").Err() })
		if conn.IsReply(err) {
			in.got.Refused = append(in.got.Refused, "ASKING: "+err.Error())
		}
	}
}

// tryScripts tries the commands of the lock scripts for key, and if all may be called, these scripts.
func (in *inspection) tryScripts(ctx context.Context, key string) error {
	own := node.Reserved + node.SlotTag(key) + "}:check:" + key[max(0, len(key)-40):]
	refused, err := node.Refused(ctx, in.c, key, own)
	for _, name := range slices.Sorted(maps.Keys(refused)) {
		in.got.Refused = append(in.got.Refused, name+": "+refused[name].Error())
	}
	if err != nil || len(refused) > 0 {
		return err
	}
	return node.TryScripts(ctx, in.c, key, own, in.key)
}

// errNoRESP3 is why a server sends no notices to a link, whatever it does for connections of subscriptions.
var errNoRESP3 = errors.New("the server refuses RESP3, by which notices arrive")

// speaksRESP3 is errNoRESP3, or nil. The user's client may have been told to do without.
func (in *inspection) speaksRESP3() error {
	if in.got.Hello["proto"] == "3" {
		return nil
	}
	ctx, cancel := context.WithTimeout(in.ctx, in.step)
	defer cancel()
	own, err := conn.DialOnce(ctx, in.c.Options(), in.step, conn.NewLimit(1),
		func(o *redis.Options) { o.Protocol = 3 })
	if err != nil {
		return err
	}
	defer own.Close()
	v, err := own.Do(ctx, "HELLO", "3").Result() // some know it only with the version
	if err != nil && !conn.IsReply(err) {
		return err
	}
	if pairs(v)["proto"] != "3" {
		return errNoRESP3
	}
	return nil
}

// pubsub subscribes to an inbox and sends a notice there. On a Cluster of Redis 7 it takes the
// channel of a lock and sharded pub/sub, which stays on the master of the slot.
func (in *inspection) pubsub() {
	sharded := in.got.Cluster && !older(in.got.Hello["version"], "7.0")
	if in.got.PubSubErr = in.dead; in.dead != nil {
		return
	}
	// Not by do: a missing notice does not mean that other commands get no reply.
	in.got.PubSubErr = func() error {
		if err := in.speaksRESP3(); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(in.ctx, in.step)
		defer cancel()
		subscribe, publish, channel := in.c.Subscribe, in.c.Publish, node.Inbox+in.key
		if sharded {
			subscribe, publish, channel = in.c.SSubscribe, in.c.SPublish, in.key
		}
		sub := subscribe(ctx, channel)
		defer sub.Close()
		if _, err := sub.ReceiveTimeout(ctx, in.step); err != nil {
			return fmt.Errorf("subscribing: %w", err)
		}
		if err := publish(ctx, channel, "check").Err(); err != nil {
			return fmt.Errorf("publishing: %w", err)
		}
		if _, err := sub.ReceiveTimeout(ctx, in.step); err != nil {
			return fmt.Errorf("waiting for the notice: %w", err)
		}
		return nil
	}()
}

// reading is one reading of a server's clock.
type reading struct {
	at             time.Duration // since base, in this process's monotonic time
	offset, margin time.Duration // how far the server is ahead
}

// readClock returns the best of several readings. Local time is base plus the monotonic time since
// then, because this process's wall clock may be set at any moment.
func (in *inspection) readClock(base time.Time) (best reading, err error) {
	for range samples {
		began := time.Since(base)
		var server time.Time
		err = in.do(func(ctx context.Context) (err error) {
			server, err = in.c.Time(ctx).Result()
			return err
		})
		if err != nil {
			return reading{}, err
		}
		half := (time.Since(base) - began) / 2
		r := reading{at: began + half, margin: half}
		r.offset = server.Sub(base.Round(0).Add(r.at))
		if best.at == 0 || r.margin < best.margin {
			best = r
		}
	}
	return best, nil
}

// clock compares a later reading with the first.
func (in *inspection) clock(base time.Time, first reading) {
	select {
	case <-time.After(driftTime - (time.Since(base) - first.at)):
	case <-in.ctx.Done():
	}
	last, err := in.readClock(base)
	if in.got.ClockErr = err; err != nil {
		return
	}
	took := float64(last.at - first.at)
	in.got.Clock = clockInfo{
		Offset: last.offset, OffsetMargin: last.margin,
		Drift:       float64(last.offset-first.offset) / took,
		DriftMargin: float64(last.margin+first.margin) / took,
	}
}
