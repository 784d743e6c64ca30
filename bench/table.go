package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// This file writes a report for people: plain text, columns aligned.

func writeTable(w io.Writer, r *report) {
	fmt.Fprintf(w, "flightlock bench: %s; %s in %s\n%s %s, %d CPUs\n\n",
		nodesText(r), plural(r.Clients, "client"), procsText(r), r.Go, r.System, r.CPUs)
	if r.Stampede != nil {
		writeStampede(w, r)
	}
	if r.HotKey != nil {
		writeHotKey(w, r)
	}
	if r.NodeDies != nil {
		writeNodeDies(w, r)
	}
	writeVerdict(w, r)
}

func nodesText(r *report) string {
	if r.Embedded {
		return plural(len(r.Nodes), "embedded node") + " (miniredis)"
	}
	return plural(len(r.Nodes), "node") + " (" + strings.Join(r.Nodes, ", ") + ")"
}

func procsText(r *report) string {
	if r.Procs == 0 {
		return "this process"
	}
	return plural(r.Procs, "process", "processes")
}

func writeStampede(w io.Writer, r *report) {
	fmt.Fprintf(w, "(a) stampede: %d clients x %s callers want one cold key at once; an origin load takes %v\n",
		r.Clients, count(uint64(r.Callers)), originTime)
	t := table{{"", "loads per miss", "p50", "p99", "max", "commands", "errors"}}
	misses := 0
	for _, s := range r.Stampede {
		misses = max(misses, s.Misses)
		t = append(t, []string{s.Way, number(s.LoadsPerMiss), duration(s.Callers.P50), duration(s.Callers.P99),
			duration(s.Callers.Max), number(s.Commands), count(errorSum(s.Errors))})
	}
	t.write(w)
	cache := "a map in this process, so that the figures show the lock and not the cache"
	if r.Procs > 0 {
		cache = "a key on the first node, because processes must share it; p50 and p99 contain its round trips"
	}
	fmt.Fprintf(w, "  %d misses each. The cache is %s.\n", misses, cache)
	fmt.Fprintln(w, "  Commands are those of the lock, per miss, client and node.")
	for _, s := range r.Stampede {
		writeErrors(w, s.Way+": ", s.Errors, s.Lost)
	}
	fmt.Fprintln(w)
}

func writeHotKey(w io.Writer, r *report) {
	h := r.HotKey
	fmt.Fprintf(w, "(b) hot key: %d clients x %d goroutines lock and release one key %s\n", r.Clients,
		r.Goroutines, workText(r.Work))
	table{
		{"locks/s", "p50 wait", "p99 wait", "max wait", "commands/lock", "handoffs", "longest gap"},
		{count(uint64(h.LocksPerSecond)), duration(h.Wait.P50), duration(h.Wait.P99), duration(h.Wait.Max),
			fmt.Sprintf("%.4f", h.CommandsPerLock), count(h.Handoffs), duration(h.LongestGap)},
	}.write(w)
	fmt.Fprintln(w,
		"  wait: from the call to the grant, p50 and p99 of granted calls, max of all calls; gap: a time without "+
			"a grant.")
	fmt.Fprintln(w)
	writeShares(w, h)
	fmt.Fprintf(w, "  Jain's fairness index of the holding times is %.3f; 1 means equal shares. "+
		"Clients that want one key take turns of\n"+
		"  HandoffSlice (20ms), in which they hand it over among their own callers; a client that is alone keeps "+
		"it.\n",
		h.Jain)
	if r.Polling > 0 {
		fmt.Fprintf(w, "  A client that polls receives no notices of release and tries every %v.\n", pollEvery)
	}
	writeErrors(w, "", h.Errors, h.Lost)
	fmt.Fprintln(w)
}

func workText(d time.Duration) string {
	if d == 0 {
		return "as fast as they can"
	}
	return fmt.Sprintf("with %v of work under it", d)
}

// writeShares shows what each process, or each client, got.
func writeShares(w io.Writer, h *hotKeyFigures) {
	t := table{{"", "locks", "share of locks", "share of holding time", "longest wait", "commands/lock"}}
	for _, s := range h.Shares {
		t = append(t, []string{s.title(), count(s.Locks), percent(s.ShareOfLocks), percent(s.ShareOfHolding),
			duration(s.LongestWait), fmt.Sprintf("%.4f", ratio(s.Commands, s.Locks))})
	}
	t.write(w)
}

