package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// writeReport turns the raw figures into RESULTS.md, the plots and the README's table, and prints
// the tables.
func writeReport(cfg config, w io.Writer) error {
	envs, records, err := readRaw(cfg.rawPath())
	if err != nil {
		return err
	}
	if len(records) == 0 {
		return fmt.Errorf("%s holds no figures", cfg.rawPath())
	}
	s := summarize(records)
	text := results(envs, s)
	if _, err := io.WriteString(w, text); err != nil {
		return err
	}
	if err := writePlots(cfg.out, s); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(cfg.out, "RESULTS.md"), []byte(text), 0o644); err != nil {
		return err
	}
	if cfg.readme == "" {
		return nil
	}
	return writeReadme(cfg.readme, envs, s)
}

// results is RESULTS.md.
func results(envs []environment, s summary) string {
	var b strings.Builder
	b.WriteString("# flightlock and its rivals, side by side\n\n")
	b.WriteString("Written by `make compare`; do not edit. How it is measured stands at the end.\n\n")
	b.WriteString(surroundings(envs, s))
	b.WriteString("\n## Goals\n\n" + goalsTable(s))
	b.WriteString("\n## Plots\n\n")
	for _, p := range plots {
		fmt.Fprintf(&b, "![%s](%s)\n\n", p.title, p.file)
	}
	all := allBouts(fullPace)
	for _, group := range groupsOf(all) {
		b.WriteString(groupSection(group, all, s))
	}
	b.WriteString(method())
	return b.String()
}

// surroundings says where, with what and when.
func surroundings(envs []environment, s summary) string {
	if len(envs) == 0 {
		return ""
	}
	e := envs[len(envs)-1]
	quick := ""
	if slices.ContainsFunc(envs, func(e environment) bool { return e.Quick }) {
		quick = " With QUICK=1: loads of a fifth of the time, so read no more into it than the order of magnitude."
	}
	const day = "2006-01-02 "
	from, to := envs[0].At.Format(day+"15:04"), e.last.Format("15:04 MST")
	if today := e.last.Format(day); today != envs[0].At.Format(day) {
		to = today + to
	}
	return fmt.Sprintf("%s; %s; %s; %s; %s to %s. Medians of %s rounds; all servers and all clients on this "+
		"machine.%s\n",
		e.Machine, e.Server, e.Go, strings.Join(e.Versions, ", "), from, to, roundsOf(s), quick)
}

// roundsOf is the number of rounds, or how it varies.
func roundsOf(s summary) string {
	least, most := math.MaxInt, 0
	for _, rivals := range s {
		for _, m := range rivals {
			least, most = min(least, m.rounds+m.failed), max(most, m.rounds+m.failed)
		}
	}
	if least == most {
		return fmt.Sprint(most)
	}
	return fmt.Sprintf("%d to %d", least, most)
}

func goalsTable(s summary) string {
	rows := [][]string{{"load", "goal", "measured", ""}}
	for _, g := range goals {
		text, reached, known := g.got(s)
		verdict := "**not reached**"
		switch {
		case !known:
			text, verdict = "", "not measured"
		case reached:
			verdict = "reached"
		}
		rows = append(rows, []string{g.load, g.want, text, verdict})
	}
	return markdown(rows)
}

// columns of the tables. Those that a group has no figures for are left out.
var columns = []struct {
	head   string
	figure string
	show   func(float64) string
}{
	{"locks/s", "locks_s", short},
	{"p50", "p50_us", span},
	{"p99", "p99_us", span},
	{"p99.9", "p999_us", span},
	{"longest", "max_us", span},
	{"loads", "loads", short},
	{"loads per key", "loads_key", short},
	{"loads per process", "bulk_proc", short},
	{"commands per key", "commands_key", short},
	{"bytes sent", "sent", short},
	{"bytes received", "received", short},
	{"stale values", "stale", short},
	{"Gets", "reads", short},
	{"changes", "changes", short},
	{"loads", "value_loads", short},
	{"commands", "commands", short},
	{"without a command", "reused", short},
	{"recalled", "recalled", short},
	{"server CPU", "server_us", span},
	{"client CPU", "client_us", span},
	{"allocations", "allocs", short},
	{"Jain, goroutines", "jain", short},
	{"Jain, processes", "jain_procs", short},
	{"bytes each", "bytes_waiter", short},
	{"bytes each", "bytes_lock", short},
	{"goroutines each", "goroutines_lock", short},
	{"% of a core", "cpu_percent", short},
	{"failed", "failures", short},
}

// hiddenIn says which columns mean nothing for a kind of load.
func hiddenIn(k kind, figure string) bool {
	switch figure {
	case "locks_s":
		return k == handover || k == open || k == stampede || k == coldKeys || k == invalidation ||
			k == waiters || k == holding
	case "client_us", "allocs":
		return k == waiters || k == holding || k == coldKeys || k == invalidation
	case "commands", "server_us":
		return k == handover && figure == "server_us"
	}
	return false
}

