package prom_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/flightlock/flightlock/prom"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/redis/go-redis/v9"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// options are those of a Client with metrics in reg.
func options(t *testing.T, reg prometheus.Registerer, o flightlock.Options) flightlock.Options {
	t.Helper()
	observer, err := prom.New(reg)
	testkit.Must(t, err)
	o.Observers = append(o.Observers, observer)
	return o
}

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
				if l.GetName() == "class" && l.GetValue() == "" { // Prometheus has no such label then
					continue
				}
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
		c := lockkit.New(t, options(t, reg, flightlock.Options{MaxWaiters: 3}), clients...)
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
		want(map[string]float64{"flightlock_waiters": 3, "flightlock_held_locks": 1,
			"flightlock_attempts_total": 1})
		if _, err := c.SingleFlightLock(t.Context(), "k", time.Second, nil); !errors.Is(err,
			flightlock.ErrTooManyWaiters) {
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
			`flightlock_acquire_duration_seconds{outcome="held_by_others",wait="queue"}`:   1,
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

		testkit.Stall(true, nodes...)
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
		testkit.Stall(false, nodes...)
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
		c := lockkit.New(t, options(t, reg, flightlock.Options{}), clients...)
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
		testkit.Stall(false, nodes...)
		time.Sleep(5 * time.Second)
		lockkit.Release(t, held)
		got := gathered(t, reg)
		for name, want := range map[string]float64{
			`flightlock_acquire_duration_seconds{outcome="held_by_others",wait="queue"}`: 1, // behind the holder
			`flightlock_acquire_duration_seconds{outcome="canceled",wait="queue"}`:       0,
			`flightlock_acquire_duration_seconds{outcome="unavailable",wait="queue"}`:    1,
			`flightlock_acquire_duration_seconds{outcome="unavailable",wait="remote"}`:   1,
			`flightlock_acquire_duration_seconds{outcome="canceled",wait="remote"}`:      0,
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
		c := lockkit.New(t, options(t, reg, flightlock.Options{HandoffSlice: -1}), clients...)
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
		c := lockkit.New(t, options(t, reg, flightlock.Options{}), clients...)
		lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
		fetchkit.New(t, c, &fetchkit.Cache{}, fetch.Options{})
		families, err := reg.Gather()
		if err != nil || len(families) != 38 {
			t.Fatalf("%d families, %v", len(families), err)
		}
		problems, err := promlint.NewWithMetricFamilies(families).Lint()
		if err != nil || len(problems) > 0 {
			t.Errorf("%v, %v", problems, err)
		}
	})
}

// Clients with one Observer, or with one Registerer, are one in the metrics, and those with a label each are
// not. What a closed one has counted stays as long as there is another one. While there is none, there is
// nothing.
func TestSeveralClients(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		reg := prometheus.NewPedanticRegistry()
		shared := options(t, reg, flightlock.Options{})
		all := []*flightlock.Client{
			lockkit.New(t, shared, clients...), lockkit.New(t, shared, clients...),
			lockkit.New(t, options(t, reg, flightlock.Options{}), clients...),
		}
		labeled := prometheus.NewPedanticRegistry()
		for _, name := range []string{"c", "d"} {
			reg := prometheus.WrapRegistererWith(prometheus.Labels{"client": name}, labeled)
			all = append(all, lockkit.New(t, options(t, reg, flightlock.Options{}), clients...))
		}
		for i, c := range all {
			lockkit.Release(t, lockkit.Lock(t, c, fmt.Sprint("k", i), time.Second))
		}
		commands := func(c *flightlock.Client) float64 { return float64(c.Stats().Commands) }
		before := commands(all[0]) + commands(all[1]) + commands(all[2])
		for range 3 {
			synctest.Wait()
			got := gathered(t, reg)
			for name, want := range map[string]float64{
				"flightlock_acquired_total": 3, "flightlock_held_locks": 0,
				`flightlock_acquire_duration_seconds{outcome="acquired",wait="remote"}`: 3,
				`flightlock_node_commands_total{node="10.0.0.1:6379"}`:                  before,
			} {
				if got[name] != want {
					t.Errorf("%s is %v, want %v", name, got[name], want)
				}
			}
			lockkit.Close(t, all[0])
			all = all[1:]
		}
		for _, name := range []string{"c", "d"} {
			if got := gathered(t, labeled)[fmt.Sprintf("flightlock_acquired_total{client=%q}", name)]; got != 1 {
				t.Errorf("%v of %s", got, name)
			}
		}
		if got := gathered(t, reg)["flightlock_acquired_total"]; got != 0 {
			t.Errorf("%v without a Client", got)
		}
		lockkit.New(t, shared, clients...)
		if got := gathered(t, reg)["flightlock_acquired_total"]; got != 3 {
			t.Errorf("a counter went back: %v", got)
		}
	})
}

