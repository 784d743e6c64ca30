package main

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/histogram"
)

// This file counts what happens during a job: in a tally while it runs, one per client and shared
// by its goroutines, and in an outcome afterwards, which travels between processes and adds up.

// maxMessages is how many violations are kept in full; the rest is only counted.
const maxMessages = 10

// tally collects for one client. All its methods may be called by many goroutines.
type tally struct {
	parts [maxParts]partTally
	loads atomic.Uint64 // origin loads
	load  atomic.Int64  // nanoseconds that they took
	lost  atomic.Uint64 // locks that were over before they were released

	took []time.Duration // of a stampede: of each caller that got the value, until it had it

	mu         sync.Mutex // guards what follows, and the errors of all parts
	messages   []string
	violations uint64
}

type partTally struct {
	locks, own      atomic.Uint64 // grants: of the contended key, of the goroutines' own keys
	held            atomic.Int64  // nanoseconds, from grants of the contended key to their releases
	waits, ownWaits histogram.Histogram
	errors          map[string]errorCount
}

// errorCount is how often one kind of error was met, and the first of them.
type errorCount struct {
	Count  uint64 `json:"count"`
	Sample string `json:"sample"`
}

// granted counts a lock of the contended key that took wait to get. A negative part counts nothing.
func (t *tally) granted(part int, wait time.Duration) {
	if part >= 0 {
		t.parts[part].locks.Add(1)
		t.parts[part].waits.Record(wait)
	}
}

// held counts for how long somebody had the contended key.
func (t *tally) held(part int, d time.Duration) {
	if part >= 0 {
		t.parts[part].held.Add(int64(d))
	}
}

// grantedOwn counts a lock of a key that only this goroutine wants.
func (t *tally) grantedOwn(part int, wait time.Duration) {
	if part >= 0 {
		t.parts[part].own.Add(1)
		t.parts[part].ownWaits.Record(wait)
	}
}

// failed counts an error of op.
func (t *tally) failed(part int, op string, err error) {
	if part < 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	p := &t.parts[part]
	if p.errors == nil {
		p.errors = map[string]errorCount{}
	}
	addError(p.errors, kindOf(op, err), errorCount{1, err.Error()})
}

// checked counts what the register said to a holder.
func (t *tally) checked(err error) {
	switch {
	case err == nil:
	case errors.Is(err, errLost):
		t.lost.Add(1)
	default:
		t.violated(err)
	}
}

func (t *tally) violated(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.violations++
	if len(t.messages) < maxMessages {
		t.messages = append(t.messages, err.Error())
	}
}

// outcome is what one job did, in one process or in all.
type outcome struct {
	Parts      []*partOutcome  `json:"parts"`
	Clients    []clientOutcome `json:"clients"`
	Loads      uint64          `json:"loads"`
	Load       time.Duration   `json:"load_ns"`        // that they took, in all
	Took       []time.Duration `json:"took,omitempty"` // by the callers of a stampede that got the value
	Lost       uint64          `json:"lost"`
	Violations uint64          `json:"violations"`
	Messages   []string        `json:"messages"`
}

type partOutcome struct {
	Locks    uint64                `json:"locks"`
	Own      uint64                `json:"own"`
	Waits    *histogram.Histogram  `json:"waits"`
	OwnWaits *histogram.Histogram  `json:"own_waits"`
	Errors   map[string]errorCount `json:"errors"`
}

// clientOutcome is one client's part: its grants of the contended key, and what its Stats counted
// meanwhile.
type clientOutcome struct {
	Proc    int           `json:"proc"`    // process in which it ran
	Polling bool          `json:"polling"` // it received no notices
	Locks   uint64        `json:"locks"`
	Held    time.Duration `json:"held_ns"` // from grants to releases
	// of any goroutine, cut short by the end of the run or not
	LongestWait time.Duration `json:"longest_wait_ns"`
	Commands    uint64        `json:"commands"`
	Handoffs    uint64        `json:"handoffs"`
	Attempts    uint64        `json:"attempts"`
}

func newOutcome(parts int) *outcome {
	o := &outcome{}
	for range parts {
		o.Parts = append(o.Parts, &partOutcome{Waits: new(histogram.Histogram), OwnWaits: new(histogram.Histogram),
			Errors: map[string]errorCount{}})
	}
	return o
}

// addTally adds one client's tally. Nobody may write to it any more.
func (o *outcome) addTally(t *tally) {
	for i, p := range o.Parts {
		tp := &t.parts[i]
		p.add(&partOutcome{tp.locks.Load(), tp.own.Load(), &tp.waits, &tp.ownWaits, tp.errors})
	}
	o.Loads += t.loads.Load()
	o.Load += time.Duration(t.load.Load())
	o.Took = append(o.Took, t.took...)
	o.Lost += t.lost.Load()
	o.addViolations(t.violations, t.messages)
}

// merge adds what another process, or another miss, did.
func (o *outcome) merge(x *outcome) {
	for i, p := range o.Parts {
		p.add(x.Parts[i])
	}
	o.Clients = append(o.Clients, x.Clients...)
	o.Loads += x.Loads
	o.Load += x.Load
	o.Took = append(o.Took, x.Took...)
	o.Lost += x.Lost
	o.addViolations(x.Violations, x.Messages)
}

func (o *outcome) addViolations(n uint64, messages []string) {
	o.Violations += n
	o.Messages = append(o.Messages, messages...)
	o.Messages = o.Messages[:min(len(o.Messages), maxMessages)]
}

func (p *partOutcome) add(x *partOutcome) {
	p.Locks += x.Locks
	p.Own += x.Own
	p.Waits.Merge(x.Waits)
	p.OwnWaits.Merge(x.OwnWaits)
	for kind, e := range x.Errors {
		addError(p.Errors, kind, e)
	}
}

func addError(m map[string]errorCount, kind string, e errorCount) {
	sum := m[kind]
	sum.Count += e.Count
	if sum.Sample == "" {
		sum.Sample = e.Sample
	}
	m[kind] = sum
}

// totals adds the clients up.
func (o *outcome) totals() (sum clientOutcome) {
	for _, c := range o.Clients {
		sum.Locks += c.Locks
		sum.Commands += c.Commands
		sum.Handoffs += c.Handoffs
		sum.Attempts += c.Attempts
	}
	return sum
}
