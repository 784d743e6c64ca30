package prom

import (
	"slices"
	"sync"

	"github.com/flightlock/flightlock"
	"github.com/prometheus/client_golang/prometheus"
)

// fetchers are the Fetchers of all Clients. Those with the same name are one. What FetcherStats count is read
// at each scrape; a load makes one observation, and a miss that waits another. A hit makes none.
type fetchers struct {
	load *prometheus.HistogramVec
	wait *prometheus.HistogramVec

	mu     sync.Mutex // guards what follows; nothing is read under it
	byName map[string]*fetchersOfAName
}

type stats = flightlock.FetcherStats

type fetchersOfAName struct {
	open []*func() stats
	past stats // of those that were closed: a counter must not go back
}

var (
	loadOutcomes = []flightlock.Outcome{flightlock.LoadLoaded, flightlock.LoadFailed, flightlock.LoadPanicked,
		flightlock.LoadTimedOut}
	missOutcomes = []string{"value", "error", "canceled"}
)

func (f *fetchers) init() {
	f.load = histogram("fetch_load_duration_seconds", "Duration of loads, by outcome.", "fetcher", "outcome")
	f.wait = histogram("fetch_wait_duration_seconds", "How long misses waited, by outcome.", "fetcher",
		"outcome")
	f.byName = map[string]*fetchersOfAName{}
}

func (f *fetchers) opened(_ *flightlock.Client, name string, read func() stats) (closed func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, outcome := range loadOutcomes { // so that rates begin at 0, not at the first
		f.load.WithLabelValues(name, string(outcome))
	}
	for _, outcome := range missOutcomes {
		f.wait.WithLabelValues(name, outcome)
	}
	of := f.byName[name]
	if of == nil {
		of = &fetchersOfAName{}
		f.byName[name] = of
	}
	of.open = append(of.open, &read)
	return func() { f.closed(name, &read) }
}

// closed forgets a Fetcher, and its name with the last one.
func (f *fetchers) closed(name string, read *func() stats) {
	last := (*read)()
	for _, m := range ofAll {
		m.pass(&last)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	of := f.byName[name]
	of.open = slices.DeleteFunc(of.open, func(x *func() stats) bool { return x == read })
	of.past = plus(of.past, last)
	if len(of.open) == 0 {
		delete(f.byName, name)
		label := prometheus.Labels{"fetcher": name}
		f.load.DeletePartialMatch(label)
		f.wait.DeletePartialMatch(label)
	}
}

// read gives the sums by name.
func (f *fetchers) read() map[string]stats {
	open, sums := map[string][]*func() stats{}, map[string]stats{}
	f.mu.Lock()
	for name, of := range f.byName {
		open[name], sums[name] = slices.Clone(of.open), of.past
	}
	f.mu.Unlock()
	for name, all := range open {
		for _, read := range all {
			sums[name] = plus(sums[name], (*read)())
		}
	}
	return sums
}

var ofFetchers = []field[stats]{
	total(func(s *stats) *uint64 { return &s.Hits }, "fetch_hits_total",
		"Calls that found a fresh value.", "fetcher"),
	total(func(s *stats) *uint64 { return &s.Stale }, "fetch_stale_total",
		"Calls that found a stale value.", "fetcher"),
	total(func(s *stats) *uint64 { return &s.Misses }, "fetch_misses_total",
		"Calls that had to wait for a load, here or elsewhere.", "fetcher"),
	total(func(s *stats) *uint64 { return &s.Joined }, "fetch_joined_total",
		"Misses that joined a load of their key in progress in this process.", "fetcher"),
	total(func(s *stats) *uint64 { return &s.Loads }, "fetch_loads_total", "Loads started.", "fetcher"),
	total(func(s *stats) *uint64 { return &s.UnlockedLoads }, "fetch_unlocked_loads_total",
		"Loads without a lock.", "fetcher"),
	total(func(s *stats) *uint64 { return &s.StoreFailures }, "fetch_store_failures_total",
		"Loaded values that could not be stored.", "fetcher"),
	total(func(s *stats) *uint64 { return &s.Unstored }, "fetch_unstored_total",
		"Loaded values that were not stored for lack of a stamp.", "fetcher"),
	total(func(s *stats) *uint64 { return &s.LookupErrors }, "fetch_lookup_errors_total",
		"Lookups that failed.", "fetcher"),
	total(func(s *stats) *uint64 { return &s.Lost }, "fetch_lost_locks_total",
		"Locks lost while a value was loaded or stored.", "fetcher"),
	total(func(s *stats) *uint64 { return &s.Outdated }, "fetch_outdated_total",
		"Loaded values that were not stored because their entry had changed meanwhile.", "fetcher"),
	level(func(s *stats) *int64 { return &s.Running }, "fetch_in_flight",
		"Keys that are being locked, loaded or stored now.", "fetcher"),
}

// Those of Caches only.
var ofCaches = []field[stats]{
	total(func(s *stats) *uint64 { return &s.LocalHits }, "cache_local_hits_total",
		"Values served from the local tier, which are no calls of Get of the Fetcher.", "fetcher"),
	total(func(s *stats) *uint64 { return &s.NotFound }, "cache_not_found_total",
		"Gets that were served a remembered ErrNotFound.", "fetcher"),
	total(func(s *stats) *uint64 { return &s.Undecodable }, "cache_undecodable_total",
		"Values found that could not be decoded, and were loaded anew.", "fetcher"),
	total(func(s *stats) *uint64 { return &s.TooLong }, "cache_too_long_total",
		"Values not stored because of MaxValue.", "fetcher"),
	total(func(s *stats) *uint64 { return &s.Dropped }, "cache_dropped_invalidations_total",
		"Failed invalidations that were given up, because too many were being repeated.", "fetcher"),
	level(func(s *stats) *int64 { return &s.Repeating }, "cache_repeated_invalidations",
		"Keys whose invalidation has failed and is being repeated.", "fetcher"),
	level(func(s *stats) *int64 { return &s.Down }, "cache_servers_down",
		"Servers of entries that do not answer, and are only probed.", "fetcher"),
	level(func(s *stats) *int64 { return &s.Hearing }, "cache_hearing",
		"Caches whose local tier hears of changes, and so keeps values for longer than 1s.", "fetcher"),
}

// ofAll are what is summed up of both.
var ofAll = slices.Concat(ofFetchers, ofCaches)

// plus is the sum of both.
func plus(s, o stats) stats {
	for _, f := range ofAll {
		f.add(&s, &o)
	}
	s.Cached = s.Cached || o.Cached
	return s
}

func (f *fetchers) describe(ch chan<- *prometheus.Desc) {
	f.load.Describe(ch)
	f.wait.Describe(ch)
	for _, m := range ofAll {
		ch <- m.desc
	}
}

func (f *fetchers) collect(ch chan<- prometheus.Metric) {
	f.load.Collect(ch)
	f.wait.Collect(ch)
	for name, s := range f.read() {
		some := ofAll
		if !s.Cached {
			some = ofFetchers
		}
		for _, m := range some {
			m.collect(ch, &s, name)
		}
	}
}
