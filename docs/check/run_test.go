package check

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/prom"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
)

// day is a client whose metrics are scraped every 15 seconds, of a clock that the test advances.
type day struct {
	t     *testing.T
	nodes *flightlocktest.Nodes
	c     *flightlock.Client
	users *fetch.Fetcher[int]
	items *rediscache.Cache[int]
	reg   *prometheus.Registry
	store *Store
	began time.Time
	now   time.Time
}

const (
	scrape   = 15 * time.Second
	patience = 20 * time.Second // for what must happen; a loaded machine may need some of it
)

func newDay(t *testing.T) *day {
	t.Helper()
	d := &day{
		t: t, nodes: flightlocktest.Start(3), reg: prometheus.NewRegistry(),
		store: NewStore(), began: time.Unix(1_800_000_000, 0),
	}
	t.Cleanup(d.nodes.Close)
	d.now = d.began
	metrics, err := prom.New(d.reg)
	if err != nil {
		t.Fatal(err)
	}
	if d.c, err = d.nodes.Client(flightlock.Options{Observers: []*flightlock.Observer{metrics}}); err != nil {
		t.Fatal(err)
	}
	d.users = fetching(t, d.c)
	t.Cleanup(func() { _ = d.users.Close(context.Background()) })
	d.items = caching(t, d.c, d.nodes)
	t.Cleanup(func() { _ = d.items.Close(context.Background()) })
	return d
}

// passes advances time, in which work is done before each scrape.
func (d *day) passes(how time.Duration, work func()) {
	d.t.Helper()
	for end := d.now.Add(how); d.now.Before(end); d.now = d.now.Add(scrape) {
		work()
		if err := d.store.Scrape(d.reg, d.now, "job", "orders", "instance", "orders-1"); err != nil {
			d.t.Fatal(err)
		}
	}
}

// locks is what a healthy client does: locks, handoffs, a refresh.
func (d *day) locks() {
	d.t.Helper()
	ctx := d.t.Context()
	l, err := d.c.SingleFlightLock(ctx, "k", time.Minute, nil)
	if err != nil {
		d.t.Fatal(err)
	}
	handed := make(chan error)
	go func() {
		next, err := d.c.SingleFlightLock(ctx, "k", time.Minute, nil)
		if err == nil {
			err = next.Release(ctx)
		}
		handed <- err
	}()
	d.fetches()
	redistest.Eventually(d.t, patience, "the next one waits", func() bool { return d.c.Stats().Waiters > 0 })
	if err := errors.Join(l.Refresh(ctx), l.Release(ctx), <-handed); err != nil {
		d.t.Fatal(err)
	}
}

// fetches has a value loaded.
func (d *day) fetches() {
	d.t.Helper()
	if _, err := d.users.Get(d.t.Context(), "user:42"); err != nil {
		d.t.Fatal(err)
	}
}

// firing are the alerts whose condition is true now.
func (d *day) firing() (names []string) {
	d.t.Helper()
	groups, errs := rulefmt.ParseFile("../alerts.yml", false, model.UTF8Validation,
		parser.NewParser(parser.Options{}), slog.Default())
	if len(errs) > 0 {
		d.t.Fatal(errs)
	}
	last := d.now.Add(-scrape)
	for _, g := range groups.Groups {
		for _, r := range g.Rules {
			m, err := d.store.Range(r.Expr, last, last, scrape)
			if err != nil {
				d.t.Fatal(r.Alert, err)
			}
			if len(m) > 0 {
				names = append(names, r.Alert)
			}
		}
	}
	return names
}

func (d *day) wantFiring(want ...string) {
	d.t.Helper()
	if got := d.firing(); !slices.Equal(got, want) {
		d.t.Errorf("alerts %v, want %v", got, want)
	}
}

// Each panel has something to show for a client that works, and is drawn.
func TestPanelsShowSomething(t *testing.T) {
	d := newDay(t)
	d.passes(5*time.Minute, d.locks)
	panels, err := Board("../grafana/flightlock.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range panels {
		for _, target := range p.Targets {
			m, err := d.store.Range(Expr(target.Expr, time.Minute), d.began, d.now, scrape)
			if err != nil {
				t.Fatal(p.Title, err)
			}
			some := false
			for _, s := range m {
				for _, v := range s.Floats {
					some = some || !math.IsNaN(v.F)
				}
			}
			if !some {
				t.Errorf("panel %q shows nothing for %s", p.Title, target.Expr)
			}
		}
	}
	svg, err := Draw(panels, d.store, []Phase{{"all is well", d.began, d.now}}, d.began, d.now, scrape,
		time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"all is well", "handed over", "10.0.0.1:6379"} {
		if !strings.Contains(svg, want) {
			t.Errorf("the drawing has no %q", want)
		}
	}
}

