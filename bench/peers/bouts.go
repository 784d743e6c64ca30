package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// bout is one load, that some rivals do one after the other.
type bout struct {
	Group  string // of bouts that belong together: what -only names
	Detail string // what tells it from others of its group
	Nodes  int
	Procs  int
	Load   load
	TTL    time.Duration
	Rivals []string

	Delay    time.Duration // between tries; 0: the best that is known
	Linger   time.Duration // how long leases are retained
	Proxied  bool          // all nodes are behind proxies
	RTT      time.Duration // that the proxies add to a round trip
	SlowBy   time.Duration // what is added for the last node only
	Stopped  bool          // the last node does not answer
	Episodes int           // of a stampede, and of cold keys
	Fresh    time.Duration // of a value in a cache
}

// ofCaches says that it is about caches, and no locks.
func (b bout) ofCaches() bool { return b.Load.Kind == coldKeys || b.Load.Kind == invalidation }

// id names the bout in the raw figures.
func (b bout) id() string {
	id := b.Group
	if b.Detail != "" {
		id += ", " + b.Detail
	}
	if b.Nodes == 1 {
		return id + ", 1 node"
	}
	return fmt.Sprintf("%s, %d nodes", id, b.Nodes)
}

// The rivals that can take part in a load.
var (
	onOneNode   = []string{nameOurs, nameRedsync, nameFailFast, nameRedislock, nameRueidis}
	onSomeNodes = []string{nameOurs, nameRedsync, nameFailFast, nameRueidis}
	withByHand  = append(slices.Clone(onOneNode), nameByHand)
	someByHand  = append(slices.Clone(onSomeNodes), nameByHand)
	// what rueidislock does on one server does not compare
	onlyMajority = []string{nameOurs, nameRedsync, nameFailFast}
	alternating  = []string{nameOurs, nameAsync, nameRedsync, nameFailFast}
)

func byNodes(n int, one, some []string) []string {
	if n == 1 {
		return one
	}
	return some
}

// pace says how long loads are measured.
type pace struct {
	window   time.Duration // of most
	long     time.Duration // of those in which somebody's turn comes rarely
	hot      time.Duration // of one key that a thousand want: some wait for more than a second
	held     int           // locks that are held
	refresh  time.Duration // how long they are held: a refresh each
	affinity time.Duration // of keys that come again after seconds
	reuse    time.Duration // of a lock that is used again every 10 ms
	bursts   int           // of cold keys
}

var (
	fullPace = pace{
		window: 700 * time.Millisecond, long: time.Second, hot: 1500 * time.Millisecond,
		held: 100_000, refresh: 10 * time.Second, affinity: 5 * time.Second, reuse: time.Minute, bursts: 3,
	}
	quickPace = pace{
		window: 120 * time.Millisecond, long: 200 * time.Millisecond, hot: 250 * time.Millisecond,
		held: 100_000, refresh: 10 * time.Second, affinity: 400 * time.Millisecond, reuse: 2 * time.Second,
		bursts: 1,
	}
)

const heldTTL = 30 * time.Second

