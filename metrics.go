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

// metrics are what Options.Registerer gets of one Client; docs/metrics.md says what each
// means. What Stats counts is read at each scrape and costs nothing before. Of the rest, a
// lock that is handed over makes one observation, on the goroutine that was given it; a
// remote attempt one more, and an exchange with a node one. No label has a lock key: keys
// come and go, and each would be a time series for ever.
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

	won [len(waits)]prometheus.Observer // the members of acquire that acquired, found once
}

// How an acquire, or an attempt, went. Of the errors the first that matches counts: that of
// a ctx which ended matches the last outcome besides.
var outcomes = [...]string{"acquired", "not_acquired", "unavailable"}

var failedAs = []struct {
	err     error
	outcome string
}{
	{context.Canceled, "canceled"},
	{context.DeadlineExceeded, "canceled"},
	{ErrNotAcquired, outcomes[1]},
	{ErrUnavailable, outcomes[2]},
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

// What a caller waited for, as the local tier has it.
var waits = [...]string{flight.Remote: "remote", flight.Queued: "queue", flight.Handed: "handoff"}

// buckets suit a handoff, a round trip and a long queue. Scrapers that read native
// histograms do without them.
var buckets = []float64{50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3, 1, 2.5, 5, 10, 30, 60}

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
	descWaiters   = desc("waiters", "Callers that wait for a lock now.")
	descHeld      = desc("held_locks", "Locks held now.")
	descOldestDo  = desc("oldest_do_lock_seconds", "How long the oldest lock of Do, DoWith and Wrap has been held; 0: none so long that it was to be refreshed.")
	descAcquired  = desc("acquired_total", "Locks given to callers, handoffs included.")
	descHandoffs  = desc("handoffs_total", "Locks given to callers without asking Redis.")
	descAttempts  = desc("attempts_total", "Remote attempts begun.")
	descExpired   = desc("expired_locks_total", "Locks that ended by their ttl: never refreshed, and nobody listened for their end.")
	descSuspended = desc("node_suspended", "1 while the node is left alone until it answers a probe.", "node")
	descOut       = desc("node_quarantined", "1 while the node's votes do not count, because it lost its memory not long ago.", "node")
	descUnsure    = desc("node_unverified", "1 while the node has no vote, because it refuses the script that tells whether it lost its memory.", "node")
	descDebts     = desc("node_debts", "Releases owed to the node that it has not confirmed yet.", "node")
	descCommands  = desc("node_commands_total", "Acquires, refreshes and releases written to the node; it may get many as one command.", "node")
)

// newMetrics registers the metrics of c, whose nodes are known.
func newMetrics(c *Client, reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		c: c, reg: reg, fetchers: newFetchMetrics(),
		acquire: histogram("acquire_duration_seconds",
			"How long callers waited for a lock, by outcome and by what they waited for: remote (nobody before them in this process), "+
				"queue (others of this process, then remote) or handoff (others of this process, no Redis).", "outcome", "wait"),
		attempt:  histogram("attempt_duration_seconds", "How long remote attempts took, by outcome.", "outcome"),
		trip:     histogram("node_round_trip_seconds", "How long exchanges with a node took, failed ones included.", "node"),
		refresh:  counter("refreshes_total", "Remote refreshes that ended, by outcome.", "outcome"),
		lost:     counter("lost_locks_total", "Locks that ended otherwise than by release, by reason.", "reason"),
		failures: counter("node_errors_total", "Exchanges with a node that had no answer, or an error for one.", "node"),
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
	if err := register(reg, m); errors.Is(err, errRegisterer) {
		return nil, fmt.Errorf("flightlock: %w: %w", ErrInvalid, err)
	} else if err != nil {
		return nil, fmt.Errorf("flightlock: %w: Options.Registerer refuses the metrics of this Client; if another one has registered there, "+
			"give every Client a label of its own by prometheus.WrapRegistererWith(prometheus.Labels{\"client\": name}, registerer): %w", ErrInvalid, err)
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
	return m, nil
}

// A Registerer is the caller's code. It may panic, which is an error then, or hang, which holds up New for
// registerTime and Close until its ctx ends: what hangs there goes on by itself.
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

// recovering is do's error, or what it has panicked with.
func recovering(do func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("%w panicked: %v", errRegisterer, v)
		}
	}()
	return do()
}

// unregister lets another Client register, until ctx ends.
func (m *metrics) unregister(ctx context.Context) error {
	if m == nil {
		return nil
	}
	failed := make(chan error, 1)
	if err := wait.For(ctx, func() { failed <- recovering(func() error { m.reg.Unregister(m); return nil }) }); err != nil {
		return fmt.Errorf("%w has not unregistered the metrics: %w", errRegisterer, err)
	}
	return <-failed
}

func (m *metrics) vectors() []prometheus.Collector {
	return []prometheus.Collector{m.acquire, m.attempt, m.trip, m.refresh, m.lost, m.failures}
}

// Describe is for the registry.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, v := range m.vectors() {
		v.Describe(ch)
	}
	m.fetchers.describe(ch)
	for _, d := range []*prometheus.Desc{descWaiters, descHeld, descOldestDo, descAcquired, descHandoffs, descAttempts, descExpired, descSuspended, descOut, descUnsure, descDebts, descCommands} {
		ch <- d
	}
}

// Collect is for the registry.
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
	count(descHandoffs, s.Handoffs)
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
		gauge(descDebts, float64(n.Debts()), n.Name())
		count(descCommands, n.Commands(), n.Name())
	}
}

// acquired is called by each caller that asked for a lock, when it has its answer.
func (m *metrics) acquired(waited time.Duration, way flight.WaitKind, err error) {
	if err == nil {
		m.won[way].Observe(waited.Seconds())
		return
	}
	if way == flight.Handed { // in the instant in which its ctx ended
		way = flight.Queued
	}
	m.acquire.WithLabelValues(outcomeOf(err), waits[way]).Observe(waited.Seconds())
}

// attempted is called when a remote attempt has ended, which took that long. m is not nil.
func (m *metrics) attempted(took time.Duration, f *quorum.Failure) {
	outcome := outcomes[0]
	if f != nil {
		outcome = outcomes[2]
		if f.Reason == quorum.Taken {
			outcome = outcomes[1]
		}
	}
	m.attempt.WithLabelValues(outcome).Observe(took.Seconds())
}

// refreshed is called when a remote refresh has ended. A nil m is no metrics.
func (m *metrics) refreshed(f *quorum.Failure) {
	if m == nil {
		return
	}
	outcome := "renewed"
	if f != nil {
		outcome = "unavailable"
		if f.Reason == quorum.NotHeld {
			outcome = "lost"
		}
	}
	m.refresh.WithLabelValues(outcome).Inc()
}

// lostOne is called for each lock that was lost.
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
