package main

import (
	"math"
	"slices"
)

// summary has the medians of all rounds: by bout, rival, and figure.
type summary map[string]map[string]*medians

// medians are those of one rival in one bout.
type medians struct {
	rounds  int
	failed  int // rounds that the rival could not do
	error   string
	figures map[string]float64
	waits   []float64 // by quantiles, in microseconds; nil if none were measured
}

func summarize(records []record) summary {
	figures := map[*medians]map[string][]float64{}
	waits := map[*medians][][]float64{}
	s := summary{}
	for _, r := range records {
		m := s.at(r.Bout, r.Rival)
		if r.Error != "" {
			m.error = r.Error
		}
		if r.Figures == nil {
			m.failed++
			continue
		}
		m.rounds++
		if figures[m] == nil {
			figures[m] = map[string][]float64{}
		}
		for name, v := range r.Figures {
			figures[m][name] = append(figures[m][name], v)
		}
		if len(r.Waits) == len(quantiles) {
			waits[m] = append(waits[m], r.Waits)
		}
	}
	for m, all := range figures {
		for name, v := range all {
			m.figures[name] = median(v)
		}
		for q := range quantiles {
			if len(waits[m]) > 0 {
				m.waits = append(m.waits, median(column(waits[m], q)))
			}
		}
	}
	return s
}

// at finds or makes the medians of a rival in a bout.
func (s summary) at(bout, rival string) *medians {
	if s[bout] == nil {
		s[bout] = map[string]*medians{}
	}
	if s[bout][rival] == nil {
		s[bout][rival] = &medians{figures: map[string]float64{}}
	}
	return s[bout][rival]
}

// get is one median, NaN if it was not measured.
func (s summary) get(bout, rival, figure string) float64 {
	if m := s[bout][rival]; m != nil {
		if v, ok := m.figures[figure]; ok {
			return v
		}
	}
	return math.NaN()
}

// best is the best median of the given rivals: the largest, or the smallest where less is better.
// NaN if none was measured.
func (s summary) best(bout, figure string, less bool, among []string) (name string, v float64) {
	v = math.NaN()
	for _, n := range among {
		x := s.get(bout, n, figure)
		if math.IsNaN(x) || n == nameOurs {
			continue
		}
		if math.IsNaN(v) || less && x < v || !less && x > v {
			name, v = n, x
		}
	}
	return name, v
}

func column(rows [][]float64, i int) (c []float64) {
	for _, r := range rows {
		c = append(c, r[i])
	}
	return c
}

// median of an even number is the mean of the two in the middle.
func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	n := len(v)
	if n == 0 {
		return math.NaN()
	}
	return (v[(n-1)/2] + v[n/2]) / 2
}
