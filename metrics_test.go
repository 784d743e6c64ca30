package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/redis/go-redis/v9"
)

// gathered are the values of a scrape by name and labels: `x_total{a="b"}`. A histogram's is its
// number of observations.
func gathered(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			name := f.GetName()
			if len(labels) > 0 {
				name += "{" + strings.Join(labels, ",") + "}"
			}
			switch f.GetType().String() {
			case "HISTOGRAM":
				values[name] = float64(m.GetHistogram().GetSampleCount())
				if m.GetHistogram().GetSchema() == 0 || len(m.GetHistogram().GetBucket()) < 10 {
					t.Errorf("%s is not both native and classic", name)
				}
			case "GAUGE":
				values[name] = m.GetGauge().GetValue()
			default:
				values[name] = m.GetCounter().GetValue()
			}
		}
	}
	return values
}

// Each event is counted where the docs say.
func TestMetrics(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		reg := prometheus.NewRegistry()
		c := lockkit.New(t, flightlock.Options{Registerer: reg, MaxWaiters: 3}, clients...)
		want := func(values map[string]float64) {
			t.Helper()
			synctest.Wait()
			got := gathered(t, reg)
			for name, v := range values {
				if g, there := got[name]; g != v || !there {
					t.Errorf("%s is %v (%v), want %v", name, g, there, v)
				}
			}
		}
		ended := make(chan error, 10)
		lock := func(ctx context.Context, hold time.Duration) {
			l, err := c.SingleFlightLock(ctx, "k", 10*time.Second, nil)
			if err == nil {
				time.Sleep(hold)
				err = l.Release(ctx)
			}
			ended <- err
		}

		first := lockkit.Lock(t, c, "k", 10*time.Second) // asks Redis; the next two wait, and one gives up
		go lock(t.Context(), 0)
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		go lock(ctx, 0)
		synctest.Wait()
		go lock(t.Context(), 0)
		synctest.Wait()
		want(map[string]float64{"flightlock_waiters": 3, "flightlock_held_locks": 1, "flightlock_attempts_total": 1})
		if _, err := c.SingleFlightLock(t.Context(), "k", time.Second, nil); !errors.Is(err, flightlock.ErrTooManyWaiters) {
			t.Error(err)
		}
		cancel()
		synctest.Wait()
		lockkit.Release(t, first)
		for range 3 {
			<-ended
		}
		_, _ = c.TryLock(t.Context(), "k2", time.Second)
		_, _ = c.TryLock(t.Context(), "k2", time.Second) // held here
		want(map[string]float64{
			`flightlock_acquire_duration_seconds{outcome="acquired",wait="remote"}`:        2,
			`flightlock_acquire_duration_seconds{outcome="acquired",wait="handoff"}`:       2,
			`flightlock_acquire_duration_seconds{outcome="acquired",wait="queue"}`:         0,
			`flightlock_acquire_duration_seconds{outcome="canceled",wait="queue"}`:         1,
			`flightlock_acquire_duration_seconds{outcome="too_many_waiters",wait="queue"}`: 1,
			`flightlock_acquire_duration_seconds{outcome="not_acquired",wait="queue"}`:     1,
			"flightlock_acquired_total":                               4,
			"flightlock_handoffs_total":                               2,
			"flightlock_retained_leases":                              0,
			"flightlock_reused_total":                                 0,
			"flightlock_recalled_total":                               0,
			"flightlock_waiters":                                      0,
			`flightlock_attempt_duration_seconds{outcome="acquired"}`: 2,
			`flightlock_lost_locks_total{reason="expired"}`:           0,
		})

		time.Sleep(2 * time.Second) // k2 runs out
		other := lockkit.New(t, flightlock.Options{}, clients...)
		held := lockkit.Lock(t, other, "k3", 10*time.Second)
		_, _ = c.TryLock(t.Context(), "k3", time.Second)
		lockkit.Release(t, held)
		taken := lockkit.Lock(t, c, "k4", 10*time.Second)
		if err := taken.Refresh(t.Context()); err != nil {
			t.Error(err)
		}
		for _, n := range nodes {
			n.Mini.Set("lock:k4", "somebody else")
		}
		_ = taken.Refresh(t.Context())
		want(map[string]float64{
			`flightlock_lost_locks_total{reason="expired"}`:                             0, // nobody relied on k2
			"flightlock_expired_locks_total":                                            1,
			`flightlock_lost_locks_total{reason="taken"}`:                               1,
			`flightlock_refreshes_total{outcome="lost"}`:                                1,
			`flightlock_attempt_duration_seconds{outcome="not_acquired"}`:               1,
			`flightlock_acquire_duration_seconds{outcome="not_acquired",wait="remote"}`: 1,
			`flightlock_node_errors_total{node="10.0.0.1:6379"}`:                        0,
			`flightlock_node_suspended{node="10.0.0.1:6379"}`:                           0,
		})
		if got := gathered(t, reg); got[`flightlock_refreshes_total{outcome="renewed"}`] < 1 {
			t.Errorf("no refresh: %v", got)
		}
		if got := gathered(t, reg); got[`flightlock_node_round_trip_seconds{node="10.0.0.1:6379"}`] < 5 ||
			got[`flightlock_node_commands_total{node="10.0.0.3:6379"}`] < 5 {
			t.Errorf("too few exchanges: %v", got)
		}

		for _, n := range nodes {
			n.Stall(true)
		}
		_, _ = c.TryLock(t.Context(), "k4", time.Second) // on connections of before
		time.Sleep(5 * time.Second)                      // the exchanges are given up
		want(map[string]float64{
			`flightlock_attempt_duration_seconds{outcome="unavailable"}`:               1,
			`flightlock_acquire_duration_seconds{outcome="unavailable",wait="remote"}`: 1,
			`flightlock_node_suspended{node="10.0.0.2:6379"}`:                          1,
			`flightlock_node_debts{node="10.0.0.2:6379"}`:                              1,
		})
		if got := gathered(t, reg); got[`flightlock_node_errors_total{node="10.0.0.1:6379"}`] < 1 {
			t.Errorf("no error of a node that does not answer: %v", got)
		}
		for _, n := range nodes {
			n.Stall(false)
		}
		for name := range gathered(t, reg) {
			if strings.Contains(name, "lock:") || strings.Contains(name, `"k`) {
				t.Errorf("%s has a key", name)
			}
		}
		time.Sleep(5 * time.Second)
	})
}

