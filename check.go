package flightlock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/google/uuid"
)

// Status is what a Finding, or a whole Report, comes to.
type Status string

// The statuses, from good to bad. Unknown is what the user that locks may not ask, or what
// could not be measured; it is no reason to worry by itself.
const (
	StatusOK      Status = "ok"
	StatusUnknown Status = "unknown"
	StatusWarn    Status = "warn" // works, and costs something in a bad hour
	StatusFail    Status = "fail" // locks do not work, or not exclude, as it is
)

var severity = map[Status]int{StatusOK: 0, StatusUnknown: 1, StatusWarn: 2, StatusFail: 3}

// Finding is one thing that Check looked at, on one server.
type Finding struct {
	Node   string `json:"node,omitempty"` // the server's address; empty if it concerns all nodes
	Check  string `json:"check"`
	Status Status `json:"status"`
	Found  string `json:"found"`
	Why    string `json:"why"`           // why it matters for locks
	Fix    string `json:"fix,omitempty"` // the command that mends it, or who can; empty if there is nothing to mend
}

// Report is what Check found. It marshals to JSON.
type Report struct {
	Status   Status    `json:"status"` // the worst of the findings
	Findings []Finding `json:"findings"`
}

// String is the report as a table, with why and fix below what is not ok.
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

func (r *Report) add(f Finding) {
	r.Findings = append(r.Findings, f)
	if severity[f.Status] > severity[r.Status] {
		r.Status = f.Status
	}
}

// checkTime bounds a Check, whatever the sockets do.
const checkTime = 5 * time.Second

// Check finds out whether these nodes are fit to lock on: whether each server (each master
// of a Cluster) can be reached, its version and role, whether it evicts keys or forgets
// them when it restarts, how its clock runs, whether the user may run the scripts and use
// pub/sub; whether two nodes are one server, and whether other clients lock on another set
// of nodes.
//
// It needs no right that locking does not need; what it may not ask is unknown. It writes
// nothing that lasts, disturbs no lock, and takes about a second, 5s at most. Run it when a
// service is set up and after every change of its nodes, not on each start: an error
// is ErrClosed or that ctx ended, and the report then has what was found by then.
func (c *Client) Check(ctx context.Context) (Report, error) {
	inner, cancel := c.tasks.context(ctx)
	defer cancel()
	inner, stop := context.WithTimeout(inner, checkTime)
	defer stop()
	l := look{c: c, nonce: uuid.NewString(), facts: make([]facts, len(c.nodes))}
	l.all(inner)
	r := l.judge()
	switch {
	case ctx.Err() != nil:
		return r, fmt.Errorf("flightlock: check: %w", ctx.Err())
	case errors.Is(context.Cause(inner), ErrClosed):
		return r, fmt.Errorf("flightlock: check: %w", ErrClosed)
	}
	return r, nil
}

// look is one Check under way.
type look struct {
	c     *Client
	nonce string
	facts []facts // of each node
	words []word  // that clients have left on each node

	mu         sync.Mutex // guards what follows
	twins      [][2]int
	uncompared int
}

// facts are a node's servers, or why there are none.
type facts struct {
	servers []node.Facts
	err     error
}

// all asks all nodes for all there is to know, at once.
func (l *look) all(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { l.words = l.c.readWords(ctx) })
	for i, client := range l.c.opts.Nodes {
		wg.Go(func() {
			l.facts[i].servers, l.facts[i].err = node.Inspect(ctx, client, l.c.opts.KeyPrefix, l.nonce, l.c.spawn)
		})
		for j := range i {
			wg.Go(func() { l.compare(ctx, j, i) })
		}
	}
	wg.Wait()
}

func (c *Client) spawn(f func()) { c.tasks.Go(f) }

// compare finds out whether two nodes are one server.
func (l *look) compare(ctx context.Context, i, j int) {
	a, b := node.Brief(l.c.opts.Nodes[i]), node.Brief(l.c.opts.Nodes[j])
	same, err := node.Await(ctx, l.c.spawn, func() (bool, error) {
		return node.SameServer(ctx, a, b, l.nonce+fmt.Sprint(i, j))
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err != nil:
		l.uncompared++
	case same:
		l.twins = append(l.twins, [2]int{i, j})
	}
}

// judge puts what was found into a report: node by node, then what concerns all.
func (l *look) judge() Report {
	r := Report{Status: StatusOK}
	middle := l.middleClock()
	for i, n := range l.facts {
		if n.err != nil {
			r.add(unreachable(l.c.commandFor(i, l.c.nodes[i].Name()), n.err))
		}
		for _, f := range n.servers {
			if !f.Cluster { // where a Sentinel-managed master is, only its dialer knows
				f.Addr = l.c.nodes[i].Name()
			}
			if f.Err != nil {
				r.add(unreachable(l.c.commandFor(i, f.Addr), f.Err))
				continue
			}
			s := subject{c: l.c, i: i, f: f, middle: middle}
			for _, rule := range rules {
				found := rule.judge(s)
				found.Node, found.Check, found.Why = f.Addr, rule.name, rule.why
				r.add(found)
			}
		}
	}
	r.add(l.judgeTwins())
	r.add(l.judgeSets())
	return r
}

func (l *look) judgeTwins() Finding {
	f := Finding{Check: "same server", Why: "a server that is in the list twice has two votes, so a majority may be one machine"}
	switch {
	case len(l.twins) > 0:
		var pairs []string
		for _, t := range l.twins {
			pairs = append(pairs, fmt.Sprintf("Nodes[%d] (%s) and Nodes[%d] (%s)",
				t[0], l.c.nodes[t[0]].Name(), t[1], l.c.nodes[t[1]].Name()))
		}
		f.Status, f.Found = StatusFail, strings.Join(pairs, ", ")+" are the same server"
		f.Fix = "give each server once; every node must be a server of its own"
	case l.uncompared > 0:
		f.Status, f.Found = StatusUnknown, fmt.Sprintf("%d pairs of nodes could not be compared", l.uncompared)
	case len(l.c.nodes) == 1:
		f.Status, f.Found = StatusOK, "one node"
	default:
		f.Status, f.Found = StatusOK, fmt.Sprintf("%d nodes, all different", len(l.c.nodes))
	}
	return f
}

// middleClock is the offset of the clock that has as many before as behind it.
func (l *look) middleClock() time.Duration {
	var all []time.Duration
	for _, n := range l.facts {
		for _, f := range n.servers {
			if f.Err == nil && f.ClockErr == nil {
				all = append(all, f.Clock.Offset)
			}
		}
	}
	return median(all)
}

// failoverAddr is what go-redis calls the address of every Sentinel-managed master.
const failoverAddr = "FailoverClient"
