// Package prom makes Prometheus metrics of what Clients of package flightlock do. docs/metrics.md of
// the repository describes each of them, with a dashboard and alerts.
package prom

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/prometheus/client_golang/prometheus"
)

// New registers the metrics with reg, and returns the Observer for Options.Observers that fills them.
// What Client.Stats counts is read only at a scrape. Besides, a lock that is handed over makes one
// observation, one from Redis another for its attempt, and an exchange with a node one.
//
// All Clients that have the Observer are one in the metrics, and so are those of a second New with the
// same reg: counters and gauges are sums, and a flag of a node is 1 if it is that for one of them. Give
// New a Registerer of prometheus.WrapRegistererWith to distinguish them by a label. While no Client is
// open, there are no metrics; counters continue with the next one.
//
// The error is that of reg. The metrics stay registered.
func New(reg prometheus.Registerer) (*flightlock.Observer, error) {
	m := newMetrics()
	var already prometheus.AlreadyRegisteredError
	if err := reg.Register(m); errors.As(err, &already) {
		before, ours := already.ExistingCollector.(*metrics)
		if !ours {
			return nil, fmt.Errorf("flightlock: prom: %w", err)
		}
		m = before
	} else if err != nil {
		return nil, fmt.Errorf("flightlock: prom: %w", err)
	}
	return m.observer(), nil
}

func (m *metrics) observer() *flightlock.Observer {
	return &flightlock.Observer{
		Of: flightlock.EventWait | flightlock.EventLoss | flightlock.EventRefresh | flightlock.EventAttempt |
			flightlock.EventRoundTrip | flightlock.EventLoad | flightlock.EventMiss,
		Ended:  m.ended,
		Opened: m.clients.opened, FetcherOpened: m.fetchers.opened,
	}
}

func (m *metrics) ended(_ context.Context, e flightlock.Event) {
	switch e.Kind {
	case flightlock.EventWait:
		if e.Outcome != flightlock.OutcomeNeedless && e.Outcome != flightlock.OutcomePanicked {
			m.waits.observe(e)
		}
	case flightlock.EventLoss:
		m.lost.WithLabelValues(string(e.Outcome), m.waits.label(e.Class)).Inc()
	case flightlock.EventRefresh:
		m.refresh.WithLabelValues(refreshOutcome(e.Err)).Inc()
	case flightlock.EventAttempt:
		m.attempt.WithLabelValues(string(e.Outcome)).Observe(e.Took.Seconds())
	case flightlock.EventRoundTrip:
		m.trip.WithLabelValues(e.Node).Observe(e.Took.Seconds())
		if e.Err != nil {
			m.failures.WithLabelValues(e.Node).Inc()
		}
	case flightlock.EventLoad:
		m.fetchers.load.WithLabelValues(e.Fetcher, string(e.Outcome)).Observe(e.Took.Seconds())
	case flightlock.EventMiss:
		m.fetchers.wait.WithLabelValues(e.Fetcher, missOutcome(e.Err)).Observe(e.Took.Seconds())
	}
}

func refreshOutcome(err error) string {
	switch {
	case err == nil:
		return "renewed"
	case errors.Is(err, flightlock.ErrNotHeld):
		return "lost"
	}
	return "unavailable"
}

func missOutcome(err error) string {
	switch {
	case err == nil:
		return "value"
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return "canceled"
	}
	return "error"
}

// metrics are the collector of one Registerer. No label contains a lock key: keys come and go, and each
// would remain as a time series.
type metrics struct {
	waits    waits
	attempt  *prometheus.HistogramVec
	trip     *prometheus.HistogramVec
	refresh  *prometheus.CounterVec
	lost     *prometheus.CounterVec
	failures *prometheus.CounterVec
	clients  clients
	fetchers fetchers
}

func newMetrics() *metrics {
	m := &metrics{
		attempt: histogram("attempt_duration_seconds", "Duration of remote attempts, by outcome.", "outcome"),
		trip: histogram("node_round_trip_seconds", "Duration of exchanges with a node, failed ones included.",
			"node"),
		refresh: counter("refreshes_total", "Completed remote refreshes, by outcome.", "outcome"),
		lost:    counter("lost_locks_total", "Locks that were lost, by reason.", "reason", "class"),
		failures: counter("node_errors_total", "Exchanges with a node that had no reply, or an error as the reply.",
			"node"),
	}
	m.waits.init()
	m.clients.init(m)
	m.fetchers.init()
	// So that rates begin at 0, not at the first:
	for _, outcome := range []flightlock.Outcome{flightlock.OutcomeAcquired, flightlock.OutcomeNotAcquired,
		flightlock.OutcomeUnavailable} {
		m.attempt.WithLabelValues(string(outcome))
	}
	for _, outcome := range []string{"renewed", "lost", "unavailable"} {
		m.refresh.WithLabelValues(outcome)
	}
	for _, end := range []flightlock.Outcome{flightlock.EndExpired, flightlock.EndTaken, flightlock.EndClosed} {
		m.lost.WithLabelValues(string(end), "")
	}
	return m
}

func (m *metrics) vectors() []prometheus.Collector {
	return []prometheus.Collector{m.waits.acquire, m.attempt, m.trip, m.refresh, m.lost, m.failures}
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, v := range m.vectors() {
		v.Describe(ch)
	}
	m.clients.describe(ch)
	m.fetchers.describe(ch)
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	if !m.clients.collect(ch) {
		return
	}
	for _, v := range m.vectors() {
		v.Collect(ch)
	}
	m.fetchers.collect(ch)
}

// buckets suit a handoff, a round trip and a long queue. Scrapers that read native
// histograms do without them.
var buckets = []float64{50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3,
	250e-3, 500e-3, 1, 2.5, 5, 10, 30, 60}

func histogram(name, help string, labels ...string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "flightlock", Name: name, Help: help, Buckets: buckets,
		NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 160,
		NativeHistogramMinResetDuration: time.Hour,
	}, labels)
}

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "flightlock", Name: name, Help: help},
		labels)
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("flightlock_"+name, help, labels, nil)
}

func gauge(ch chan<- prometheus.Metric, d *prometheus.Desc, v float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func count(ch chan<- prometheus.Metric, d *prometheus.Desc, v uint64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
}