// In an outage, callers with the default strategy wait until their ctx ends. They count as unavailable,
// and not as callers that others kept waiting: the alert for an outage relies on it.
func TestMetricsOfCallersWhoseTimeEndsInAnOutage(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		reg := prometheus.NewRegistry()
		c := lockkit.New(t, flightlock.Options{Registerer: reg}, clients...)
		held := lockkit.Lock(t, c, "held", 30*time.Second)
		wait := func(key string, want error) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			_, err := c.SingleFlightLock(ctx, key, 10*time.Second, nil)
			if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, want) {
				t.Errorf("%v, want %v", err, want)
			}
		}
		wait("held", flightlock.ErrNotAcquired)
		for _, n := range nodes[1:] {
			n.Stall(true)
		}
		var callers sync.WaitGroup
		for range 2 { // one of them queues behind the other
			callers.Go(func() { wait("k", flightlock.ErrUnavailable) })
		}
		callers.Wait()
		for _, n := range nodes {
			n.Stall(false)
		}
		time.Sleep(5 * time.Second)
		lockkit.Release(t, held)
		got := gathered(t, reg)
		for name, want := range map[string]float64{
			`flightlock_acquire_duration_seconds{outcome="canceled",wait="queue"}`:     1, // behind the holder
			`flightlock_acquire_duration_seconds{outcome="unavailable",wait="queue"}`:  1,
			`flightlock_acquire_duration_seconds{outcome="unavailable",wait="remote"}`: 1,
			`flightlock_acquire_duration_seconds{outcome="canceled",wait="remote"}`:    0,
		} {
			if got[name] != want {
				t.Errorf("%s is %v, want %v", name, got[name], want)
			}
		}
	})
}

// A caller that waited behind others of its process, and then for Redis, is distinguished from one
// that was handed the lock.
func TestMetricsOfAQueueThatWasNotHandedOver(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		reg := prometheus.NewRegistry()
		c := lockkit.New(t, flightlock.Options{Registerer: reg, HandoffSlice: -1}, clients...)
		l := lockkit.Lock(t, c, "k", time.Second)
		done := make(chan struct{})
		go func() {
			lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
			close(done)
		}()
		synctest.Wait()
		lockkit.Release(t, l)
		<-done
		got := gathered(t, reg)
		if got[`flightlock_acquire_duration_seconds{outcome="acquired",wait="queue"}`] != 1 ||
			got["flightlock_handoffs_total"] != 0 {
			t.Errorf("got %v", got)
		}
	})
}

// Names, units and help texts follow Prometheus' conventions.
func TestMetricsAreConventional(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		reg := prometheus.NewPedanticRegistry()
		c := lockkit.New(t, flightlock.Options{Registerer: reg}, clients...)
		lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
		lockkit.NewFetcher(t, c, &lockkit.Origin{}, flightlock.FetchOptions{})
		families, err := reg.Gather()
		if err != nil || len(families) != 37 {
			t.Fatalf("%d families, %v", len(families), err)
		}
		problems, err := promlint.NewWithMetricFamilies(families).Lint()
		if err != nil || len(problems) > 0 {
			t.Errorf("%v, %v", problems, err)
		}
	})
}