// An invalidation that has failed may leave an old value, so it is not left to who looks at the dashboard.
func TestAnAlertForInvalidationsThatFail(t *testing.T) {
	d := newDay(t)
	d.nodes.Down(true, 0) // the server of the values
	if err := d.items.Invalidate(t.Context(), "42"); err == nil {
		t.Fatal("no error")
	}
	d.passes(2*time.Minute, func() {})
	// that server is a node, too, and may be suspended
	of := slices.DeleteFunc(d.firing(), func(name string) bool {
		return name == "FlightlockMajorityAtRisk" || name == "FlightlockNodeSuspended"
	})
	if !slices.Equal(of, []string{"FlightlockInvalidationsFail"}) {
		t.Errorf("alerts %v beside those of the node", of)
	}
	d.nodes.Down(false)
	redistest.Eventually(t, patience, "it is repeated", func() bool { return d.items.Stats().Repeating == 0 })
	redistest.Eventually(t, patience, "no node is suspended", func() bool { return d.c.Stats().Suspended == 0 })
	d.passes(time.Minute, func() {})
	d.wantFiring()
}

// No alert fires while all is well; those that are meant for it do when the nodes are down, and
// when locks are lost.
func TestAlertsGoOff(t *testing.T) {
	d := newDay(t)
	d.passes(15*time.Minute, d.locks)
	d.wantFiring()

	d.nodes.Down(true)
	d.passes(5*time.Minute, func() {
		if _, err := d.c.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrUnavailable) {
			t.Fatal(err)
		}
		d.fetches()
	})
	d.wantFiring("FlightlockUnavailable", "FlightlockMajorityAtRisk", "FlightlockNodeSuspended",
		"FlightlockLoadsWithoutLocks")

	d.nodes.Down(false)
	redistest.Eventually(t, patience, "no node is suspended", func() bool { return d.c.Stats().Suspended == 0 })
	d.passes(15*time.Minute, d.locks)
	d.wantFiring()

	d.passes(time.Minute, func() {
		l, err := d.c.SingleFlightLock(t.Context(), "job", time.Minute, nil)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if err := d.nodes.Lose(ctx, "job"); err != nil || l.Err() == nil {
			t.Fatal(err)
		}
	})
	d.wantFiring("FlightlockLocksLost")
}

// The alert for an outage also fires if all callers wait until their ctx ends, as they do by default.
func TestAlertsGoOffForCallersThatWait(t *testing.T) {
	d := newDay(t)
	d.passes(5*time.Minute, d.locks)
	d.nodes.Down(true)
	d.passes(5*time.Minute, func() {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err := d.c.SingleFlightLock(ctx, "k", time.Second, nil)
		if !errors.Is(err, flightlock.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
	})
	d.wantFiring("FlightlockUnavailable", "FlightlockMajorityAtRisk", "FlightlockNodeSuspended")
}

// A node that has no vote because it is unverified counts against the majority as one that is suspended does.
func TestAnUnverifiedNodePutsTheMajorityAtRisk(t *testing.T) {
	d := newDay(t)
	d.reg = prometheus.NewRegistry() // of a client with three nodes
	for state, of := range map[string]float64{"suspended": 0, "quarantined": 0, "unverified": 1} {
		v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "flightlock_node_" + state}, []string{"node"})
		d.reg.MustRegister(v)
		for _, node := range []string{"a", "b", "c"} {
			v.WithLabelValues(node).Set(0)
		}
		v.WithLabelValues("b").Set(of)
	}
	d.passes(5*time.Minute, func() {})
	d.wantFiring("FlightlockMajorityAtRisk", "FlightlockNodeUnverified")
}

// The majority is at risk from the node on that is the last one that can be spared: also with an even
// number of nodes, as there are while nodes are added or replaced one by one.
func TestTheMajorityIsAtRiskWithAnyNumberOfNodes(t *testing.T) {
	for nodes, spare := range map[int]int{1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2, 7: 3} {
		for down := range nodes + 1 {
			d := newDay(t)
			d.reg = prometheus.NewRegistry()
			for _, state := range []string{"suspended", "quarantined", "unverified"} {
				v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "flightlock_node_" + state}, []string{"node"})
				d.reg.MustRegister(v)
				for i := range nodes {
					v.WithLabelValues(string(rune('a' + i))).Set(0)
					if state == "quarantined" && i < down {
						v.WithLabelValues(string(rune('a' + i))).Set(1)
					}
				}
			}
			d.passes(scrape, func() {})
			want := down > 0 && down >= spare
			if got := slices.Contains(d.firing(), "FlightlockMajorityAtRisk"); got != want {
				t.Errorf("%d of %d nodes down: the alert fires: %v, want %v", down, nodes, got, want)
			}
		}
	}
}
