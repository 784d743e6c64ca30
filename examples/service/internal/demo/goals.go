package demo

import (
	"fmt"
	"strings"
	"time"
)

// This file holds the rows of flightlock against what the library promises.

// lookupTimeout is FetchOptions.LookupTimeout's default.
const lookupTimeout = time.Second

// goals says of each goal whether it was reached, as a list.
func (r *Report) goals() string {
	var b strings.Builder
	item := func(ok bool, format string, args ...any) {
		word := "reached"
		if !ok {
			word = "MISSED"
		}
		fmt.Fprintf(&b, "- %s: %s\n", word, fmt.Sprintf(format, args...))
	}
	for i := range r.Rows {
		row := &r.Rows[i]
		if row.Variant != "flightlock" || row.Skipped != "" {
			continue
		}
		item(row.safe(), "%s: nothing lost, nothing twice, one leader", row.Phase)
		switch row.Phase {
		case "steady", "rolling deploy", "processors busy", "one node stopped":
			item(row.Loads.Unlocked == 0, "%s: no load without a lock (%d)", row.Phase, row.Loads.Unlocked)
			item(len(row.Errors) == 0, "%s: no error (%s)", row.Phase, row.errorCell())
			if other := r.row(row.Phase, "singleflight"); other != nil {
				limit := other.P99 + 2*row.RoundTrip99
				item(row.P99 <= limit, "%s: p99 %s, singleflight's and two round trips (%s) %s", row.Phase, duration(row.P99),
					duration(row.RoundTrip99), duration(limit))
			}
		case "all nodes stopped":
			limit := lookupTimeout + r.Config.Latency*5/4
			item(row.HotP999 <= limit, "%s: p99.9 of hot keys after the first second %s, a lookup's timeout and a load %s (%d calls)",
				row.Phase, duration(row.HotP999), duration(limit), row.HotCalls)
		case "one process broken":
			item(len(row.Errors) == 0, "%s: the others' callers see no error (%s)", row.Phase, row.errorCell())
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
