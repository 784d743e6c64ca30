package demo

import (
	"fmt"
	"strings"
	"time"
)

// This file holds the rows of a variant against what flightlock promises.

// weather is what a phase leaves intact, and what must be so therefore.
type weather uint8

const (
	// answered: nothing that a caller needs has failed, so none sees an error.
	answered weather = 1 << iota
	// locked: a majority of nodes answers, the cache does, and no load fails; so no load is without a lock.
	locked
	// kept: what was loaded is in the cache, so there is one load per miss.
	kept
	// prompt: nothing in the way is slow, so the 99th percentile is that of singleflight alone and two round
	// trips.
	prompt
	// sluggish: the cache's server is slow on purpose.
	sluggish

	fine = answered | locked | kept
)

// nodeTimeout is flightlock's Options.NodeTimeout by default.
const nodeTimeout = 50 * time.Millisecond

// slow reports whether the servers took longer than a node may: the cache's, or, where a majority of nodes
// should answer, so many nodes at some time that there may have been none. Then they are not well, on a
// machine that has too much else to do, and who takes them for dead is right.
func (r *Row) slow() bool {
	return r.weather&sluggish == 0 && r.RoundTrip99 > nodeTimeout ||
		r.weather&locked != 0 && r.NodesMax > nodeTimeout
}

// Slow names the phases of a variant in which the servers were too slow for its counts of loads and errors to
// mean anything.
func (r *Report) Slow(variant string) (phases []string) {
	for i := range r.Rows {
		if row := &r.Rows[i]; row.Variant == variant && row.weather != 0 && row.slow() {
			phases = append(phases, fmt.Sprintf("%s (%s)", row.Phase, duration(max(row.RoundTrip99, row.NodesMax))))
		}
	}
	return phases
}

// faults are the counts that break a promise, in words. They are no matter of time: on a machine that is slow
// they must be none as well.
func (r *Row) faults() (faults []string) {
	fault := func(broken bool, format string, args ...any) {
		if broken {
			faults = append(faults, r.Phase+": "+fmt.Sprintf(format, args...))
		}
	}
	fault(r.MoneyLost != 0, "money lost: %d", r.MoneyLost)
	fault(r.Unpaid != 0, "transfers answered 200 that the ledger does not have: %d", r.Unpaid)
	fault(r.Twice != 0, "ticks started twice: %d", r.Twice)
	fault(r.Never != 0, "ticks not started: %d", r.Never)
	fault(r.Leaders > 1, "leaders at once: %d", r.Leaders)
	if r.slow() {
		return faults
	}
	fault(r.weather&answered != 0 && len(r.Errors) != 0, "errors: %s", errorText(r.Errors))
	fault(r.weather&locked != 0 && r.Unlocked != 0,
		"loads without a lock: %d of %d", r.Unlocked, r.Loads.Loads)
	fault(r.weather&kept != 0 && r.Loads.Loads != r.Loads.First, "%d loads of %d misses", r.Loads.Loads,
		r.Loads.First)
	return faults
}

// Faults are the counts of a variant that break what flightlock promises, one line each.
func (r *Report) Faults(variant string) (faults []string) {
	for i := range r.Rows {
		if row := &r.Rows[i]; row.Variant == variant && row.Skipped == "" {
			faults = append(faults, row.faults()...)
		}
	}
	return faults
}

// goals says what was missed by flightlock, and how its latencies compare.
func (r *Report) goals() string {
	var b strings.Builder
	item := func(ok bool, format string, args ...any) {
		word := "reached"
		if !ok {
			word = "MISSED"
		}
		fmt.Fprintf(&b, "- %s: %s\n", word, fmt.Sprintf(format, args...))
	}
	if strings.Contains(r.Servers, "embedded") {
		b.WriteString("Embedded nodes are slower than NodeTimeout when there is much to do; real ones are not.\n\n")
	}
	if slow := r.Slow("flightlock"); len(slow) > 0 {
		fmt.Fprintf(&b,
			"- not looked at for loads and errors, since the servers were slower than NodeTimeout "+
				"(p99 of a PING to the cache, the longest to the node in the middle): %s\n",
			strings.Join(slow, ", "))
	}
	faults := r.Faults("flightlock")
	for _, f := range faults {
		item(false, "%s", f)
	}
	if len(faults) == 0 {
		item(true, "all counts: nothing lost, nothing twice, one leader, one load per miss, "+
			"no load without a lock, no errors, wherever that is promised")
	}
	for i := range r.Rows {
		row := &r.Rows[i]
		if row.Variant != "flightlock" || row.Skipped != "" {
			continue
		}
		if other := r.row(row.Phase, "singleflight"); row.weather&prompt != 0 && other != nil {
			// A page is a miss of its own and then one of its items: twice as many round trips.
			for _, of := range []struct {
				name       string
				ours, bare time.Duration
				trips      time.Duration
			}{{"items", row.ItemP99, other.ItemP99, 2}, {"pages", row.PageP99, other.PageP99, 4}} {
				item(of.ours <= of.bare+of.trips*row.RoundTrip99,
					"%s: p99 of %s %s; singleflight's %s and %d round trips of %s (p99 of a PING meanwhile)",
					row.Phase, of.name, duration(of.ours), duration(of.bare), of.trips, duration(row.RoundTrip99))
			}
		}
		if row.HotCalls > 0 && row.weather&locked == 0 {
			limit := 2*r.Config.Latency*5/4 + 4*row.RoundTrip99
			item(row.HotP999 <= limit,
				"%s: p99.9 of hot keys after the first second %s (%d calls); two loads and four round trips of %s are %s",
				row.Phase, duration(row.HotP999), row.HotCalls, duration(row.RoundTrip99), duration(limit))
		}
	}
	return b.String()
}

// row is the row of a phase and a variant, nil if it was not played.
func (r *Report) row(phase, variant string) *Row {
	for i := range r.Rows {
		if row := &r.Rows[i]; row.Phase == phase && row.Variant == variant && row.Skipped == "" {
			return row
		}
	}
	return nil
}