// An error of the Registerer is that of New.
func TestARegistererThatRefuses(t *testing.T) {
	reg := prometheus.NewRegistry()
	reg.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "flightlock_waiters", Help: "another"}))
	if o, err := prom.New(reg); err == nil || o != nil {
		t.Errorf("%v, %v", o, err)
	}
}

// Classes are a label of what is observed of a wait, and of a loss. There are at most a hundred, and "other".
func TestClasses(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		reg := prometheus.NewPedanticRegistry()
		c := lockkit.New(t, options(t, reg, flightlock.Options{Class: func(key string) string {
			class, _, _ := strings.Cut(key, ":")
			return class
		}}), clients...)
		for i := range 120 {
			lockkit.Release(t, lockkit.Lock(t, c, fmt.Sprintf("class%d:k", i), time.Second))
		}
		lockkit.Release(t, lockkit.Lock(t, c, "class0:other", time.Second))
		lockkit.Release(t, lockkit.Lock(t, c, "\xff:bytes", time.Second))
		for _, key := range []string{"class1:k", "class119:k"} {
			l := lockkit.Lock(t, c, key, time.Second)
			nodes[0].Mini.Set("lock:"+key, "somebody else")
			_ = l.Release(t.Context())
		}
		_, _ = c.TryLock(t.Context(), "class119:k", time.Second)
		synctest.Wait()
		got := gathered(t, reg)
		for name, want := range map[string]float64{
			`flightlock_acquire_duration_seconds{class="class0",outcome="acquired",wait="remote"}`:    2,
			`flightlock_acquire_duration_seconds{class="class99",outcome="acquired",wait="remote"}`:   1,
			`flightlock_acquire_duration_seconds{class="class100",outcome="acquired",wait="remote"}`:  0,
			`flightlock_acquire_duration_seconds{class="other",outcome="acquired",wait="remote"}`:     22,
			`flightlock_acquire_duration_seconds{class="other",outcome="not_acquired",wait="remote"}`: 1,
			`flightlock_lost_locks_total{class="class1",reason="taken"}`:                              1,
			`flightlock_lost_locks_total{class="other",reason="taken"}`:                               1,
		} {
			if got[name] != want {
				t.Errorf("%s is %v, want %v", name, got[name], want)
			}
		}
	})
}

// A scrape may come at any time, also while Clients are made and closed. For -race.
func TestAScrapeDuringNew(t *testing.T) {
	reg := prometheus.NewRegistry()
	opts := options(t, reg, flightlock.Options{})
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
	for range 50 {
		c := lockkit.Open(t, opts, "redis://127.0.0.1:1")
		_ = c.Close(t.Context())
	}
	close(end)
	<-ended
}

// A lock that is handed over makes one observation, without garbage.
func TestObservingAHandoffAllocatesNothing(t *testing.T) {
	o, err := prom.New(prometheus.NewRegistry())
	testkit.Must(t, err)
	for _, class := range []string{"", "orders"} {
		w := flightlock.Event{Kind: flightlock.EventWait, Key: "k", Class: class, Cause: flightlock.WaitHandoff,
			Outcome: flightlock.OutcomeAcquired}
		if n := testing.AllocsPerRun(1000, func() {
			w.Took += 7 * time.Microsecond
			o.Ended(t.Context(), w)
		}); n >= 1 {
			t.Errorf("%v allocations", n)
		}
	}
}

func BenchmarkObservingAHandoff(b *testing.B) {
	o, err := prom.New(prometheus.NewRegistry())
	if err != nil {
		b.Fatal(err)
	}
	w := flightlock.Event{Kind: flightlock.EventWait, Key: "k", Cause: flightlock.WaitHandoff,
		Outcome: flightlock.OutcomeAcquired}
	ctx := context.Background()
	b.ReportAllocs()
	for i := range b.N {
		w.Took = time.Duration(i%1000) * time.Microsecond
		o.Ended(ctx, w)
	}
}
