package flightlock

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/check"
	"github.com/google/uuid"
)

// Status is the result of a Finding, or of a whole Report.
type Status string

// The statuses, from good to bad. Unknown means that the user may not read the value, or that it could not
// be measured; by itself it does not indicate a problem.
const (
	StatusOK      Status = "ok"
	StatusUnknown Status = "unknown"
	StatusWarn    Status = "warn" // works, with a disadvantage in some failures
	StatusFail    Status = "fail" // locks do not work, or do not exclude each other
)

var statuses = []Status{StatusOK, StatusUnknown, StatusWarn, StatusFail}

// Finding is the result of one check, for one server.
type Finding struct {
	Node   string `json:"node,omitempty"` // the server's address; empty if it concerns all nodes
	Check  string `json:"check"`
	Status Status `json:"status"`
	Found  string `json:"found"`
	Why    string `json:"why"`           // why it matters for locks
	Fix    string `json:"fix,omitempty"` // the command that fixes it, or what to do; may be empty
}

// Report is the result of Check. It marshals to JSON.
type Report struct {
	Status   Status    `json:"status"` // the worst of the findings
	Findings []Finding `json:"findings"`
}

// String returns the report as a table.
func (r Report) String() string {
	var b strings.Builder
	nodes, checks := len("all nodes"), 0
	for _, f := range r.Findings {
		nodes, checks = max(nodes, len(f.Node)), max(checks, len(f.Check))
	}
	count := map[Status]int{}
	for _, f := range r.Findings {
		count[f.Status]++
		if f.Node == "" {
			f.Node = "all nodes"
		}
		fmt.Fprintf(&b, "%-7s  %-*s  %-*s  %s\n", f.Status, nodes, f.Node, checks, f.Check, f.Found)
		if f.Status == StatusWarn || f.Status == StatusFail {
			fmt.Fprintf(&b, "%9swhy: %s\n", "", f.Why)
		}
		if f.Fix != "" {
			fmt.Fprintf(&b, "%9sfix: %s\n", "", f.Fix)
		}
	}
	fmt.Fprintf(&b, "%d fail, %d warn, %d unknown, %d ok\n",
		count[StatusFail], count[StatusWarn], count[StatusUnknown], count[StatusOK])
	return b.String()
}

// Check reports whether these nodes are fit for locking: whether each server can be reached, its version,
// role, eviction, persistence and clock; whether the user may run the scripts and use pub/sub; whether two
// nodes are one server, and whether other clients lock on another set of nodes. Its last finding is whether
// locks can be had. docs/operations.md lists all findings. Run it when nodes are set up or changed.
//
// It needs no more rights than locking, disturbs no lock, and takes about a second; at most 5s, or with a
// NodeTimeout above 80ms 60 times that, up to 30s. The error is ErrClosed or ctx's; the report then has the
// findings so far.
func (c *Client) Check(ctx context.Context) (Report, error) {
	if c.flights == nil {
		return Report{}, errZeroClient
	}
	inner, cancel := context.WithTimeout(ctx, check.Limit(c.opts.NodeTimeout))
	defer cancel()
	defer context.AfterFunc(c.ended, cancel)()
	if c.ended.Err() != nil { // AfterFunc would cancel soon, and not yet
		cancel()
	}
	var r Report
	worst := 0
	for _, f := range c.check.Check(inner, uuid.NewString()) {
		r.Findings = append(r.Findings, Finding{f.Node, f.Check, Status(f.Status), f.Found, f.Why, f.Fix})
		worst = max(worst, slices.Index(statuses, Status(f.Status)))
	}
	r.Status = statuses[worst]
	switch {
	case ctx.Err() != nil:
		return r, fmt.Errorf("flightlock: check: %w", ctx.Err())
	case c.ended.Err() != nil:
		return r, fmt.Errorf("flightlock: check: %w", ErrClosed)
	}
	return r, nil
}

// checkConfig is what Check and the announcements of node sets need to know.
func (c *Client) checkConfig() check.Config {
	o := c.opts
	return check.Config{
		Clients: c.clients, Nodes: c.nodes,
		KeyPrefix: o.KeyPrefix, NodeTimeout: o.NodeTimeout, MaxTTL: o.MaxTTL, DriftFactor: o.DriftFactor,
		DisableNotify: o.DisableNotify, DisableQuarantine: o.DisableQuarantine,
		Guarded: c.guarded(), Quarantine: c.quarantineTime(), Quarantined: c.quorum.Quarantined,
		Process: hostLabel(), Run: func(f func()) { c.tasks.Go(f) },
		TryLocks: func(ctx context.Context) (byNode map[string]error, err error) {
			err = c.tryKeys(ctx, "check", FailFast(Within(nil, max(lockTime, 4*o.NodeTimeout))))
			return nodeErrors(err), err
		},
	}
}

// lockTime is how long Check tries to acquire a lock, or four times NodeTimeout if that is longer.
const lockTime = 2 * time.Second

// startAnnouncing begins with the first lock to announce the set of nodes that this client locks on.
func (c *Client) startAnnouncing() {
	if c.announces.Load() || c.announces.Swap(true) { // as for all locks but the first
		return
	}
	c.tasks.Go(func() {
		c.check.Announce(c.ended, func(nodes []string, by string) {
			c.log(slog.LevelWarn,
				"flightlock: other clients lock the same keys on another set of nodes: two may hold one key",
				"their_nodes", nodes, "our_nodes", len(c.nodes), "by", by)
		})
	})
}
