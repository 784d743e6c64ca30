package servers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/flightlock/flightlock/lua"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// A subject is so many nodes of a kind, and what is tried on them.
type subject struct {
	kind      string
	urls      []string
	servers   []*redistest.Server // they are none of a Cluster
	isCluster bool                // each of these is for clients of a Cluster
	opts      flightlock.Options
	client    *flightlock.Client
	report    flightlock.Report // of check
}

// start gives n nodes of the kind. "cluster" is a Cluster itself.
func start(t *testing.T, name string, n int) *subject {
	t.Helper()
	s := &subject{kind: name, opts: lockkit.Patient, isCluster: name == "cluster"}
	s.opts.KeyPrefix = fmt.Sprintf("%s:%d:", name, n)
	for i := range n {
		if name == "cluster" {
			s.urls = append(s.urls, "redis://"+strings.Join(clusters[i].Get(t).Addrs(), "?addr="))
			continue
		}
		kind, err := redistest.KindNamed(name)
		testkit.Must(t, err)
		var addrs []string
		if kind.IsSharded() {
			addrs = clusters[i].Get(t).Addrs()
		} else {
			server := redistest.StartServer(t)
			s.servers, addrs = append(s.servers, server), []string{server.Addr()}
		}
		addr := redistest.StartKind(t, kind, addrs...).Addr()
		if s.isCluster = kind.IsCluster(); s.isCluster {
			addr += "?addr=" + addr
		}
		s.urls = append(s.urls, "redis://"+addr)
	}
	s.client = s.another(t)
	return s
}

// another is one more client on the nodes.
func (s *subject) another(t *testing.T) *flightlock.Client {
	t.Helper()
	return lockkit.Open(t, s.opts, s.urls...)
}

// works is the outcome of what does all that it does on Redis 7. Others are "works without" and what is
// missing, and refused and the error.
const (
	works   = "works"
	refused = "refused: "
)

// tries are what is tried, by the names of the columns of the table.
var tries = []struct {
	name string
	try  func(t *testing.T, ctx context.Context, s *subject) (outcome string)
}{
	{"ready", ready},
	{"uncontended", uncontended},
	{"200 keys", manyKeys},
	{"one key", oneKey},
	{"refresh", refresh},
	{"cache", cache},
	{"check", check},
	{"mode", mode},
	{"loss", loss},
}

// loss has the third of three nodes lose its data while another has a key on that and on the first: then it
// has no vote, so that the key cannot be had, or there is no quarantine, and a second one gets it.
func loss(t *testing.T, ctx context.Context, s *subject) string {
	const key = "lost"
	l, err := s.client.SingleFlightLock(ctx, key, 30*time.Second, patient)
	if err != nil {
		return refused + err.Error()
	}
	testkit.Must(t, l.Release(ctx))
	first := s.redis(0) // what the third one has of it is about to be lost
	testkit.Must(t, first.Set(ctx, s.opts.KeyPrefix+key, "another", time.Hour).Err())
	testkit.Must(t, first.Close())
	if len(s.servers) > 0 {
		s.servers[2].Do(t, "FLUSHALL")
	} else { // other kinds share the Cluster, and have no marker on it either
		rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: clusters[2].Get(t).Addrs()})
		testkit.Must(t, rdb.Del(ctx, lua.Marker).Err())
		testkit.Must(t, rdb.Close())
	}
	for {
		_, err := s.client.TryLock(ctx, key, 30*time.Second)
		var votes *flightlock.QuorumError
		switch {
		case err == nil:
			return "works without quarantine"
		case !errors.As(err, &votes) || ctx.Err() != nil:
			return fmt.Sprintf("%sTryLock: %v", refused, err)
		case s.client.Stats().Quarantined == 1:
			return works
		}
	}
}

// redis is a client of a node.
func (s *subject) redis(i int) redis.UniversalClient {
	addr := strings.TrimPrefix(strings.SplitN(s.urls[i], "?", 2)[0], "redis://")
	return redis.NewUniversalClient(&redis.UniversalOptions{Addrs: []string{addr}, IsClusterMode: s.isCluster})
}

func ready(_ *testing.T, ctx context.Context, s *subject) string {
	if err := s.client.Ready(ctx); err != nil {
		return refused + err.Error()
	}
	return works
}

// patient is the strategy of all locks: it gives up where there is no majority.
var patient = flightlock.FailFast(nil)

// uncontended locks one key a few times. Tokens rise, and nothing is left of it.
func uncontended(t *testing.T, ctx context.Context, s *subject) string {
	last := int64(0)
	for range 10 {
		l, err := s.client.SingleFlightLock(ctx, "uncontended", 30*time.Second, patient)
		if err != nil {
			return refused + err.Error()
		}
		if l.Fence() <= last {
			t.Errorf("a token of %d after one of %d", l.Fence(), last)
		}
		last = l.Fence()
		if err := l.Release(ctx); err != nil {
			return refused + "Release: " + err.Error()
		}
	}
	return works
}

// manyKeys locks 200 keys at once, each of them twice.
func manyKeys(_ *testing.T, ctx context.Context, s *subject) string {
	errs := make(chan error, 400)
	var all sync.WaitGroup
	for i := range cap(errs) {
		all.Go(func() {
			l, err := s.client.SingleFlightLock(ctx, fmt.Sprint("many ", i%200), 30*time.Second, patient)
			if err == nil {
				err = l.Release(ctx)
			}
			errs <- err
		})
	}
	all.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			return refused + err.Error()
		}
	}
	return works
}