func groupSection(group string, all []bout, s summary) string {
	var b strings.Builder
	for _, bt := range all {
		if bt.Group != group || s[bt.id()] == nil {
			continue
		}
		if b.Len() == 0 {
			fmt.Fprintf(&b, "\n## %s\n", strings.ToUpper(group[:1])+group[1:])
			if text := notes[group]; text != "" {
				fmt.Fprintf(&b, "\n%s\n", text)
			}
		}
		fmt.Fprintf(&b, "\n%s\n\n%s", bt.id(), boutTable(bt, s))
	}
	return b.String()
}

func boutTable(bt bout, s summary) string {
	head := []string{"", "flightlock is"}
	if !slices.Contains(bt.Rivals, nameOurs) {
		head = head[:1]
	}
	var shown []int
	for i, c := range columns {
		if hiddenIn(bt.Load.Kind, c.figure) {
			continue
		}
		some := func(rival string) bool {
			v := s.get(bt.id(), rival, c.figure)
			return !math.IsNaN(v) && (v != 0 || c.figure != "failures")
		}
		if slices.ContainsFunc(bt.Rivals, some) {
			shown, head = append(shown, i), append(head, c.head)
		}
	}
	rows := [][]string{head}
	for _, name := range bt.Rivals {
		m := s[bt.id()][name]
		if m == nil {
			continue
		}
		row := []string{name, ratioTo(bt, s, name)}[:len(head)-len(shown)]
		for _, i := range shown {
			row = append(row, columns[i].show(s.get(bt.id(), name, columns[i].figure)))
		}
		if m.rounds == 0 {
			row[0] += " failed: " + m.error
		}
		rows = append(rows, row)
	}
	return markdown(rows)
}

// ratioTo says how many times faster flightlock is than the rival, by what the load is about.
func ratioTo(bt bout, s summary, rival string) string {
	figure, less := "locks_s", false
	switch bt.Load.Kind {
	case handover, stampede:
		figure, less = "p50_us", true
	case open, coldKeys:
		figure, less = "p99_us", true
	case invalidation:
		return ""
	case waiters:
		figure, less = "bytes_waiter", true
	case holding:
		figure, less = "bytes_lock", true
	}
	us, them := s.get(bt.id(), nameOurs, figure), s.get(bt.id(), rival, figure)
	if rival == nameOurs || math.IsNaN(us/them) {
		return ""
	}
	if less {
		us, them = them, us
	}
	return ratioText(us/them) + " " + map[string]string{
		"locks_s": "as fast", "p50_us": "as fast (p50)", "p99_us": "as fast (p99)",
		"bytes_waiter": "as small", "bytes_lock": "as small",
	}[figure]
}

// notes say what a group's figures mean, where that is not plain.
var notes = map[string]string{
	"hot key": "Rivals that poll at long intervals are fast here by starving: one goroutine takes the lock " +
		"again before anybody else looks (Jain near 1/1000), the others wait until the end. Waits that the end " +
		"cut short count with what they were, so the rivals' p99 is at most the length of the load.",
	"one caller per process": "Each lock goes from one process to another. On 3 nodes rueidislock takes 3 " +
		"keys of one server. `raw` is no lock, but what handing over costs at best, and `raw-goredis` what it " +
		"costs over go-redis.",
	"limits": "No waits are noted and no work is done, so that nothing but lock and release is measured. The " +
		"semaphore and the mutex lock in the memory of one process.",
	"linger": "Keys that one process uses again and again, with the lease retained in between and without; " +
		"beside the rivals where they can take part. `recalled` is how many retained leases another process has " +
		"wanted, per lock. With an affinity of 90%, nine locks of ten are of a key that no other process wants " +
		"more than now and then. No waits are noted with one goroutine, and with a key each.",
	"open": "Callers come at random times whether the earlier ones have got their lock or not, and wait from " +
		"the time they should have come.",
	"handover": "From the release in one process to the lock in another that has waited for 10 to 20 ms.",
	"stampede": "p50 and p99 of the time until a caller has the value. All but flightlock, which is Fetch, " +
		"are the loop that people write by hand, singleflight around look, lock, look, load; `singleflight` is " +
		"that without a lock: every process loads. Loads are per cold key.",
	"cold keys": "p50 and p99 of the time until a caller has all its values. Loads per key are those of all " +
		"processes together: 1 is each key once. Loads per process are calls, of one key or of many. sturdyc has " +
		"values in each process, and no Redis. Bytes are those to and from the server, of all processes, per key.",
	"invalidation": "Each process changes values, invalidates them, and announces that. A Get is stale if it " +
		"began after the announcement and returned what had been loaded before the change. p50 and p99 are of a " +
		"Get. Bytes are those to and from the server, for all that a cache does, the changes as well, per Get.",
	"one of five stopped": "The node stops (SIGSTOP) right before the load. Calls that are under way at the " +
		"end are waited for and count.",
	"held": "A lock is refreshed every 10 s; ttl 30 s. CPU and memory of the client. rueidislock extends by " +
		"itself, at the same interval.",
	"waiters": "Memory (heap and stacks) and CPU of the client, while so many goroutines wait for a lock that " +
		"is held.",
	"delays": "How the delay between tries was found for the rivals that poll. On the hot key longer delays " +
		"give more locks per second, to ever fewer goroutines (Jain); at a hand-over short ones find the lock " +
		"sooner. The loads above give them 150ms on the hot key and 200µs at a hand-over, in a stampede and by " +
		"hand, where one caller per process polls.",
}

