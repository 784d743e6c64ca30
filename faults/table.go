//go:build linux

package main

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// printTable writes the verdicts as a Markdown table, the one in docs/guarantees.md.
func printTable(out io.Writer, verdicts []*verdict) {
	fmt.Fprintln(out, "| fault, times | locks granted before, during, after | tries that failed | locks lost while held | late writes refused | hot key: longest time without a new holder, then after the fault | two valid holders, token not risen, not linearizable |")
	fmt.Fprintln(out, "|---|---|---|---|---|---|---|")
	for _, v := range verdicts {
		fmt.Fprintf(out, "| %s, %d | %d, %d, %d | %s | %s | %d | %s, %s | %d, %d, %d |\n", v.scenario.name, v.faults,
			v.granted[before], v.granted[during], v.granted[after], cellOf(v.failed), cellOf(v.lost), v.refused,
			rounded(v.gap), rounded(v.back), len(v.overlaps), len(v.falls), len(v.illegal))
	}
}

func cellOf(m map[string]int) string {
	if len(m) == 0 {
		return "0"
	}
	return strings.Join(counted(m), "; ")
}

func rounded(d time.Duration) time.Duration { return d.Round(10 * time.Millisecond) }
