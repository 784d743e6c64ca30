package main

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// goal is one line of what this library wants to reach. Whether it did is computed from the medians.
type goal struct {
	load, want string
	// got says what was measured; known is false if it was not.
	got func(s summary) (text string, reached, known bool)
}

var everybody = withByHand

const (
	hot1, hot3       = "hot key, 1000 goroutines, 1 node", "hot key, 1000 goroutines, 3 nodes"
	limits1, limits3 = "limits, 1000 goroutines, 1 node", "limits, 1000 goroutines, 3 nodes"
	fourProcs        = "hot key over processes, 4 processes x 100, 1 node"
	stoppedFifty     = "one of five stopped, 50 goroutines, 5 nodes"
	openHot          = "open, one key, 2000 arrivals/s, 20µs of work, 1 node"
	delayed1         = "handover, 1ms more each way, 1 node"
	delayed3         = "handover, 1ms more each way, 3 nodes"
	heldLocks        = "held, 100000 locks, 1 node"
	cold             = "cold keys, 4 processes x 250 callers, each 100 of 1000 keys, a load takes 20ms, 1 node"
	invalidated      = "invalidation, 4 processes x 50 callers, 20 keys, a load takes 20ms, one in ten 200ms, " +
		"1 node"
)

var goals = slices.Concat(goalsOfMany, goalsOfOneEach())

var goalsOfMany = []goal{
	{hot1, "150x the best rival's locks/s", fairly("jain", hot1, times(hot1, 150, everybody...))},
	{hot3, "150x the best rival's locks/s", fairly("jain", hot3, times(hot3, 150, everybody...))},
	{hot1, "p99 of the wait 1/300 of the best rival's", part("p99_us", hot1, 1./300, everybody...)},
	{hot3, "p99 of the wait 1/300 of the best rival's", part("p99_us", hot3, 1./300, everybody...)},
	{limits1, "1.5x the ns per lock of semaphore.Weighted(1)", times(limits1, 1/1.5, nameSemaphore)},
	{limits3, "1.5x the ns per lock of semaphore.Weighted(1)", times(limits3, 1/1.5, nameSemaphore)},
	{fourProcs, "100x the best rival's locks/s", fairly("jain_procs", fourProcs,
		times(fourProcs, 100, everybody...))},
	{fourProcs, "Jain's index of the processes 0.98", atLeast("jain_procs", fourProcs, 0.98)},
	{"distinct keys, 1000 goroutines, 1 node", "1.5x rueidislock",
		times("distinct keys, 1000 goroutines, 1 node", 1.5, nameRueidis)},
	{"distinct keys, 1000 goroutines, 1 node", "3x redislock",
		times("distinct keys, 1000 goroutines, 1 node", 3, nameRedislock)},
	{"distinct keys, 1000 goroutines, 3 nodes", "5x redsync, its better setting",
		times("distinct keys, 1000 goroutines, 3 nodes", 5, nameRedsync, nameFailFast)},
	{"distinct keys, 1000 goroutines, 5 nodes", "5x redsync, its better setting",
		times("distinct keys, 1000 goroutines, 5 nodes", 5, nameRedsync, nameFailFast)},
	{"uncontended, 1 node", "1.0x the best rival's locks/s", times("uncontended, 1 node", 1, everybody...)},
	{"uncontended, 3 nodes", "1.1x redsync, its better setting",
		times("uncontended, 3 nodes", 1.1, nameRedsync, nameFailFast)},
	{"uncontended, 5 nodes", "1.1x redsync, its better setting",
		times("uncontended, 5 nodes", 1.1, nameRedsync, nameFailFast)},
	{"handover, 1 node", "0.8x rueidislock's median", part("p50_us", "handover, 1 node", 0.8, nameRueidis)},
	{delayed1, "median of 1.25 round trips", roundTrips(delayed1, 1.25)},
	{delayed3, "median of 1.5 round trips", roundTrips(delayed3, 1.5)},
	{stoppedFifty, "2x redsync fail-fast", times(stoppedFifty, 2, nameFailFast)},
	{heldLocks, "below 10% of one core", below("cpu_percent", heldLocks, 10)},
	{heldLocks, "below 1 KiB each", below("bytes_lock", heldLocks, 1024)},
	{heldLocks, "no goroutine each", below("goroutines_lock", heldLocks, 0.001)},
	{cold, "every key loaded once", below("loads_key", cold, 1.0001)},
	{cold, "p99 at most 2x that of sturdyc", part("p99_us", cold, 2, nameSturdyc)},
	{invalidated, "no stale value", below("stale", invalidated, 0.5)},
}