// allBouts is everything that `make compare` runs.
func allBouts(p pace) (all []bout) {
	add := func(b bout) {
		b.Procs = max(b.Procs, 1)
		if b.TTL == 0 {
			b.TTL = ttl
		}
		if b.Load.Window == 0 {
			b.Load.Window = p.window
		}
		all = append(all, b)
	}
	for _, n := range []int{1, 3, 5} {
		add(bout{Group: "uncontended", Nodes: n, Rivals: byNodes(n, onOneNode, onSomeNodes),
			Load: load{Kind: closed, Goroutines: 1}})
	}
	for _, n := range []int{1, 3, 5} {
		add(bout{Group: "distinct keys", Detail: "1000 goroutines", Nodes: n,
			Rivals: byNodes(n, onOneNode, onSomeNodes),
			Load:   load{Kind: closed, Goroutines: 1000}})
	}
	hot := func(detail string, n, goroutines int, work time.Duration) bout {
		return bout{Group: "hot key", Detail: detail, Nodes: n, Rivals: byNodes(n, withByHand, someByHand),
			Load: load{Kind: closed, Goroutines: goroutines, Keys: 1, Work: work, Window: p.hot}}
	}
	for _, n := range []int{1, 3, 5} {
		add(hot("1000 goroutines", n, 1000, 0))
	}
	for _, work := range []time.Duration{20 * time.Microsecond, time.Millisecond} {
		b := hot(fmt.Sprintf("1000 goroutines, %v of work", work), 1, 1000, work)
		b.Load.Window = p.long
		add(b)
	}
	for _, g := range []int{1, 10, 100} {
		b := hot(goroutinesText(g), 1, g, 0)
		b.Group, b.Load.Window = "hot key by goroutines", p.window
		add(b)
	}
	for _, n := range []int{1, 3} {
		add(bout{Group: "limits", Detail: "1000 goroutines", Nodes: n,
			Rivals: []string{nameOurs, nameSemaphore, nameMutex},
			Load:   load{Kind: closed, Goroutines: 1000, Keys: 1, Bare: true}})
	}
	for _, procs := range []int{4, 16} {
		goroutines := 400 / procs
		b := hot(fmt.Sprintf("%d processes x %d", procs, goroutines), 1, goroutines, 0)
		b.Group, b.Procs = "hot key over processes", procs
		add(b)
	}
	addOneEach(add, p)
	addLatencies(add, p)
	add(bout{Group: "zipf", Detail: "10000 keys, 1000 goroutines", Nodes: 1, Rivals: withByHand,
		Load: load{Kind: closed, Goroutines: 1000, Keys: 10_000}})
	addLinger(add, p)
	addFaults(add)
	addStampedes(add)
	addCaches(add, p)
	addRoundTrips(add, p)
	add(bout{Group: "waiters", Detail: "2000 goroutines", Nodes: 1, Rivals: withByHand,
		Load: load{Kind: waiters, Goroutines: 2000}})
	add(bout{Group: "held", Detail: fmt.Sprintf("%d locks", p.held), Nodes: 1, TTL: heldTTL,
		Rivals: []string{nameOurs, nameRueidis}, Load: load{Kind: holding, Keys: p.held, Window: p.refresh}})
	addDelays(add, p)
	return all
}

// oneEach is the load of one caller in each of that many processes.
func oneEach(procs, nodes int, work time.Duration) bout {
	b := bout{Group: "one caller per process", Detail: fmt.Sprintf("%d processes", procs), Nodes: nodes,
		Procs:  procs,
		Rivals: []string{nameOurs, nameFailFast, nameRueidis, nameRaw, nameRawRedis},
		Load:   load{Kind: closed, Goroutines: 1, Keys: 1, Work: work}}
	if work > 0 {
		b.Detail += fmt.Sprintf(", %v of work", work)
	}
	return b
}

// works and crowds are the loads of addOneEach.
var (
	works  = []time.Duration{0, 100 * time.Microsecond}
	crowds = []int{2, 4, 16, 64}
)

// addOneEach is the everyday case of some dozens of pods: all want one key, each with one caller.
func addOneEach(add func(bout), p pace) {
	for _, work := range works {
		for _, n := range []int{1, 3} {
			for _, procs := range crowds {
				b := oneEach(procs, n, work)
				b.Load.Window = p.long
				add(b)
			}
		}
	}
}

// shortLinger is what an affinity of requests needs, and longLinger what one needs that comes again after
// seconds.
const shortLinger, longLinger = 100 * time.Millisecond, 5 * time.Second

