// Package check tests docs/alerts.yml and the Grafana dashboard: against the metrics that a client
// has, with Prometheus' own parsers and engine, and against Grafana's published schema. Its command
// picture draws the dashboard from a run. It is a module of its own, so that the library does not
// depend on Prometheus and Grafana.
package check