// Two clients in one process share a registry by a label each; without, the second gets an error
// that says so. Close unregisters.
func TestTwoClientsOnOneRegisterer(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		reg := prometheus.NewRegistry()
		named := func(name string) prometheus.Registerer {
			return prometheus.WrapRegistererWith(prometheus.Labels{"client": name}, reg)
		}
		a := lockkit.New(t, flightlock.Options{Registerer: named("a")}, clients...)
		lockkit.New(t, flightlock.Options{Registerer: named("b")}, clients...)
		lockkit.Release(t, lockkit.Lock(t, a, "k", time.Second))
		got := gathered(t, reg)
		if got[`flightlock_acquired_total{client="a"}`] != 1 || got[`flightlock_acquired_total{client="b"}`] != 0 {
			t.Errorf("got %v", got)
		}
		for _, r := range []prometheus.Registerer{named("a"), reg} {
			_, err := flightlock.New(flightlock.Options{Registerer: r}, clients...)
			lockkit.WantInvalid(t, err, "Options.Registerer", "WrapRegistererWith")
		}
		lockkit.Close(t, a)
		lockkit.New(t, flightlock.Options{Registerer: named("a")}, clients...)
	})
}

// A scrape may come at any time, also while New is under way. For -race.
func TestAScrapeDuringNew(t *testing.T) {
	reg := prometheus.NewRegistry()
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-end:
				return
			default:
			}
			if _, err := reg.Gather(); err != nil {
				t.Error(err)
			}
		}
	}()
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer rdb.Close()
	for range 50 {
		c, err := flightlock.New(flightlock.Options{Registerer: reg}, rdb)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close(t.Context())
	}
	close(end)
	<-ended
}

// odd is a Registerer that behaves as the test says.
type odd struct{ register, unregister func() }

func (o odd) Register(prometheus.Collector) error { o.register(); return nil }

func (o odd) MustRegister(...prometheus.Collector) { o.register() }

func (o odd) Unregister(prometheus.Collector) bool { o.unregister(); return true }

// A Registerer that panics is an error of New and of Close, and does not end the process; one that
// hangs delays New for some seconds, and Close until its ctx ends. A lock never waits for it.
func TestARegistererThatPanicsOrHangs(t *testing.T) {
	fine, panics := func() {}, func() { panic("no metrics today") }
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		open := func(r prometheus.Registerer) (*flightlock.Client, error) {
			return flightlock.New(flightlock.Options{Registerer: r}, clients...)
		}
		_, err := open(odd{panics, fine})
		lockkit.WantInvalid(t, err, "Options.Registerer", "no metrics today")

		c, err := open(odd{fine, panics})
		if err != nil {
			t.Fatal(err)
		}
		lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
		if err := c.Close(t.Context()); err == nil || !strings.Contains(err.Error(), "no metrics today") {
			t.Errorf("Close: %v", err)
		}

		gate := make(chan struct{})
		hangs := func() { <-gate }
		began, unregistered := time.Now(), false
		_, err = open(odd{hangs, func() { unregistered = true }})
		lockkit.WantInvalid(t, err, "Options.Registerer")
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("New took %v", took)
		}
		c, err = open(odd{fine, hangs})
		if err != nil {
			t.Fatal(err)
		}
		lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		began = time.Now()
		if err := c.Close(ctx); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "Registerer") {
			t.Errorf("Close: %v", err)
		}
		if took := time.Since(began); took > 4*time.Second {
			t.Errorf("Close took %v", took)
		}
		close(gate)
		synctest.Wait()
		if !unregistered {
			t.Error("what was registered too late is registered still")
		}
	})
}

// A Registerer that calls runtime.Goexit, as one does that belongs to a test which fails, is an error of New and of
// Close at once. Neither waits for what has ended.
func TestARegistererThatCallsGoexit(t *testing.T) {
	fine, exits := func() {}, runtime.Goexit
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		began := time.Now()
		_, err := flightlock.New(flightlock.Options{Registerer: odd{exits, fine}}, clients...)
		lockkit.WantInvalid(t, err, "Options.Registerer", "Goexit")
		c, err := flightlock.New(flightlock.Options{Registerer: odd{fine, exits}}, clients...)
		if err != nil {
			t.Fatal(err)
		}
		closed := make(chan error, 1)
		go func() { closed <- c.Close(context.Background()) }()
		select {
		case err := <-closed:
			if err == nil || !strings.Contains(err.Error(), "Goexit") {
				t.Errorf("Close: %v", err)
			}
		case <-time.After(time.Minute):
			t.Fatal("Close has not returned")
		}
		if took := time.Since(began); took > 0 {
			t.Errorf("that took %v", took)
		}
	})
}