// addLinger is keys that one process uses again and again.
func addLinger(add func(bout), p pace) {
	one := func(b bout) {
		b.Group, b.Linger = "linger", shortLinger
		b.Load.Kind, b.Load.Bare = closed, b.Load.Pause == 0
		add(b)
	}
	for _, n := range []int{1, 3, 5} {
		rivals := append([]string{nameLinger}, byNodes(n, onOneNode, onSomeNodes)...)
		one(bout{Detail: "1 goroutine, 1 key", Nodes: n, Rivals: rivals, Load: load{Goroutines: 1}})
		one(bout{Detail: "1 goroutine, 1 key, 1ms more each way", Nodes: n, Rivals: rivals, Proxied: true,
			RTT: 2 * time.Millisecond, Load: load{Goroutines: 1}})
		one(bout{Detail: "1000 goroutines, a key each", Nodes: n, Rivals: rivals, Load: load{Goroutines: 1000}})
	}
	ours := []string{nameLinger, nameOurs}
	one(bout{Detail: "a use every 10ms", Nodes: 1, TTL: 2 * time.Second, Rivals: ours,
		Load: load{Goroutines: 1, Pause: 10 * time.Millisecond, Window: p.reuse}})
	for _, l := range []struct {
		affinity float64
		linger   time.Duration
		even     bool
	}{
		{affinity: 0.9, linger: shortLinger}, {affinity: 0.9, linger: longLinger},
		{affinity: 0.9, linger: longLinger, even: true}, {affinity: 1, linger: longLinger},
	} {
		keys := "10000 keys"
		if l.even {
			keys += " alike"
		}
		for _, n := range []int{1, 3} {
			add(bout{Group: "linger",
				Detail: fmt.Sprintf("%s, 4 processes x 250, %.0f%% affinity, %v", keys, 100*l.affinity, l.linger),
				Nodes:  n, Procs: 4, Rivals: ours, Linger: l.linger,
				Load: load{Kind: closed, Goroutines: 250, Keys: 10_000, Even: l.even, Affinity: l.affinity,
					Window: p.affinity}})
		}
	}
}

func addLatencies(add func(bout), p pace) {
	add(bout{Group: "open", Detail: "one key, 2000 arrivals/s, 20µs of work", Nodes: 1, Rivals: withByHand,
		Load: load{Kind: open, Keys: 1, Rate: 2000, Work: 20 * time.Microsecond, Window: p.long}})
	add(bout{Group: "open", Detail: "100000 keys, 3000 arrivals/s", Nodes: 1, Rivals: onOneNode,
		Load: load{Kind: open, Keys: 100_000, Rate: 3000, Window: p.long}})
	for _, n := range []int{1, 3} {
		add(bout{Group: "handover", Nodes: n, Procs: 2, Rivals: byNodes(n, withByHand, someByHand),
			Load: load{Kind: handover, Window: p.long}})
	}
	for _, n := range []int{1, 3} {
		add(bout{Group: "handover", Detail: "1ms more each way", Nodes: n, Procs: 2,
			Rivals: byNodes(n, withByHand, someByHand), Proxied: true, RTT: 2 * time.Millisecond,
			Load: load{Kind: handover, Window: p.long}})
	}
}

func addFaults(add func(bout)) {
	for _, g := range []int{1, 50} {
		add(bout{Group: "one of five stopped", Detail: goroutinesText(g), Nodes: 5, Rivals: onlyMajority,
			Stopped: true,
			Load:    load{Kind: closed, Goroutines: g, Drain: true}})
	}
	add(bout{Group: "one of five slow by 5ms", Detail: "50 goroutines", Nodes: 5, Rivals: onlyMajority,
		SlowBy: 5 * time.Millisecond, Load: load{Kind: closed, Goroutines: 50}})
}

func addStampedes(add func(bout)) {
	for _, d := range []time.Duration{5 * time.Millisecond, 50 * time.Millisecond, 500 * time.Millisecond} {
		episodes := 5
		if d > 100*time.Millisecond {
			episodes = 2
		}
		add(bout{Group: "stampede", Detail: fmt.Sprintf("4 processes x 250 callers, a load takes %v", d),
			Nodes: 1, Procs: 4, Episodes: episodes,
			Rivals: []string{nameOurs, nameFailFast, nameRedislock, nameRueidis, nameByHand},
			Load:   load{Kind: stampede, Goroutines: 250, Work: d}})
	}
}

// coldProcs is how many processes want cold keys.
const coldProcs = 4

