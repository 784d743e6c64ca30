package node

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// Facts are what one Redis process shows of itself to a user who may do no more than
// lock. What could not be found out has its reason beside it.
type Facts struct {
	Addr    string
	User    string // whose rights were used
	Cluster bool   // a master of a Cluster that the client knows to be one

	Err error         // it does not serve us at all: nothing below was asked
	RTT time.Duration // of one command

	Hello    map[string]string // what HELLO tells, which no ACL can forbid: version, mode, role
	HelloErr error
	Info     map[string]string // INFO
	InfoErr  error
	Config   map[string]string // CONFIG GET of maxmemory-policy, appendonly and appendfsync
	ConfErr  error

	Clock    Clock
	ClockErr error

	Refused   []string // commands of the lock scripts that failed, each with its error
	ScriptErr error    // no script can be run

	NoKey     bool // no key with the prefix can be on this master, so the rest was not tried
	PubSubErr error
}

// Clock is how a server's clock runs against this process's, which counts validity.
type Clock struct {
	Offset, OffsetMargin time.Duration // how far it is ahead
	Drift, DriftMargin   float64       // how much it gains, per unit of time
}

// Times of a look at a server.
const (
	stepTime  = 2 * time.Second        // one command
	driftTime = 500 * time.Millisecond // between two looks at the clock, for its rate
	samples   = 5                      // of the clock; the one with the shortest round trip counts
)

// Inspect asks every server of a node for its facts, all at once. It needs no right that
// locking does not need, and returns when ctx ends at the latest, with what is known then;
// what hangs in a socket ends by itself, and go is called to run it. prefix is that of lock
// keys, nonce makes names that nobody else uses. An error says that the servers of a
// Cluster are not known.
func Inspect(ctx context.Context, client redis.UniversalClient, prefix, nonce string, run func(func())) ([]Facts, error) {
	servers, err := Await(ctx, run, func() ([]*redis.Client, error) { return masters(ctx, client) })
	if err != nil {
		return nil, err
	}
	cluster, _ := client.(*redis.ClusterClient)
	type result struct {
		i int
		f Facts
	}
	all := make([]Facts, len(servers))
	results := make(chan result, len(servers))
	for i, c := range servers {
		p := &probe{ctx: ctx, c: conn.WithTimeout(c, stepTime), key: keyOn(ctx, cluster, c, prefix, nonce)}
		p.f = Facts{Addr: c.Options().Addr, User: c.Options().Username, Cluster: cluster != nil}
		all[i] = p.f
		all[i].Err = errNoAnswer
		run(func() {
			p.look()
			results <- result{i, p.f}
		})
	}
	for range servers {
		select {
		case r := <-results:
			all[r.i] = r.f
		case <-ctx.Done():
			return all, nil
		}
	}
	return all, nil
}

var errNoAnswer = errors.New("no answer in the time for the check")

// Await runs f by run and gives its result, or errNoAnswer if f takes longer than ctx.
func Await[T any](ctx context.Context, run func(func()), f func() (T, error)) (T, error) {
	return conn.AwaitOn(ctx, run, f, nil, func() error { return errNoAnswer })
}

// masters gives a client for each server that takes part in locking.
func masters(ctx context.Context, client redis.UniversalClient) ([]*redis.Client, error) {
	cluster, ok := client.(*redis.ClusterClient)
	if !ok {
		return []*redis.Client{client.(*redis.Client)}, nil
	}
	found := make(chan *redis.Client, slots)
	err := cluster.ForEachMaster(ctx, func(_ context.Context, c *redis.Client) error {
		found <- c
		return nil
	})
	close(found)
	var all []*redis.Client
	for c := range found {
		all = append(all, c)
	}
	if err == nil && len(all) == 0 {
		err = errors.New("the Cluster names no master")
	}
	return all, err
}

// keyOn makes up a lock key whose slot server has; "" if there is none, as when the prefix
// has a hash tag that belongs elsewhere.
func keyOn(ctx context.Context, cluster *redis.ClusterClient, server *redis.Client, prefix, nonce string) string {
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

// probe looks at one server. A command that gets no answer ends the look: the others
// would not get one either, and each would take its time.
type probe struct {
	ctx  context.Context
	c    *redis.Client
	key  string // a lock key that nobody uses; "" if none can be here
	f    Facts
	dead error
}

func (p *probe) look() {
	p.hello()
	if p.f.Err = p.dead; p.dead != nil {
		if !conn.IsReply(p.dead) && !conn.TimedOut(p.dead) { // it may have said why
			if err := conn.Probe(p.ctx, p.c, stepTime); errors.Is(err, conn.ErrLogin) {
				p.f.Err = err
			}
		}
		return
	}
	base := time.Now()
	first, err := p.readClock(base)
	p.info()
	p.config()
	if p.f.NoKey = p.key == ""; !p.f.NoKey {
		p.scripts()
		p.pubsub()
	}
	if p.f.ClockErr = err; err == nil {
		p.f.RTT = min(p.f.RTT, 2*first.margin)
		p.clock(base, first)
	}
}

// do makes one call, unless the server has stopped answering before.
func (p *probe) do(call func(ctx context.Context) error) error {
	if p.dead != nil {
		return p.dead
	}
	ctx, cancel := context.WithTimeout(p.ctx, stepTime)
	defer cancel()
	err := call(ctx)
	switch {
	case err != nil && !conn.IsReply(err), conn.HasCode(err, "NOAUTH", "WRONGPASS", "LOADING"):
		p.dead = err
	}
	return err
}

// hello asks who is there. It tells how long a round trip takes, too.
func (p *probe) hello() {
	_ = p.do(func(ctx context.Context) error { return p.c.Do(ctx, "HELLO").Err() }) // so that the connection is up
	began := time.Now()
	p.f.HelloErr = p.do(func(ctx context.Context) error {
		v, err := p.c.Do(ctx, "HELLO").Result()
		p.f.Hello = pairs(v)
		return err
	})
	p.f.RTT = time.Since(began)
}

// pairs reads a map as either protocol has it.
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

func (p *probe) info() {
	p.f.InfoErr = p.do(func(ctx context.Context) error {
		text, err := p.c.Info(ctx).Result()
		p.f.Info = map[string]string{}
		for line := range strings.Lines(text) {
			if k, v, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
				p.f.Info[k] = v
			}
		}
		return err
	})
}

