package flightlock_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// Bad options are an ErrInvalid that names the field, before any traffic.
func TestNewRefusesBadOptions(t *testing.T) {
	node := func() redis.UniversalClient {
		c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
		t.Cleanup(func() { c.Close() })
		return c
	}
	one := node()
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	defer ring.Close()
	failover := redis.NewFailoverClusterClient(&redis.FailoverOptions{MasterName: "m",
		SentinelAddrs: []string{"127.0.0.1:1"}})
	defer failover.Close()
	universal := redis.NewUniversalClient(&redis.UniversalOptions{MasterName: "m", Addrs: []string{"127.0.0.1:1"},
		RouteByLatency: true})
	defer universal.Close()
	var many []redis.UniversalClient
	for range 65 {
		many = append(many, one)
	}
	for name, tc := range map[string]struct {
		opts flightlock.Options
		says []string
	}{
		"no nodes":       {flightlock.Options{}, []string{"Options.Nodes", "at least one"}},
		"too many nodes": {flightlock.Options{Nodes: many}, []string{"Options.Nodes", "65", "64"}},
		"nil node": {flightlock.Options{Nodes: []redis.UniversalClient{one, nil}},
			[]string{"Options.Nodes[1]", "nil"}},
		"typed nil node": {flightlock.Options{Nodes: []redis.UniversalClient{(*redis.Client)(nil)}},
			[]string{"Options.Nodes[0]", "nil"}},
		"ring": {flightlock.Options{Nodes: []redis.UniversalClient{ring}}, []string{"Options.Nodes[0]", "Ring"}},
		"failover cluster": {flightlock.Options{Nodes: []redis.UniversalClient{one, failover}},
			[]string{"Options.Nodes[1]", "NewFailoverClient"}},
		"universal failover cluster": {flightlock.Options{Nodes: []redis.UniversalClient{universal}},
			[]string{"Options.Nodes[0]", "NewFailoverClient"}},
		"same client twice": {flightlock.Options{Nodes: []redis.UniversalClient{one, one}},
			[]string{"Options.Nodes[1]", "Nodes[0]"}},
		"same address twice": {flightlock.Options{Nodes: []redis.UniversalClient{one, node()}},
			[]string{"Options.Nodes[1]", "127.0.0.1:1", "Nodes[0]"}},
		"negative NodeTimeout": {flightlock.Options{Nodes: []redis.UniversalClient{one}, NodeTimeout: -time.Second},
			[]string{"NodeTimeout", "-1s", "1ms"}},
		"long NodeTimeout": {flightlock.Options{Nodes: []redis.UniversalClient{one}, NodeTimeout: time.Minute + 1},
			[]string{"NodeTimeout", "1m0.000000001s", "1m0s"}},
		"endless NodeTimeout": {flightlock.Options{Nodes: []redis.UniversalClient{one}, NodeTimeout: math.MaxInt64},
			[]string{"NodeTimeout", "1m0s"}},
		"long MaxTTL": {flightlock.Options{Nodes: []redis.UniversalClient{one}, MaxTTL: 24*time.Hour + 1},
			[]string{"MaxTTL", "24h0m0.000000001s", "24h0m0s"}},
		"endless MaxTTL": {flightlock.Options{Nodes: []redis.UniversalClient{one}, MaxTTL: math.MaxInt64},
			[]string{"MaxTTL", "24h0m0s"}},
		"tiny MaxTTL": {flightlock.Options{Nodes: []redis.UniversalClient{one}, MaxTTL: time.Millisecond},
			[]string{"MaxTTL", "1ms", "10ms"}},
		"negative DriftFactor": {flightlock.Options{Nodes: []redis.UniversalClient{one}, DriftFactor: -0.1},
			[]string{"DriftFactor", "-0.1", "0.5"}},
		"NaN DriftFactor": {flightlock.Options{Nodes: []redis.UniversalClient{one}, DriftFactor: math.NaN()},
			[]string{"DriftFactor", "NaN"}},
		"negative MaxWaiters": {flightlock.Options{Nodes: []redis.UniversalClient{one}, MaxWaiters: -1},
			[]string{"MaxWaiters", "-1", "0"}},
		"long KeyPrefix": {flightlock.Options{Nodes: []redis.UniversalClient{one},
			KeyPrefix: strings.Repeat("x", 4097)}, []string{"KeyPrefix", "4097", "4096"}},
		"reserved KeyPrefix": {flightlock.Options{Nodes: []redis.UniversalClient{one},
			KeyPrefix: "flightlock:{app}:"}, []string{"KeyPrefix", "flightlock:{app}:", "reserved"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := flightlock.New(tc.opts)
			wantInvalid(t, err, tc.says...)
		})
	}
}

func wantInvalid(t *testing.T, err error, says ...string) {
	t.Helper()
	if !errors.Is(err, flightlock.ErrInvalid) {
		t.Fatalf("got %v, want ErrInvalid", err)
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("%q does not say %q", err, s)
		}
	}
}