func addCaches(add func(bout), p pace) {
	add(bout{Group: "cold keys",
		Detail: fmt.Sprintf("4 processes x 250 callers, each %d of 1000 keys, a load takes 20ms", chosenPerCall),
		Nodes:  1, Procs: coldProcs, Episodes: p.bursts, Fresh: time.Minute,
		Rivals: []string{nameOurs, nameSturdyc, nameRocks, nameLoop},
		Load:   load{Kind: coldKeys, Goroutines: 250, Keys: 1000, Work: 20 * time.Millisecond}})
	add(bout{Group: "invalidation",
		Detail: "4 processes x 50 callers, 20 keys, a load takes 20ms, one in ten 200ms",
		Nodes:  1, Procs: 4, Fresh: 2 * time.Second,
		Rivals: []string{
			nameOurs, nameHearing, nameRocks, nameRocksStrong, nameAside, nameGoredis, nameRedislock, nameFailFast,
		},
		Load: load{Kind: invalidation, Goroutines: 50, Keys: 20, Work: 20 * time.Millisecond, Window: 3 * p.long}})
}

var addedRTT = []time.Duration{0, 200 * time.Microsecond, time.Millisecond, 5 * time.Millisecond}

func addRoundTrips(add func(bout), p pace) {
	for _, d := range addedRTT {
		for _, g := range []int{1, 1000} {
			b := bout{Group: "round trip, uncontended", Detail: fmt.Sprintf("%v added", d),
				Nodes: 1, Rivals: onOneNode, Proxied: true, RTT: d,
				Load: load{Kind: closed, Goroutines: g, Window: p.window / 2}}
			if g > 1 {
				b.Group, b.Load.Keys, b.Load.Window = "round trip, hot key", 1, p.window
			}
			add(b)
		}
	}
}

func addDelays(add func(bout), p pace) {
	for _, d := range triedDelays {
		add(bout{Group: "delays", Detail: fmt.Sprintf("hot key, 1000 goroutines, %v", d), Nodes: 1, Delay: d,
			Rivals: []string{nameFailFast, nameRedislock},
			Load:   load{Kind: closed, Goroutines: 1000, Keys: 1, Window: p.window}})
		if d <= 20*time.Millisecond {
			add(bout{Group: "delays", Detail: fmt.Sprintf("handover, %v", d), Nodes: 1, Procs: 2, Delay: d,
				Rivals: []string{nameFailFast, nameRedislock},
				Load:   load{Kind: handover, Window: p.window / 2}})
		}
	}
}

// chosen are the bouts of the named groups, all if none is named.
func chosen(all []bout, only string) ([]bout, error) {
	if only == "" {
		return all, nil
	}
	var some []bout
	for _, name := range strings.Split(only, ";") {
		n := len(some)
		for _, b := range all {
			if b.Group == name || b.id() == name {
				some = append(some, b)
			}
		}
		if len(some) == n {
			return nil, fmt.Errorf("no load is called %q: there are %q", name, groupsOf(all))
		}
	}
	return some, nil
}

// groupsOf are the groups in order.
func groupsOf(all []bout) (names []string) {
	for _, b := range all {
		if !slices.Contains(names, b.Group) {
			names = append(names, b.Group)
		}
	}
	return names
}

// expected is about how long one rival takes for the bout.
func (b bout) expected() time.Duration {
	const start = 400 * time.Millisecond
	switch b.Load.Kind {
	case stampede, coldKeys:
		return start + time.Duration(b.Episodes)*(b.Load.Work+100*time.Millisecond)
	case holding:
		return start + b.Load.Window + 4*time.Second
	case open:
		return start + b.Load.Window + 300*time.Millisecond
	case handover:
		return start + b.Load.Window + 200*time.Millisecond
	}
	if b.Stopped {
		return start + 4*time.Second
	}
	return start + b.Load.Window
}

func goroutinesText(n int) string {
	if n == 1 {
		return "1 goroutine"
	}
	return fmt.Sprintf("%d goroutines", n)
}
