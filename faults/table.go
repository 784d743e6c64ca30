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
	fmt.Fprintln(out, "| fault, times | locks granted before, during, after | tries that failed "+
		"| locks lost while held | late writes refused "+
		"| hot key: longest time without a new holder, then after the fault "+
		"| two valid holders, token not risen, not linearizable |")
	fmt.Fprintln(out, "|---|---|---|---|---|---|---|")
	for _, v := range verdicts {
		fmt.Fprintf(out, "| %s, %d | %d, %d, %d | %s | %s | %d | %s, %s | %d, %d, %d |\n", v.scenario.name,
			v.faults, v.granted[before], v.granted[during], v.granted[after], cellOf(v.failed), cellOf(v.lost),
			v.refused, rounded(v.gap), rounded(v.back), len(v.overlaps), len(v.falls), len(v.illegal))
	}
}

// cellOf lists what happened how often, and in parentheses, together, what nodes had answered.
func cellOf(m map[string]int) string {
	kinds, answers := map[string]int{}, map[string]int{}
	for what, n := range m {
		kind, said, _ := strings.Cut(strings.TrimSuffix(what, ")"), " (")
		kind, _, _ = strings.Cut(kind, ",") // the sentinel: that a ctx had ended is implied
		kinds[kind] += n
		if said != "" {
			for _, answer := range strings.Split(said, ", ") {
				answers[answer] += n
			}
		}
	}
	switch {
	case len(kinds) == 0:
		return "0"
	case len(answers) == 0:
		return strings.Join(counted(kinds), ", ")
	}
	return fmt.Sprintf("%s (%s)", strings.Join(counted(kinds), ", "), strings.Join(counted(answers), ", "))
}

func rounded(d time.Duration) time.Duration { return d.Round(10 * time.Millisecond) }
