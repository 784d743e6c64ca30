package flightlock

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/cachestats"
	"github.com/prometheus/client_golang/prometheus"
)

// fetchMetrics are those of the Fetchers of a Client, which its metrics include. Fetchers with the
// same name are one there. What Stats counts is read at each scrape; a load makes one observation,
// and a caller that waits for it another. A hit makes none.
type fetchMetrics struct {
	load *prometheus.HistogramVec
	wait *prometheus.HistogramVec

	mu     sync.Mutex // guards what follows; nothing is taken under it
	byName map[string]*fetchersOfAName
}

type fetchersOfAName struct {
	open []*fetchMeter
	past fetchSums // of those that were closed: a counter must not go back
}

// fetchSums are the counters of Fetchers, and of those Caches of package rediscache that they are in.
type fetchSums struct {
	fetch  FetchStats
	cache  cachestats.Stats
	cached bool // there is a Cache among them
}

func (s fetchSums) plus(o fetchSums) fetchSums {
	return fetchSums{s.fetch.plus(o.fetch), s.cache.Plus(o.cache), s.cached || o.cached}
}

// fetchMeter is what one Fetcher observes.
type fetchMeter struct {
	name  string
	stats func() FetchStats
	cache atomic.Pointer[func() cachestats.Stats] // set by a Cache, right after its Fetcher was made
	load  map[string]prometheus.Observer          // by outcome
	wait  map[string]prometheus.Observer
}

var (
	loadOutcomes  = []string{"loaded", "failed", "panicked", "timed_out"}
	fetchOutcomes = []string{"value", "error", "canceled"}
)

// What is read at each scrape, by the name of the Fetcher.
var fetchCounters = []struct {
	desc *prometheus.Desc
	of   func(FetchStats) uint64
}{
	{desc("fetch_hits_total", "Fetch calls that found a fresh value.", "fetcher"),
		func(s FetchStats) uint64 { return s.Hits }},
	{desc("fetch_stale_total", "Fetch calls that found a stale value.", "fetcher"),
		func(s FetchStats) uint64 { return s.Stale }},
	{desc("fetch_misses_total", "Fetch calls that had to wait for a load, here or elsewhere.", "fetcher"),
		func(s FetchStats) uint64 { return s.Misses }},
	{desc("fetch_joined_total", "Misses that joined a load of their key in progress in this process.", "fetcher"),
		func(s FetchStats) uint64 { return s.Joined }},
	{desc("fetch_loads_total", "Loads started.", "fetcher"), func(s FetchStats) uint64 { return s.Loads }},
	{desc("fetch_unlocked_loads_total", "Loads without a lock.", "fetcher"),
		func(s FetchStats) uint64 { return s.UnlockedLoads }},
	{desc("fetch_store_failures_total", "Loaded values that could not be stored.", "fetcher"),
		func(s FetchStats) uint64 { return s.StoreFailures }},
	{desc("fetch_lookup_errors_total", "Lookups that failed.", "fetcher"),
		func(s FetchStats) uint64 { return s.LookupErrors }},
	{desc("fetch_lost_locks_total", "Locks lost while a value was loaded or stored.", "fetcher"),
		func(s FetchStats) uint64 { return s.Lost }},
	{desc("fetch_outdated_total", "Loaded values that were not stored because their entry had changed meanwhile.",
		"fetcher"), func(s FetchStats) uint64 { return s.Outdated }},
}

// The same for Caches.
var cacheCounters = []struct {
	desc *prometheus.Desc
	of   func(cachestats.Stats) uint64
}{
	{desc("cache_local_hits_total", "Values served from the local tier, which are no calls of Fetch.", "fetcher"),
		func(s cachestats.Stats) uint64 { return s.LocalHits }},
	{desc("cache_not_found_total", "Gets that were served a remembered ErrNotFound.", "fetcher"),
		func(s cachestats.Stats) uint64 { return s.NotFound }},
	{desc("cache_undecodable_total", "Values found that could not be decoded, and were loaded anew.", "fetcher"),
		func(s cachestats.Stats) uint64 { return s.Undecodable }},
	{desc("cache_too_long_total", "Values not stored because of MaxValue.", "fetcher"),
		func(s cachestats.Stats) uint64 { return s.TooLong }},
	{desc("cache_dropped_invalidations_total",
		"Failed invalidations that were given up, because too many were being repeated.", "fetcher"),
		func(s cachestats.Stats) uint64 { return s.Dropped }},
}

var (
	descRepeating = desc("cache_repeated_invalidations",
		"Keys whose invalidation has failed and is being repeated.", "fetcher")
	descDown = desc("cache_servers_down", "Servers of entries that do not answer, and are only probed.", "fetcher")
)

var descFlights = desc("fetch_in_flight", "Keys that are being locked, loaded or stored now.", "fetcher")

func newFetchMetrics() *fetchMetrics {
	return &fetchMetrics{
		load:   histogram("fetch_load_duration_seconds", "Duration of loads, by outcome.", "fetcher", "outcome"),
		wait:   histogram("fetch_wait_duration_seconds", "How long misses waited, by outcome.", "fetcher", "outcome"),
		byName: map[string]*fetchersOfAName{},
	}
}

// add gives a new Fetcher its meter.
func (m *fetchMetrics) add(name string, stats func() FetchStats) *fetchMeter {
	meter := &fetchMeter{name: name, stats: stats, load: map[string]prometheus.Observer{},
		wait: map[string]prometheus.Observer{}}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, outcome := range loadOutcomes { // so that rates begin at 0, not at the first
		meter.load[outcome] = m.load.WithLabelValues(name, outcome)
	}
	for _, outcome := range fetchOutcomes {
		meter.wait[outcome] = m.wait.WithLabelValues(name, outcome)
	}
	of := m.byName[name]
	if of == nil {
		of = &fetchersOfAName{}
		m.byName[name] = of
	}
	of.open = append(of.open, meter)
	return meter
}

