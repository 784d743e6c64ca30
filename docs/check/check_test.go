package check

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/flightlock/flightlock/prom"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
)

// series are the names that a scrape of a client has, each with its labels and their values.
// A label without known values may have any.
func series(t *testing.T) map[string]map[string][]string {
	t.Helper()
	nodes := flightlocktest.Start(3)
	defer nodes.Close()
	reg := prometheus.NewRegistry()
	metrics, err := prom.New(reg)
	if err != nil {
		t.Fatal(err)
	}
	c, err := nodes.Client(flightlock.Options{Observers: []*flightlock.Observer{metrics}})
	if err != nil {
		t.Fatal(err)
	}
	l, err := c.TryLock(context.Background(), "k", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release(context.Background())
	defer fetching(t, c).Close(context.Background())
	defer caching(t, c, nodes).Close(context.Background())
	nodes.Down(true)
	if _, err := c.TryLock(context.Background(), "other", time.Second); !errors.Is(err,
		flightlock.ErrUnavailable) {
		t.Fatal(err)
	}
	nodes.Down(false)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]map[string][]string{}
	for _, f := range families {
		labels := map[string][]string{"job": nil, "instance": nil, "client": nil, "le": nil}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = append(labels[l.GetName()], l.GetValue())
			}
		}
		all[f.GetName()] = labels
		if len(f.GetMetric()) > 0 && f.GetMetric()[0].GetHistogram() != nil {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				all[f.GetName()+suffix] = labels
			}
		}
	}
	return all
}

// fetching is a Fetcher whose cache keeps nothing, after one load.
func fetching(t *testing.T, c *flightlock.Client) *fetch.Fetcher[int] {
	t.Helper()
	f, err := fetch.New(c, fetch.Plain(
		func(context.Context, string) (int, bool, error) { return 0, false, nil },
		func(context.Context, string, int) error { return nil },
	), fetch.Each(func(context.Context, string) (int, error) { return 1, nil }), fetch.Options{Name: "users"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Get(context.Background(), "user:42"); err != nil {
		t.Fatal(err)
	}
	return f
}

// caching is a Cache after one Get.
func caching(t *testing.T, c *flightlock.Client, nodes *flightlocktest.Nodes) *rediscache.Cache[int] {
	t.Helper()
	load := func(context.Context, string) (int, error) { return 1, nil }
	items, err := rediscache.New(c, nodes.Redis(0), fetch.Each(load),
		rediscache.Options[int]{Name: "items", Fresh: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := items.Get(context.Background(), "42"); err != nil {
		t.Fatal(err)
	}
	return items
}

// checkExpr parses an expression, and finds metrics, labels and values that no client has.
func checkExpr(t *testing.T, all map[string]map[string][]string, where, text string) {
	t.Helper()
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(text)
	if err != nil {
		t.Errorf("%s: %v", where, err)
		return
	}
	used := map[string]bool{}
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
		if v, ok := n.(*parser.VectorSelector); ok {
			labels, there := all[v.Name]
			if !there {
				t.Errorf("%s: no client has %s", where, v.Name)
			}
			for name := range labels {
				used[name] = true
			}
			for _, m := range v.LabelMatchers {
				values, there := labels[m.Name]
				if !there && m.Name != "__name__" {
					t.Errorf("%s: %s has no label %s", where, v.Name, m.Name)
				}
				if len(values) > 0 && !matchesAny(m.Matches, values) {
					t.Errorf("%s: %s has no %s", where, v.Name, m)
				}
			}
		}
		return nil
	})
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
		if a, ok := n.(*parser.AggregateExpr); ok {
			for _, label := range a.Grouping {
				if !used[label] {
					t.Errorf("%s: grouped by %s, which nothing in it has", where, label)
				}
			}
		}
		return nil
	})
}

func matchesAny(matches func(string) bool, values []string) bool {
	for _, v := range values {
		if matches(v) {
			return true
		}
	}
	return false
}

// The alert rules parse, and refer to metrics that exist.
func TestAlerts(t *testing.T) {
	data, err := os.ReadFile("../alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	groups, errs := rulefmt.Parse(data, false, model.UTF8Validation, parser.NewParser(parser.Options{}),
		slog.Default())
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	docs, err := os.ReadFile("../metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	all := series(t)
	for _, g := range groups.Groups {
		for _, r := range g.Rules {
			checkExpr(t, all, r.Alert, r.Expr)
			if !strings.Contains(string(docs), "`"+r.Alert+"`") {
				t.Errorf("docs/metrics.md does not say what to do about %s", r.Alert)
			}
		}
	}
}

// Every panel of the dashboard parses, refers to metrics that exist, and has a description.
func TestDashboard(t *testing.T) {
	panels, err := Board("../grafana/flightlock.json")
	if err != nil {
		t.Fatal(err)
	}
	all := series(t)
	shown := map[string]bool{}
	for _, p := range panels {
		if p.Type == "row" {
			continue
		}
		if p.Description == "" || len(p.Targets) == 0 {
			t.Errorf("panel %q without description or query", p.Title)
		}
		for _, target := range p.Targets {
			expr := Expr(target.Expr, 5*time.Minute)
			checkExpr(t, all, p.Title, expr)
			for _, name := range regexp.MustCompile(`flightlock_\w+`).FindAllString(expr, -1) {
				shown[base(name)] = true
			}
		}
	}
	docs, err := os.ReadFile("../metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	for name := range all {
		name = base(name)
		if !shown[name] {
			t.Errorf("no panel shows %s", name)
		}
		if !strings.Contains(string(docs), "`"+name) {
			t.Errorf("docs/metrics.md does not have %s", name)
		}
	}
}

// base is the name of the histogram that a series belongs to.
func base(name string) string {
	return strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_sum"), "_count")
}