// method is how it is measured.
func method() string {
	var b strings.Builder
	b.WriteString("\n## How it is measured\n\n")
	for _, r := range rivals {
		fmt.Fprintf(&b, "- `%s`: %s.\n", r.name, r.about)
	}
	fmt.Fprintf(&b, "\nTTL %v; %v per node and request, for flightlock, redsync and rueidislock alike; %d "+
		"connections at most per node for those over go-redis. Every rival does every load in fresh processes, on "+
		"servers flushed before, after a warm-up of %v (and as much again for every 8 processes); rivals take "+
		"turns "+
		"within a round, beginning with another one each time. Where `nodes` are more than one, redislock cannot "+
		"take "+
		"part, and rueidislock does an easier job.\n\n"+
		"Commands are those that clients send, subscriptions and connects included; server CPU is of all servers "+
		"together, client CPU of all processes, each per lock. Histograms are HDR, with 3 significant figures. In "+
		"closed loads (a fixed number of goroutines that lock, work and release) a wait is that of one call; "+
		"`open` "+
		"and `stampede` count from the time at which a caller should have come.\n", ttl, nodeTimeout, poolSize,
		warmTime)
	return b.String()
}

// The marks in README.md between which the table stands.
const (
	readmeBegin = "<!-- written by make compare: begin -->"
	readmeEnd   = "<!-- end -->"
)

// headline are the bouts of the README's table.
var headline = []struct {
	bout, text, figure string
	less               bool
}{
	{hot1, "hot key, 1,000 goroutines, 1 node: locks/s", "locks_s", false},
	{hot3, "... 3 nodes", "locks_s", false},
	{hot1, "... 1 node: p99 of the wait", "p99_us", true},
	{fourProcs, "hot key, 4 processes x 100 goroutines: locks/s", "locks_s", false},
	{"zipf, 10000 keys, 1000 goroutines, 1 node",
		"10,000 keys by Zipf's law, 1,000 goroutines: locks/s", "locks_s", false},
	{"distinct keys, 1000 goroutines, 1 node", "a key each, 1,000 goroutines, 1 node: locks/s", "locks_s",
		false}, {"distinct keys, 1000 goroutines, 3 nodes", "... 3 nodes", "locks_s", false},
	{"distinct keys, 1000 goroutines, 5 nodes", "... 5 nodes", "locks_s", false},
	{"uncontended, 1 node", "uncontended, 1 goroutine, 1 node: locks/s", "locks_s", false},
	{"uncontended, 3 nodes", "... 3 nodes", "locks_s", false},
	{"uncontended, 5 nodes", "... 5 nodes", "locks_s", false},
	{"handover, 1 node", "hand-over between processes, 1 node: p50", "p50_us", true},
	{stoppedFifty, "one of five nodes stopped, 50 goroutines: locks/s", "locks_s", false},
	{heldLocks, "100,000 locks held and refreshed: bytes each", "bytes_lock", true},
	{heldLocks, "... % of one core", "cpu_percent", true},
}

// readmeTable shows flightlock beside everybody.
func readmeTable(envs []environment, s summary) string {
	rows := [][]string{append([]string{"load"}, withByHand...)}
	for _, h := range headline {
		row := []string{h.text}
		for _, name := range withByHand {
			v := s.get(h.bout, name, h.figure)
			text := short(v)
			if strings.HasSuffix(h.figure, "_us") {
				text = span(v)
			}
			if name == leader(s, h.bout, h.figure, h.less) {
				text = "**" + text + "**"
			}
			row = append(row, text)
		}
		rows = append(rows, row)
	}
	return surroundings(envs, s) + "\n" + markdown(rows)
}

// leader is who has the best median of all.
func leader(s summary, bout, figure string, less bool) string {
	best, v := s.best(bout, figure, less, withByHand)
	if us := s.get(bout, nameOurs, figure); us == v || (us < v) == less {
		return nameOurs
	}
	return best
}

func writeReadme(path string, envs []environment, s summary) error {
	old, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, ok1 := bytes.Cut(old, []byte(readmeBegin))
	_, after, ok2 := bytes.Cut(rest, []byte(readmeEnd))
	if !ok1 || !ok2 {
		return errors.New(path + " has no marks for the table")
	}
	text := slices.Concat(before, []byte(readmeBegin+"\n"+readmeTable(envs, s)+readmeEnd), after)
	return os.WriteFile(path, text, 0o644)
}
