package flightlock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/quorum"
	"github.com/flightlock/flightlock/internal/wait"
	"github.com/prometheus/client_golang/prometheus"
)

// metrics are registered with Options.Registerer for one Client; docs/metrics.md describes each of
// them. The counters of Stats are read only at a scrape. Apart from these, a lock that is handed over
// makes one observation, on the goroutine that received it; a remote attempt makes one more, and an
// exchange with a node one. No label contains a lock key: keys come and go, and each would remain as a
// time series.
type metrics struct {
	c   *Client
	reg prometheus.Registerer

	acquire  *prometheus.HistogramVec
	attempt  *prometheus.HistogramVec
	trip     *prometheus.HistogramVec
	refresh  *prometheus.CounterVec
	lost     *prometheus.CounterVec
	failures *prometheus.CounterVec

	fetchers *fetchMetrics

	won [len(waits)]prometheus.Observer // the members of acquire for locks that were acquired, looked up once
}

// The outcomes of an acquire, or an attempt. The first matching entry of failedAs counts: the error
// of a ctx that ended also matches the last outcome. ErrUnavailable comes first, because most callers
// wait for the nodes until their ctx ends, and an outage must not look like callers that left.
var outcomes = [...]string{"acquired", "not_acquired", "unavailable"}

var failedAs = []struct {
	err     error
	outcome string
}{
	{ErrUnavailable, outcomes[2]},
	{context.Canceled, "canceled"},
	{context.DeadlineExceeded, "canceled"},
	{ErrNotAcquired, outcomes[1]},
	{ErrTooManyWaiters, "too_many_waiters"},
	{ErrClosed, "closed"},
}

func outcomeOf(err error) string {
	for _, f := range failedAs {
		if errors.Is(err, f.err) {
			return f.outcome
		}
	}
	return "invalid" // two nodes are one server
}

// What a caller waited for, by the local tier's constants.
var waits = [...]string{flight.Remote: "remote", flight.Queued: "queue", flight.Handed: "handoff"}

// buckets suit a handoff, a round trip and a long queue. Scrapers that read native
// histograms do without them.
var buckets = []float64{50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3,
	1, 2.5, 5, 10, 30, 60}

func histogram(name, help string, labels ...string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "flightlock", Name: name, Help: help, Buckets: buckets,
		NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 160, NativeHistogramMinResetDuration: time.Hour,
	}, labels)
}

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "flightlock", Name: name, Help: help}, labels)
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("flightlock_"+name, help, labels, nil)
}

// What is read at each scrape.
var (
	descWaiters  = desc("waiters", "Callers waiting for a lock now.")
	descHeld     = desc("held_locks", "Locks held now.")
	descOldestDo = desc("oldest_do_lock_seconds",
		"How long the oldest lock that Do, AutoRefresh or a Fetcher refreshes has been held; 0 if there is none.")
	descAcquired = desc("acquired_total", "Locks given to callers, handoffs included.")
	descGrants   = desc("grants_total",
		"Leases that the release of another process has granted, without an attempt that won.")
	descHandoffs  = desc("handoffs_total", "Locks handed over within the process, without Redis.")
	descRetained  = desc("retained_leases", "Leases that nobody holds, kept for the next caller of the process.")
	descReused    = desc("reused_total", "Handoffs of retained leases.")
	descRecalled  = desc("recalled_total", "Retained leases that were released because the key was wanted elsewhere.")
	descAttempts  = desc("attempts_total", "Remote attempts started.")
	descExpired   = desc("expired_locks_total", "Locks that ended by their ttl, never refreshed and without a Context.")
	descSuspended = desc("node_suspended",
		"1 while the node is suspended: it did not answer, or refused the login, and is only probed.", "node")
	descOut = desc("node_quarantined",
		"1 while the node's votes do not count, because it lost its data less than MaxTTL ago.", "node")
	descUnsure = desc("node_unverified",
		"1 while the node has no vote, because it refuses the script that reports whether it lost its data.", "node")
	descUnguarded = desc("node_unguarded",
		"1 while scripts on the node may access only the keys that they declare: with such a node there is no quarantine.",
		"node")
	descUnidentified = desc("node_unidentified",
		"1 while the node does not report its process: if it restarts with old data, that may go unnoticed.", "node")
	descDebts = desc("node_debts",
		"Unacknowledged releases: sent or to be sent to the node, and not confirmed by it yet.", "node")
	descCommands = desc("node_commands_total",
		"Acquires, refreshes and releases written to the node; a batch counts each of them.", "node")
)

