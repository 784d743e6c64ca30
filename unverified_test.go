package flightlock_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/prometheus/client_golang/prometheus"
)

// A server that refuses boot.lua has no vote, and every observer is notified, with the reason,
// until it accepts it.
func TestANodeThatRefusesBootIsSeen(t *testing.T) {
	t.Parallel()
	for _, r := range refusals {
		words := map[string][2]string{ // of the log, of the fix
			"NOREPLICAS":            {"NOREPLICAS", "min-replicas-to-write"},
			"OOM":                   {"OOM", "maxmemory"},
			"READONLY":              {"READONLY", "use its master"},
			"MISCONF":               {"MISCONF", "repair its disk"},
			"NOPERM for SET":        {"", "+set"},
			"NOPERM for the marker": {"", "~flightlock:*"},
		}
		said, isSeen := words[r.name]
		if !isSeen {
			continue
		}
		t.Run(r.name, func(t *testing.T) {
			tr := newTrio(t)
			first := tr.client(flightlock.Options{})
			tryLock(t, first, "k") // a new deployment needs all nodes
			closeClient(t, first)  // or it might bootstrap the node before that is refused
			must(t, tr.servers[0].Restart())
			r.refuse(tr)
			var log lines
			reg := prometheus.NewRegistry()
			c := tr.client(flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil)), Registerer: reg})
			lockUntilUnverified(t, c, 1)
			addr := tr.proxy.Addr()
			wantOneLine(t, &log, "level=WARN", "node unverified", addr, "no vote: the node did not report", said[0])
			wantGauge(t, reg, "flightlock_node_unverified", addr, 1)
			wantFinding(t, check(t, c), addr, "quarantine", flightlock.StatusFail, said[1])
			r.accept(tr)
			lockUntilUnverified(t, c, 0)
			wantOneLine(t, &log, "level=INFO", "verified again", addr)
			wantGauge(t, reg, "flightlock_node_unverified", addr, 0)
		})
	}
}

// A node that has no vote with one client until another one has bootstrapped it is verified for the
// first as well, when its vote counts.
func TestANodeThatAnotherClientVerified(t *testing.T) {
	tr := newTrio(t)
	a, b := tr.client(flightlock.Options{}), tr.client(flightlock.Options{})
	useOnAll(t, a, "k", tr.servers...)
	useOnAll(t, b, "k", tr.servers...) // it loads no scripts from here on
	noTime := rights("", "-time")
	noTime.refuse(tr)
	lockUntilRefused(tr, a)
	noTime.accept(tr)
	must(t, tr.servers[2].Kill()) // both others are needed from here on
	eventuallyLock(t, b, "k")
	eventuallyLock(t, a, "k")
	redistest.Eventually(t, 20*time.Second, "it is verified", func() bool { return a.Stats().Unverified == 0 })
}

// A Logger that blocks is called by one goroutine for a node, however often its state changes.
func TestABlockedLoggerIsToldOnce(t *testing.T) {
	tr := newTrio(t)
	log := blocked{began: make(chan struct{}, 100), end: make(chan struct{})}
	c := tr.client(flightlock.Options{Logger: slog.New(log)})
	defer close(log.end)
	useOnAll(t, c, "k", tr.servers...)
	noTime := rights("", "-time")
	for range 5 {
		noTime.refuse(tr)
		lockUntilRefused(tr, c)
		noTime.accept(tr)
		lockUntilUnverified(t, c, 0)
	}
	if n := len(log.began); n != 1 {
		t.Errorf("%d lines are being written at once", n)
	}
}

// lockUntilUnverified locks until so many nodes are unverified.
func lockUntilUnverified(t *testing.T, c *flightlock.Client, n int64) {
	t.Helper()
	lockUntil(t, c, "k", fmt.Sprintf("%d nodes are unverified", n), func() bool { return c.Stats().Unverified == n })
}

// lockUntilRefused has the first node, which refuses boot.lua, lose its scripts, and c lock until
// that is seen. Each time that it is not, the node loses them again: a boot that it has answered
// before may load them late.
func lockUntilRefused(tr *trio, c *flightlock.Client) {
	tr.t.Helper()
	tr.servers[0].Do(tr.t, "SCRIPT", "FLUSH")
	lockUntil(tr.t, c, "k", "a node is unverified", func() bool {
		if c.Stats().Unverified == 1 {
			return true
		}
		tr.servers[0].Do(tr.t, "SCRIPT", "FLUSH")
		return false
	})
}

// blocked is a log that blocks until it is ended.
type blocked struct {
	slog.Handler
	began, end chan struct{}
}

func (blocked) Enabled(context.Context, slog.Level) bool { return true }

func (b blocked) Handle(context.Context, slog.Record) error {
	b.began <- struct{}{}
	<-b.end
	return nil
}

// wantGauge expects a gauge of that name to have that value for a node.
func wantGauge(t *testing.T, reg prometheus.Gatherer, name, node string, want float64) {
	t.Helper()
	families, err := reg.Gather()
	must(t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if f.GetName() == name && l.GetName() == "node" && l.GetValue() == node {
					if got := m.GetGauge().GetValue(); got != want {
						t.Errorf("%s of %s is %v, want %v", name, node, got, want)
					}
					return
				}
			}
		}
	}
	t.Errorf("no %s of %s", name, node)
}