// title names a sharer, and says if it polls.
func (s shareFigures) title() string {
	switch s.Polling {
	case 0:
		return s.Name
	case s.Clients:
		return s.Name + ", polling"
	}
	return fmt.Sprintf("%s, %d of %d clients polling", s.Name, s.Polling, s.Clients)
}

func writeNodeDies(w io.Writer, r *report) {
	fmt.Fprintf(w, "(c) one of %d nodes dies and comes back: "+
		"the hot key, beside goroutines with a key of their own each\n", len(r.Nodes))
	d := r.NodeDies
	if d.Skipped != "" {
		fmt.Fprintf(w, "  skipped: %s\n\n", d.Skipped)
		return
	}
	t := table{{""}, {"hot key: locks/s"}, {"  p50 wait"}, {"  p99 wait"}, {"  max wait"},
		{"  longest gap without a lock"},
		{"own keys: locks/s"}, {"  p50 wait"}, {"  p99 wait"}, {"  max wait"}, {"errors"}}
	for _, p := range d.Parts {
		cells := []string{p.Name, count(uint64(p.LocksPerSecond)), duration(p.Wait.P50), duration(p.Wait.P99),
			duration(p.Wait.Max),
			duration(p.LongestGap), count(uint64(p.OwnLocksPerSecond)), duration(p.OwnWait.P50),
			duration(p.OwnWait.P99), duration(p.OwnWait.Max), count(errorSum(p.Errors))}
		for i, c := range cells {
			t[i] = append(t[i], c)
		}
	}
	t.write(w)
	fmt.Fprintln(w, "  Dead means that a proxy in front of the node refuses connections and cuts the open ones.")
	for _, p := range d.Parts {
		writeErrors(w, p.Name+": ", p.Errors, 0)
	}
	writeErrors(w, "", nil, d.Lost)
	fmt.Fprintln(w)
}

func writeVerdict(w io.Writer, r *report) {
	if r.ViolationCount == 0 {
		checked := "checked: never two holders at once, every fence above the one before"
		if r.Stampede != nil {
			checked += ", one load per miss under the lock"
		}
		fmt.Fprintln(w, checked)
		return
	}
	fmt.Fprintf(w, "FAILED: %s\n", plural(int(r.ViolationCount), "broken promise"))
	for _, v := range r.Violations {
		fmt.Fprintln(w, "  "+v)
	}
	if more := r.ViolationCount - uint64(len(r.Violations)); more > 0 {
		fmt.Fprintf(w, "  ... and %s more\n", count(more))
	}
}

// writeErrors lists errors by kind, each with the first one met.
func writeErrors(w io.Writer, prefix string, errs map[string]errorCount, lost uint64) {
	for _, kind := range slices.Sorted(maps.Keys(errs)) {
		fmt.Fprintf(w, "  %s%s x %s, first: %s\n", prefix, count(errs[kind].Count), kind, errs[kind].Sample)
	}
	if lost > 0 {
		fmt.Fprintf(w, "  %s%s lost before release\n", prefix, plural(int(lost), "lock"))
	}
}

// table is rows of cells; the first row is the head. The first column is aligned left, the others right.
type table [][]string

func (t table) write(w io.Writer) {
	var widths []int
	for _, row := range t {
		for i, c := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], len([]rune(c)))
		}
	}
	for _, row := range t {
		line := " "
		for i, c := range row {
			pad := strings.Repeat(" ", widths[i]-len([]rune(c)))
			if i == 0 {
				line += " " + c + pad
			} else {
				line += "  " + pad + c
			}
		}
		fmt.Fprintln(w, strings.TrimRight(line, " "))
	}
}

// count writes 1234567 as 1,234,567.
func count(n uint64) string {
	s := strconv.FormatUint(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// number writes a mean, with a decimal place only if it needs one.
func number(f float64) string {
	if f == float64(uint64(f)) {
		return count(uint64(f))
	}
	return strconv.FormatFloat(f, 'f', 1, 64)
}

// duration keeps three digits.
func duration(d time.Duration) string {
	unit := time.Duration(1)
	for d/unit >= 1000 {
		unit *= 10
	}
	return d.Round(unit).String()
}

// plural writes "1 client" and "4 clients"; the plural is the singular with an s unless it is given.
func plural(n int, word ...string) string {
	form := word[0]
	if n != 1 {
		form += "s"
		if len(word) > 1 {
			form = word[1]
		}
	}
	return count(uint64(n)) + " " + form
}

func errorSum(errs map[string]errorCount) (n uint64) {
	for _, e := range errs {
		n += e.Count
	}
	return n
}

func percent(share float64) string { return fmt.Sprintf("%.1f%%", 100*share) }