func (p *probe) config() {
	p.f.Config = map[string]string{}
	for _, name := range []string{"maxmemory-policy", "maxmemory", "appendonly", "appendfsync"} {
		p.f.ConfErr = p.do(func(ctx context.Context) error {
			got, err := p.c.ConfigGet(ctx, name).Result()
			for k, v := range got {
				p.f.Config[k] = v
			}
			return err
		})
		if p.f.ConfErr != nil {
			return
		}
	}
}

// scripts tries the commands of the lock scripts, as a script.
func (p *probe) scripts() {
	own := Reserved + string(tagOf(p.key)) + "}:check:" + p.key[max(0, len(p.key)-40):]
	p.f.ScriptErr = p.do(func(ctx context.Context) error {
		if err := p.c.ScriptLoad(ctx, lua.Check.Source).Err(); err != nil {
			return fmt.Errorf("SCRIPT LOAD: %w", err)
		}
		failed, err := p.c.EvalSha(ctx, lua.Check.SHA, []string{p.key, own}).StringSlice()
		if err != nil {
			return fmt.Errorf("EVALSHA: %w", err)
		}
		for i := 0; i+1 < len(failed); i += 2 {
			p.f.Refused = append(p.f.Refused, failed[i]+": "+failed[i+1])
		}
		return nil
	})
}

// pubsub subscribes to the channel of a lock and sends a notice on it. On a Cluster of
// Redis 7 that is sharded pub/sub, which stays on the master of the slot.
func (p *probe) pubsub() {
	sharded := p.f.Cluster && major(p.f.Hello["version"]) >= 7
	if p.f.PubSubErr = p.dead; p.dead != nil {
		return
	}
	// Not by do: a notice that does not come says nothing of other commands.
	p.f.PubSubErr = func() error {
		ctx, cancel := context.WithTimeout(p.ctx, stepTime)
		defer cancel()
		subscribe, publish := p.c.Subscribe, p.c.Publish
		if sharded {
			subscribe, publish = p.c.SSubscribe, p.c.SPublish
		}
		sub := subscribe(ctx, p.key)
		defer sub.Close()
		if _, err := sub.ReceiveTimeout(ctx, stepTime); err != nil {
			return fmt.Errorf("subscribing: %w", err)
		}
		if err := publish(ctx, p.key, "check").Err(); err != nil {
			return fmt.Errorf("publishing: %w", err)
		}
		if _, err := sub.ReceiveTimeout(ctx, stepTime); err != nil {
			return fmt.Errorf("waiting for the notice: %w", err)
		}
		return nil
	}()
}

// reading is one look at a server's clock.
type reading struct {
	at             time.Duration // since base, in this process's monotonic time
	offset, margin time.Duration // how far the server is ahead
}

// readClock takes the best of some readings. Local time is base and the monotonic time since:
// this process's wall clock may be set at any moment.
func (p *probe) readClock(base time.Time) (best reading, err error) {
	for range samples {
		began := time.Since(base)
		var server time.Time
		err = p.do(func(ctx context.Context) (err error) {
			server, err = p.c.Time(ctx).Result()
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
func (p *probe) clock(base time.Time, first reading) {
	select {
	case <-time.After(driftTime - (time.Since(base) - first.at)):
	case <-p.ctx.Done():
	}
	last, err := p.readClock(base)
	if p.f.ClockErr = err; err != nil {
		return
	}
	took := float64(last.at - first.at)
	p.f.Clock = Clock{
		Offset: last.offset, OffsetMargin: last.margin,
		Drift:       float64(last.offset-first.offset) / took,
		DriftMargin: float64(last.margin+first.margin) / took,
	}
}

func tagOf(key string) []byte {
	tag := slotTags()[SlotOf(key)]
	return tag[:]
}

// major is the first number of a version.
func major(version string) int {
	first, _, _ := strings.Cut(version, ".")
	n, _ := strconv.Atoi(first)
	return n
}
