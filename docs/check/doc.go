// Package check holds docs/alerts.yml and the Grafana dashboard against the metrics that a client
// has, with Prometheus' own parsers and engine, and draws the dashboard from a run (picture). It
// is a module of its own, so that the library does not depend on Prometheus.
package check
