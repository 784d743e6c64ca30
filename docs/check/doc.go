// Package check has no code: its tests parse docs/alerts.yml and the Grafana dashboard with
// Prometheus' own parsers, and hold them against the metrics that a client has. It is a
// module of its own, so that the library does not depend on Prometheus.
package check