// goalsOfOneEach are those of one caller per process.
func goalsOfOneEach() (all []goal) {
	for _, g := range []struct {
		nodes int
		work  time.Duration
		want  []float64
	}{
		{1, works[0], []float64{1.3, 1.3, 1.8, 5}},
		{1, works[1], []float64{1.2, 1.2, 1.5, 3.5}},
		{3, works[0], []float64{0.8, 1, 1.5, 4}},
		{3, works[1], []float64{0.8, 0.8, 1.3, 2.8}},
	} {
		for i, procs := range crowds {
			us, them := oneEach(procs, g.nodes, g.work).id(), oneEach(procs, 1, g.work).id()
			all = append(all, goal{
				us, fmt.Sprintf("%vx rueidislock on one server", g.want[i]),
				timesThat(us, g.want[i], them, nameRueidis),
			})
		}
	}
	return all
}

// timesThat wants at least want times the locks per second of a rival in another load.
func timesThat(us string, want float64, them, rival string) func(summary) (string, bool, bool) {
	return func(s summary) (string, bool, bool) {
		we, they := s.get(us, nameOurs, "locks_s"), s.get(them, rival, "locks_s")
		text := fmt.Sprintf("%s: %s against %s", ratioText(we/they), short(we), short(they))
		return text, we/they >= want, !math.IsNaN(we / they)
	}
}

// times wants at least want times the locks per second of the best of the rivals.
func times(bout string, want float64, rivals ...string) func(summary) (string, bool, bool) {
	return func(s summary) (string, bool, bool) {
		us := s.get(bout, nameOurs, "locks_s")
		name, them := s.best(bout, "locks_s", false, rivals)
		ratio := us / them
		text := fmt.Sprintf("%s: %s against %s of %s", ratioText(ratio), short(us), short(them), name)
		if want < 1 { // said as a price: ns per lock
			text = fmt.Sprintf("%s: %s ns against %s ns of %s", ratioText(1/ratio), short(1e9/us), short(1e9/them),
				name)
		}
		return text, ratio >= want, !math.IsNaN(ratio)
	}
}

// fairly adds how we stand to the best of the rivals that do not starve most of those who want the
// key. The goal is about all of them.
func fairly(jain, bout string, got func(summary) (string, bool, bool)) func(summary) (string, bool, bool) {
	return func(s summary) (string, bool, bool) {
		text, reached, known := got(s)
		var fair []string
		for _, n := range everybody {
			if s.get(bout, n, jain) >= fairIndex {
				fair = append(fair, n)
			}
		}
		name, them := s.best(bout, "locks_s", false, fair)
		if name == "" {
			return fmt.Sprintf("%s; no rival has a Jain index of %v", text, fairIndex), reached, known
		}
		return fmt.Sprintf("%s; %s the best with a Jain index of %v, %s of %s",
			text, ratioText(s.get(bout, nameOurs, "locks_s")/them), fairIndex, short(them), name), reached, known
	}
}

// fairIndex is what half of those who share get, if they share evenly and the others get nothing.
const fairIndex = 0.5

// part wants at most want times the best of the rivals, where less is better.
func part(figure, bout string, want float64, rivals ...string) func(summary) (string, bool, bool) {
	return func(s summary) (string, bool, bool) {
		us := s.get(bout, nameOurs, figure)
		name, them := s.best(bout, figure, true, rivals)
		ratio := us / them
		shown := ratioText(ratio)
		if want < 0.1 {
			shown = "1/" + short(1/ratio)
		}
		return fmt.Sprintf("%s: %s against %s of %s", shown, span(us), span(them), name), ratio <= want,
			!math.IsNaN(ratio)
	}
}

// roundTrips wants a median of at most want round trips to a node.
func roundTrips(bout string, want float64) func(summary) (string, bool, bool) {
	return func(s summary) (string, bool, bool) {
		us, trip := s.get(bout, nameOurs, "p50_us"), s.get(bout, nameOurs, "round_trip_us")
		text := fmt.Sprintf("%s: %s, a round trip %s", short(us/trip), span(us), span(trip))
		return text, us/trip <= want, !math.IsNaN(us / trip)
	}
}

func atLeast(figure, bout string, want float64) func(summary) (string, bool, bool) {
	return func(s summary) (string, bool, bool) {
		v := s.get(bout, nameOurs, figure)
		return fmt.Sprintf("%.3f", v), v >= want, !math.IsNaN(v)
	}
}

func below(figure, bout string, limit float64) func(summary) (string, bool, bool) {
	return func(s summary) (string, bool, bool) {
		v := s.get(bout, nameOurs, figure)
		return short(v), v < limit, !math.IsNaN(v)
	}
}

func ratioText(r float64) string { return short(r) + "x" }