// oneKey has three clients want one key, again and again: one has it at a time, and tokens rise. Releases
// that grant the key to the next are expected to come, in the end, where they can.
func oneKey(t *testing.T, ctx context.Context, s *subject) string {
	clients := []*flightlock.Client{s.client, s.another(t), s.another(t)}
	var holders, last atomic.Int64
	turns := func(c *flightlock.Client) error {
		for range 3 {
			l, err := c.SingleFlightLock(ctx, "one", 30*time.Second, patient)
			if err != nil {
				return err
			}
			if n := holders.Add(1); n != 1 {
				t.Errorf("%d holders", n)
			}
			if before := last.Swap(l.Fence()); before >= l.Fence() {
				t.Errorf("a token of %d after one of %d", l.Fence(), before)
			}
			holders.Add(-1)
			if err := l.Release(ctx); err != nil {
				return err
			}
		}
		return nil
	}
	grants := func() (n uint64) {
		for _, c := range clients {
			n += c.Stats().Grants
		}
		return n
	}
	before := grants()
	for round := 0; round == 0 || round < 50 && grants() == before && s.grants(); round++ {
		errs := make(chan error, len(clients))
		for _, c := range clients {
			go func() { errs <- turns(c) }()
		}
		var failed error
		for range clients {
			failed = errors.Join(failed, <-errs)
		}
		if failed != nil {
			return refused + failed.Error()
		}
	}
	if grants() == before {
		return "works without grants"
	}
	return works
}

// grants reports whether the table says that releases grant keys here.
func (s *subject) grants() bool { return s.expected("one key") == works }

// refresh refreshes a lock, which then is valid for longer.
func refresh(t *testing.T, ctx context.Context, s *subject) string {
	l, err := s.client.SingleFlightLock(ctx, "refreshed", 30*time.Second, patient)
	if err != nil {
		return refused + err.Error()
	}
	defer l.Release(ctx)
	until := l.Until()
	if err := l.Refresh(ctx); err != nil {
		return refused + err.Error()
	}
	if !l.Until().After(until) {
		t.Errorf("valid until %v, and refreshed until %v", until, l.Until())
	}
	return works
}

// cache has values at the first node, and locks for its loads.
func cache(t *testing.T, ctx context.Context, s *subject) string {
	rdb := s.redis(0)
	defer rdb.Close()
	var loads atomic.Int64
	c, err := rediscache.New(s.client, rdb, fetch.Each(func(_ context.Context, key string) (string, error) {
		loads.Add(1)
		return "value of " + key, nil
	}), rediscache.Options[string]{Name: fmt.Sprintf("%s-%d", s.kind, len(s.urls)), Fresh: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(ctx)
	keys := []string{"a", "b", "c", "d", "e", "f"}
	for range 3 {
		got, err := c.GetMany(ctx, keys)
		if err != nil || len(got) != len(keys) || got["f"] != "value of f" {
			return fmt.Sprintf("%sGetMany: %v, %v", refused, got, err)
		}
	}
	if v, err := c.Get(ctx, "a"); err != nil || v != "value of a" {
		return fmt.Sprintf("%sGet: %q, %v", refused, v, err)
	}
	var missing []string
	if n := loads.Load(); n > int64(len(keys)) {
		missing = append(missing, "stored values")
	}
	if c.Stats().UnlockedLoads > 0 {
		missing = append(missing, "locks")
	}
	if err := c.Invalidate(ctx, keys...); err != nil {
		missing = append(missing, "Invalidate")
	}
	if len(missing) > 0 {
		return "works without " + strings.Join(missing, ", ")
	}
	return works
}

// mode is how the first node is used, as Check says it: works is by EVALSHA, with grants, and with quarantine
// if there are three nodes. It begins with the server's name, which is left out.
func mode(_ *testing.T, _ context.Context, s *subject) string {
	for _, f := range s.report.Findings {
		if f.Check != "mode" {
			continue
		}
		if f.Status != flightlock.StatusOK {
			return refused + f.Found
		}
		_, words, _ := strings.Cut(f.Found, ", ") // the name of the server
		if words == "EVALSHA, grants, quarantine" || words == "EVALSHA, grants, no quarantine" && len(s.urls) == 1 {
			return works + " by " + words
		}
		return words
	}
	return refused + "no such finding"
}

// about are the findings of Check that concern the kind of a server, and not its settings or the machine.
var about = []string{
	"reachable", "version", "role", "quarantine", "script rights", "kind", "pubsub rights", "same server",
	"locks",
}

// check runs Check. Its outcome has each finding that warns or fails once.
func check(t *testing.T, ctx context.Context, s *subject) string {
	r, err := s.client.Check(ctx)
	if s.report = r; err != nil {
		return refused + err.Error()
	}
	var all []string
	for _, f := range r.Findings {
		if f.Check == "kind" && !slices.Contains(kindsOfTheDocs(t)[f.Found], s.kind) {
			t.Errorf("the kind is said to be %q", f.Found)
		}
		finding := string(f.Status) + "s: " + f.Check
		bad := f.Status == flightlock.StatusWarn || f.Status == flightlock.StatusFail
		if bad && slices.Contains(about, f.Check) && !slices.Contains(all, finding) {
			all = append(all, finding)
		}
	}
	if len(all) == 0 {
		return works
	}
	return strings.Join(all, ", ")
}