// A Client that is a zero value says so.
func TestAZeroClientIsInvalid(t *testing.T) {
	var c flightlock.Client
	ctx := t.Context()
	_, lock := c.Lock(ctx, "k", time.Second, nil)
	_, single := c.SingleFlightLock(ctx, "k", time.Second, nil)
	_, try := c.TryLock(ctx, "k", time.Second)
	_, check := c.Check(ctx)
	_, fetch := flightlock.NewFetcher(&c, flightlock.Source[string]{
		Lookup: func(context.Context, string) (string, flightlock.Freshness, error) { return "", flightlock.Fresh, nil },
		Load:   func(context.Context, string) (string, error) { return "", nil },
		Store:  func(context.Context, string, string, *flightlock.Lock) error { return nil },
	}, flightlock.FetchOptions{})
	do := c.Do(ctx, "k", time.Second, nil, func(context.Context, *flightlock.Lock) error { return nil })
	for what, err := range map[string]error{
		"Lock": lock, "SingleFlightLock": single, "TryLock": try, "Do": do, "Check": check, "NewFetcher": fetch,
		"Ready": c.Ready(ctx), "Close": c.Close(ctx),
	} {
		if !errors.Is(err, flightlock.ErrInvalid) || !strings.Contains(err.Error(), "not made by New or Open") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if s := c.Stats(); s != (flightlock.Stats{}) {
		t.Errorf("Stats: %+v", s)
	}
}

// A bad key, ttl or strategy is an ErrInvalid that names value and limit, and nothing is
// sent: the node does not even exist.
func TestBadArgumentsAreRefusedBeforeAnyTraffic(t *testing.T) {
	dead := redis.NewClient(&redis.Options{Addr: redistest.RefusedAddr(t)})
	defer dead.Close()
	c := newClient(t, flightlock.Options{KeyPrefix: flightlock.NoPrefix, MaxTTL: 30 * time.Second}, dead)
	const ok = time.Second
	for name, tc := range map[string]struct {
		key   string
		ttl   time.Duration
		retry flightlock.RetryStrategy
		says  []string
	}{
		"empty key":        {"", ok, nil, []string{"key", "empty"}},
		"key of 4 KiB + 1": {strings.Repeat("k", 4097), ok, nil, []string{"key", "4097", "4096"}},
		"a key of ours":    {"flightlock:{abc}:fence:0", ok, nil, []string{"key", "flightlock:{"}},
		"ttl 0":            {"k", 0, nil, []string{"ttl", "0s", "10ms"}},
		"negative ttl":     {"k", -time.Second, nil, []string{"ttl", "-1s", "10ms"}},
		"ttl 9ms":          {"k", 9 * time.Millisecond, nil, []string{"ttl", "9ms", "10ms"}},
		"ttl 9.999ms":      {"k", 9999 * time.Microsecond, nil, []string{"ttl", "9.999ms", "10ms"}},
		"ttl over MaxTTL":  {"k", 30*time.Second + 1, nil, []string{"ttl", "30.000000001s", "30s"}},
		"interval 0":       {"k", ok, flightlock.LimitedRetry(0, 3), []string{"interval", "0s"}},
		"negative max":     {"k", ok, flightlock.LimitedRetry(time.Millisecond, -1), []string{"max", "-1"}},
		"backoff min 0":    {"k", ok, flightlock.ExponentialBackoff(0, time.Second), []string{"min", "0s"}},
		"backoff max below min": {"k", ok, flightlock.ExponentialBackoff(time.Second, time.Millisecond),
			[]string{"max", "1ms", "1s"}},
		"negative Limit":     {"k", ok, flightlock.Limit(nil, -1), []string{"Limit", "-1"}},
		"Limit of a bad one": {"k", ok, flightlock.Limit(flightlock.LimitedRetry(-1, 1), 1), []string{"interval"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.SingleFlightLock(t.Context(), tc.key, tc.ttl, tc.retry)
			wantInvalid(t, err, tc.says...)
			_, err = c.Lock(t.Context(), tc.key, tc.ttl, tc.retry)
			wantInvalid(t, err, tc.says...)
			if tc.retry == nil {
				_, err = c.TryLock(t.Context(), tc.key, tc.ttl)
				wantInvalid(t, err, tc.says...)
			}
		})
	}
	if n := c.Stats().Commands; n != 0 {
		t.Errorf("%d commands were written", n)
	}
}

// Strategies are values: one call does not use up another's retries.
func TestStrategiesAreImmutable(t *testing.T) {
	s := flightlock.Limit(flightlock.ExponentialBackoff(time.Millisecond, 4*time.Millisecond), 3)
	for range 3 {
		for n := 1; n <= 3; n++ {
			d, ok := s.Next(n)
			if bound := time.Millisecond << (n - 1); !ok || d <= 0 || d > bound {
				t.Errorf("Next(%d) = %v, %v; want up to %v", n, d, ok, bound)
			}
		}
		if _, ok := s.Next(4); ok {
			t.Error("a fourth retry")
		}
	}
	if _, ok := flightlock.NoRetry().Next(1); ok {
		t.Error("NoRetry retries")
	}
	huge := flightlock.ExponentialBackoff(time.Second, math.MaxInt64)
	if d, ok := huge.Next(1 << 20); !ok || d <= 0 {
		t.Errorf("backoff overflows: %v, %v", d, ok)
	}
}