// newMetrics makes the metrics of c, whose nodes are known.
func newMetrics(c *Client, reg prometheus.Registerer) *metrics {
	m := &metrics{
		c: c, reg: reg, fetchers: newFetchMetrics(),
		acquire: histogram("acquire_duration_seconds",
			"How long callers waited for a lock, by outcome and by what they waited for: "+
				"remote (no other caller of this process), queue (other callers of this process, then remote) "+
				"or handoff (other callers of this process, without Redis).",
			"outcome", "wait"),
		attempt:  histogram("attempt_duration_seconds", "Duration of remote attempts, by outcome.", "outcome"),
		trip:     histogram("node_round_trip_seconds", "Duration of exchanges with a node, failed ones included.", "node"),
		refresh:  counter("refreshes_total", "Completed remote refreshes, by outcome.", "outcome"),
		lost:     counter("lost_locks_total", "Locks that were lost, by reason.", "reason"),
		failures: counter("node_errors_total", "Exchanges with a node that had no reply, or an error as the reply.", "node"),
	}
	for i, wait := range waits {
		m.won[i] = m.acquire.WithLabelValues(outcomes[0], wait)
	}
	for _, outcome := range outcomes { // so that rates begin at 0, not at the first
		m.attempt.WithLabelValues(outcome)
	}
	for _, outcome := range []string{"renewed", "lost", "unavailable"} {
		m.refresh.WithLabelValues(outcome)
	}
	for _, reason := range []string{"expired", "taken", "closed"} {
		m.lost.WithLabelValues(reason)
	}
	for _, n := range c.nodes {
		trip, failures := m.trip.WithLabelValues(n.Name()), m.failures.WithLabelValues(n.Name())
		n.Observe = func(took time.Duration, err error) {
			trip.Observe(took.Seconds())
			if err != nil {
				failures.Inc()
			}
		}
	}
	return m
}

// register makes m visible: a scrape may come at any time from here on.
func (m *metrics) register() error {
	if err := register(m.reg, m); errors.Is(err, errRegisterer) {
		return fmt.Errorf("flightlock: %w: %w", ErrInvalid, err)
	} else if err != nil {
		return fmt.Errorf("flightlock: %w: Options.Registerer refuses the metrics of this Client; "+
			"if another Client is registered there, give each Client a label of its own with "+
			"prometheus.WrapRegistererWith(prometheus.Labels{\"client\": name}, registerer): %w", ErrInvalid, err)
	}
	return nil
}

// A Registerer is user code. If it panics or calls runtime.Goexit, that is an error. If it hangs, it delays New for
// registerTime and Close until its ctx ends; the call that hangs continues on a goroutine of its own.
var errRegisterer = errors.New("Options.Registerer")

const registerTime = 5 * time.Second

// register registers m in time, or not at all.
func register(reg prometheus.Registerer, m *metrics) error {
	answered, gaveUp := make(chan error), make(chan struct{})
	go func() {
		err := recovering(func() error { return reg.Register(m) })
		select {
		case answered <- err:
		case <-gaveUp:
			if err == nil {
				_ = recovering(func() error { reg.Unregister(m); return nil })
			}
		}
	}()
	timer := time.NewTimer(registerTime)
	defer timer.Stop()
	select {
	case err := <-answered:
		return err
	case <-timer.C:
		close(gaveUp)
		return fmt.Errorf("%w has not registered the metrics within %v", errRegisterer, registerTime)
	}
}

// recovering returns the error of do. A panic in it is an error, and so is runtime.Goexit, after which a goroutine
// that waits for do would wait for ever.
func recovering(do func() error) error {
	_, err := guarded("Options.Registerer", func() (struct{}, error) { return struct{}{}, do() })
	var p *PanicError
	switch {
	case !errors.As(err, &p):
		return err
	case p.Goexit:
		return fmt.Errorf("%w called runtime.Goexit", errRegisterer)
	}
	return fmt.Errorf("%w panicked: %v", errRegisterer, p.Value)
}