// remove forgets a Fetcher that was closed, and its name with the last one.
func (m *fetchMetrics) remove(meter *fetchMeter, last FetchStats) {
	past := meter.cacheSums()
	past.fetch, past.cache = last, past.cache.Past()
	m.mu.Lock()
	defer m.mu.Unlock()
	of := m.byName[meter.name]
	of.open = slices.DeleteFunc(of.open, func(x *fetchMeter) bool { return x == meter })
	of.past = of.past.plus(past)
	if len(of.open) == 0 {
		delete(m.byName, meter.name)
		label := prometheus.Labels{"fetcher": meter.name}
		m.load.DeletePartialMatch(label)
		m.wait.DeletePartialMatch(label)
	}
}

// read gives the sums by name. Stats takes the Fetcher's mutex, so it is called without m's.
func (m *fetchMetrics) read() map[string]fetchSums {
	open, sums := map[string][]*fetchMeter{}, map[string]fetchSums{}
	m.mu.Lock()
	for name, of := range m.byName {
		open[name], sums[name] = slices.Clone(of.open), of.past
	}
	m.mu.Unlock()
	for name, meters := range open {
		for _, meter := range meters {
			one := meter.cacheSums()
			one.fetch = meter.stats()
			sums[name] = sums[name].plus(one)
		}
	}
	return sums
}

// cacheSums are those of the meter's Cache, if it has one.
func (m *fetchMeter) cacheSums() (s fetchSums) {
	if read := m.cache.Load(); read != nil {
		s.cache, s.cached = (*read)(), true
	}
	return s
}

func init() {
	cachestats.Attach = func(fetcher any, read func() cachestats.Stats) {
		if m := fetcher.(interface{ meter() *fetchMeter }).meter(); m != nil {
			m.cache.Store(&read)
		}
	}
}

func (f *Fetcher[V]) meter() *fetchMeter { return f.seen.meter }

func (s FetchStats) plus(o FetchStats) FetchStats {
	return FetchStats{
		Hits: s.Hits + o.Hits, Stale: s.Stale + o.Stale, Misses: s.Misses + o.Misses, Joined: s.Joined + o.Joined,
		Loads: s.Loads + o.Loads, UnlockedLoads: s.UnlockedLoads + o.UnlockedLoads,
		LoadFailures: s.LoadFailures + o.LoadFailures, StoreFailures: s.StoreFailures + o.StoreFailures,
		LookupErrors: s.LookupErrors + o.LookupErrors, Lost: s.Lost + o.Lost, Outdated: s.Outdated + o.Outdated,
		Running: s.Running + o.Running,
	}
}

func (m *fetchMetrics) describe(ch chan<- *prometheus.Desc) {
	m.load.Describe(ch)
	m.wait.Describe(ch)
	ch <- descFlights
	for _, c := range fetchCounters {
		ch <- c.desc
	}
	for _, c := range cacheCounters {
		ch <- c.desc
	}
	ch <- descRepeating
	ch <- descDown
}

func (m *fetchMetrics) collect(ch chan<- prometheus.Metric) {
	m.load.Collect(ch)
	m.wait.Collect(ch)
	for name, s := range m.read() {
		ch <- prometheus.MustNewConstMetric(descFlights, prometheus.GaugeValue, float64(s.fetch.Running), name)
		for _, c := range fetchCounters {
			ch <- prometheus.MustNewConstMetric(c.desc, prometheus.CounterValue, float64(c.of(s.fetch)), name)
		}
		if !s.cached {
			continue
		}
		ch <- prometheus.MustNewConstMetric(descRepeating, prometheus.GaugeValue, float64(s.cache.Repeating), name)
		ch <- prometheus.MustNewConstMetric(descDown, prometheus.GaugeValue, float64(s.cache.Down), name)
		for _, c := range cacheCounters {
			ch <- prometheus.MustNewConstMetric(c.desc, prometheus.CounterValue, float64(c.of(s.cache)), name)
		}
	}
}

// begins is when a load begins, if anybody wants to know.
func (m *fetchMeter) begins() (now time.Time) {
	if m != nil {
		now = time.Now()
	}
	return now
}

// loaded observes a load that ended, or that is not waited for any more.
func (m *fetchMeter) loaded(began time.Time, err error, returned bool) {
	if m == nil {
		return
	}
	outcome, panicked := loadOutcomes[0], (*PanicError)(nil)
	switch {
	case !returned, errors.Is(err, context.DeadlineExceeded):
		outcome = loadOutcomes[3]
	case errors.As(err, &panicked):
		outcome = loadOutcomes[2]
	case err != nil:
		outcome = loadOutcomes[1]
	}
	m.load[outcome].Observe(time.Since(began).Seconds())
}

// waits is when a miss began to wait: now, unless it waits again, for a run that began later.
func (m *fetchMeter) waits(began time.Time) time.Time {
	if began.IsZero() {
		return m.begins()
	}
	return began
}

// waited observes a miss that has waited since began; a call that has not waited is none. It is inlined: each hit
// calls it.
func (m *fetchMeter) waited(began time.Time, err error) {
	if m != nil && !began.IsZero() {
		m.observeWait(began, err)
	}
}

func (m *fetchMeter) observeWait(began time.Time, err error) {
	outcome := fetchOutcomes[0]
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		outcome = fetchOutcomes[2]
	case err != nil:
		outcome = fetchOutcomes[1]
	}
	m.wait[outcome].Observe(time.Since(began).Seconds())
}
