package prom

import "github.com/prometheus/client_golang/prometheus"

// field is a number in an S that is read at each scrape: a counter (total), or a gauge (level). What is done
// with all numbers of an S goes by a table of them, so that a new one is one row.
type field[S any] struct {
	desc  *prometheus.Desc
	total func(s *S) *uint64
	level func(s *S) *int64 // nil for a counter
}

func total[S any](of func(s *S) *uint64, name, help string, labels ...string) field[S] {
	return field[S]{desc: desc(name, help, labels...), total: of}
}

func level[S any](of func(s *S) *int64, name, help string, labels ...string) field[S] {
	return field[S]{desc: desc(name, help, labels...), level: of}
}

// add adds o's number to that of s.
func (f field[S]) add(s, o *S) {
	if f.level != nil {
		*f.level(s) += *f.level(o)
	} else {
		*f.total(s) += *f.total(o)
	}
}

// pass makes s, which is over, one that is past: gauges end, a counter must not go back.
func (f field[S]) pass(s *S) {
	if f.level != nil {
		*f.level(s) = 0
	}
}

func (f field[S]) collect(ch chan<- prometheus.Metric, s *S, labels ...string) {
	if f.level != nil {
		gauge(ch, f.desc, float64(*f.level(s)), labels...)
	} else {
		count(ch, f.desc, *f.total(s), labels...)
	}
}