// unregister removes the metrics, so that another Client can register; it gives up when ctx ends.
func (m *metrics) unregister(ctx context.Context) error {
	if m == nil {
		return nil
	}
	failed := make(chan error, 1)
	unregister := func() error { m.reg.Unregister(m); return nil }
	if err := wait.For(ctx, func() { failed <- recovering(unregister) }); err != nil {
		return fmt.Errorf("%w has not unregistered the metrics: %w", errRegisterer, err)
	}
	return <-failed
}

func (m *metrics) vectors() []prometheus.Collector {
	return []prometheus.Collector{m.acquire, m.attempt, m.trip, m.refresh, m.lost, m.failures}
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, v := range m.vectors() {
		v.Describe(ch)
	}
	m.fetchers.describe(ch)
	for _, d := range []*prometheus.Desc{descWaiters, descHeld, descOldestDo, descAcquired, descGrants, descHandoffs,
		descRetained, descReused, descRecalled, descAttempts, descExpired, descSuspended, descOut, descUnsure, descUnguarded,
		descUnidentified, descDebts, descCommands} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	for _, v := range m.vectors() {
		v.Collect(ch)
	}
	m.fetchers.collect(ch)
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	s := m.c.Stats()
	gauge(descWaiters, float64(s.Waiters))
	gauge(descHeld, float64(s.Held))
	gauge(descOldestDo, s.OldestDo.Seconds())
	count(descAcquired, s.Acquired)
	count(descGrants, s.Grants)
	count(descHandoffs, s.Handoffs)
	gauge(descRetained, float64(s.Retained))
	count(descReused, s.Reused)
	count(descRecalled, s.Recalled)
	count(descAttempts, s.Attempts)
	count(descExpired, s.Expired)
	flag := func(on bool) float64 {
		if on {
			return 1
		}
		return 0
	}
	for i, n := range m.c.nodes {
		gauge(descSuspended, flag(n.Suspended()), n.Name())
		gauge(descOut, flag(m.c.quorum.Quarantined(i)), n.Name())
		gauge(descUnsure, flag(n.Unverified() != nil), n.Name())
		gauge(descUnguarded, flag(n.Undeclared() != nil), n.Name())
		gauge(descUnidentified, flag(n.Unidentified() != nil), n.Name())
		gauge(descDebts, float64(n.Debts()), n.Name())
		count(descCommands, n.Commands(), n.Name())
	}
}

// acquired is called by each caller of an acquire when that has ended.
func (m *metrics) acquired(waited time.Duration, way flight.WaitKind, err error) {
	if err == nil {
		m.won[way].Observe(waited.Seconds())
		return
	}
	if way == flight.Handed { // just as its ctx ended
		way = flight.Queued
	}
	m.acquire.WithLabelValues(outcomeOf(err), waits[way]).Observe(waited.Seconds())
}

// attempted is called when a remote attempt has ended. m is not nil.
func (m *metrics) attempted(took time.Duration, f *quorum.Failure) {
	outcome := outcomes[0]
	if f != nil {
		outcome = outcomes[2]
		if f.Outcome() == quorum.Taken {
			outcome = outcomes[1]
		}
	}
	m.attempt.WithLabelValues(outcome).Observe(took.Seconds())
}

// refreshed is called when a remote refresh has ended. m may be nil: no metrics.
func (m *metrics) refreshed(f *quorum.Failure) {
	outcome := "renewed"
	if f != nil {
		outcome = "unavailable"
		if f.Reason == quorum.NotHeld {
			outcome = "lost"
		}
	}
	m.refresh.WithLabelValues(outcome).Inc()
}

// lostOne is called for each lost lock. m may be nil.
func (m *metrics) lostOne(why error) {
	if m == nil {
		return
	}
	reason := "expired"
	switch {
	case errors.Is(why, ErrClosed):
		reason = "closed"
	case errors.Is(why, ErrNotHeld): // the nodes say so
		reason = "taken"
	}
	m.lost.WithLabelValues(reason).Inc()
}
