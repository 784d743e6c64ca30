package check

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"
)

// Store has scrapes in memory, and answers PromQL with Prometheus' own engine. One goroutine at a
// time may use it.
type Store struct {
	engine *promql.Engine
	series map[string]*timeSeries
}

// timeSeries are the samples of one, in the order of time.
type timeSeries struct {
	labels  labels.Labels
	samples []chunks.Sample
}

// NewStore makes an empty Store.
func NewStore() *Store {
	return &Store{
		engine: promql.NewEngine(promql.EngineOpts{
			MaxSamples: 10_000_000, Timeout: time.Minute, Parser: parser.NewParser(parser.Options{}),
		}),
		series: map[string]*timeSeries{},
	}
}

// Scrape adds what g has, as of at, with the labels of a target: name, value, name, value.
func (s *Store) Scrape(g prometheus.Gatherer, at time.Time, target ...string) error {
	families, err := g.Gather()
	if err != nil {
		return err
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			own := slices.Clone(target)
			for _, l := range m.GetLabel() {
				own = append(own, l.GetName(), l.GetValue())
			}
			keep := func(suffix string, v float64, more ...string) {
				all := append([]string{model.MetricNameLabel, f.GetName() + suffix}, slices.Concat(own, more)...)
				s.add(labels.FromStrings(all...), sample{at.UnixMilli(), v})
			}
			switch h := m.GetHistogram(); {
			case h != nil:
				count := float64(h.GetSampleCount())
				for _, b := range h.GetBucket() {
					keep("_bucket", float64(b.GetCumulativeCount()), "le", fmt.Sprint(b.GetUpperBound()))
				}
				keep("_bucket", count, "le", "+Inf")
				keep("_sum", h.GetSampleSum())
				keep("_count", count)
			case m.GetGauge() != nil:
				keep("", m.GetGauge().GetValue())
			default:
				keep("", m.GetCounter().GetValue())
			}
		}
	}
	return nil
}

func (s *Store) add(l labels.Labels, v sample) {
	key := l.String()
	if s.series[key] == nil {
		s.series[key] = &timeSeries{labels: l}
	}
	s.series[key].samples = append(s.series[key].samples, v)
}

// Range evaluates an expression every step.
func (s *Store) Range(expr string, from, to time.Time, step time.Duration) (promql.Matrix, error) {
	q, err := s.engine.NewRangeQuery(context.Background(), s, nil, expr, from, to, step)
	if err != nil {
		return nil, err
	}
	result := q.Exec(context.Background())
	m, err := result.Matrix()
	if err != nil {
		return nil, err
	}
	return slices.Clone(m), nil // the query is not closed, so what it has stays ours
}

// Querier is for the engine.
func (s *Store) Querier(_, _ int64) (storage.Querier, error) {
	return &storage.MockQuerier{SelectMockFunction: func(
		_ bool, _ *storage.SelectHints, matchers ...*labels.Matcher,
	) storage.SeriesSet {
		set := &found{}
		for _, kept := range s.series {
			if !slices.ContainsFunc(matchers, func(m *labels.Matcher) bool {
				return !m.Matches(kept.labels.Get(m.Name))
			}) {
				set.all = append(set.all, storage.NewListSeries(kept.labels, kept.samples))
			}
		}
		slices.SortFunc(set.all, func(a, b storage.Series) int { return labels.Compare(a.Labels(), b.Labels()) })
		return set
	}}, nil
}

// found is the result of a selection.
type found struct {
	all  []storage.Series
	next int
}

func (f *found) Next() bool                        { f.next++; return f.next <= len(f.all) }
func (f *found) At() storage.Series                { return f.all[f.next-1] }
func (f *found) Err() error                        { return nil }
func (f *found) Warnings() annotations.Annotations { return nil }

// sample is a value at a time, in milliseconds.
type sample struct {
	t int64
	v float64
}

func (s sample) T() int64                      { return s.t }
func (s sample) ST() int64                     { return 0 }
func (s sample) F() float64                    { return s.v }
func (s sample) H() *histogram.Histogram       { return nil }
func (s sample) FH() *histogram.FloatHistogram { return nil }
func (s sample) Type() chunkenc.ValueType      { return chunkenc.ValFloat }
func (s sample) Copy() chunks.Sample           { return s }
