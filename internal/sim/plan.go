package sim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// A plan is what a seed stands for: the size of the world, the quality of its network, what its
// programs do, and its faults. It is made from the seed alone, so that a
// run can be repeated without some of its faults.
type plan struct {
	seed uint64
	lua  *interpreter

	nodes, clients, workers, keys int

	latency time.Duration // of one way, about
	spikes  int           // one piece in so many takes up to spike longer
	spike   time.Duration
	splits  int // one piece in so many comes in two
	copies  int // one piece in so many is executed a second time, as by a proxy that sends again

	offsets []time.Duration // of the servers' clocks
	rates   []float64

	nodeTimeout time.Duration
	maxTTL      time.Duration
	slice       time.Duration
	drift       float64
	notify      bool
	linger      time.Duration // 0: leases are not retained
	mute        []bool        // processes, by their slots: the servers refuse their PUBLISH; nil: none
	deaf        [][]bool      // by processes and servers: which refuse their SUBSCRIBE; nil: none
	own         []options     // of processes, by their slots, where they differ from these; nil: they do not

	quarantine bool // nodes that lost their data have no vote for MaxTTL
	// Servers lose data: all but faithful if there is a quarantine, else only those that were away for MaxTTL.
	forgets    bool
	faithful   int
	appendOnly bool          // a server's disk has commands, not a dump
	informed   time.Duration // before that the servers refuse INFO
	deployed   bool          // the servers were used before the world began
	loose      bool          // clocks drift and servers lose data: then tokens may fall
	long       bool          // locks have the longest ttl, and are held for long
	eager      bool          // workers hold a key briefly, and want the same again soon, nearly always
	fetches    bool          // workers fetch values, too
	reads      bool          // workers take read locks, too
	patience   time.Duration // how long a key may be free while somebody waits for it; 0: for ever

	chaos  time.Duration // how long programs begin new work, and faults happen
	enough int           // scripts; then it ends early, for more of the same shows nothing new
	faults []fault
	down   []int // servers, a minority, that stay away after the faults
}

// fault is one thing that goes wrong, for a while.
type fault struct {
	at, lasts time.Duration
	what      what
	server    int
	client    int
	memory    memory
	late      bool
	up, down  bool
	jump      time.Duration
	refuses   time.Duration // for so long a server that comes back refuses writes
}

// what is the kind of a fault.
type what uint8

const (
	cutLink what = iota
	cutClient
	resetConns
	stopServer
	crashServer
	flushServer
	loadServer
	forgetScripts
	jumpClock
	pauseClient
	crashClient
	closeClient
	kinds
	giveWay      what = iota - 1 // this and the following are not among the usual ones
	refuseWrites what = iota - 1
)

func (k what) String() string {
	return [...]string{"link cut", "client cut off", "connections reset", "server stopped", "server crashes",
		"server flushed", "server loads",
		"scripts forgotten", "clock jumps", "client pauses", "client crashes", "client closes",
		"server gives way", "server refuses writes"}[k]
}

func (f fault) String() string {
	return fmt.Sprintf("%v at %v for %v (n%d, c%d, remembers %v, late %v, up %v, down %v, jump %v, refuses %v)",
		f.what, f.at, f.lasts, f.server, f.client, f.memory, f.late, f.up, f.down, f.jump, f.refuses)
}

// readsAlways has the programs of all worlds take read locks.
var readsAlways bool

// newPlan makes the plan of a seed.
func newPlan(seed uint64, in *interpreter) *plan {
	p := uniformPlan(seed, in)
	p.reads = readsAlways || seed%8 == 5 // draws nothing: other seeds are to find what they have found
	p.addVariety(rand.New(rand.NewPCG(seed, 17)))
	return p
}

// uniformPlan is the plan of a seed without variety: a few processes that are all alike.
func uniformPlan(seed uint64, in *interpreter) *plan {
	r := rand.New(rand.NewPCG(seed, 0))
	p := &plan{
		seed: seed, lua: in,
		nodes:   pick(r, 1, 2, 3, 3, 3, 3, 4, 5),
		clients: pick(r, 2, 2, 3),
		workers: pick(r, 1, 2, 3),
		keys:    pick(r, 1, 1, 2),
		latency: between(r, 50*time.Microsecond, 4*time.Millisecond),
		spikes:  pick(r, 0, 200, 40, 10),
		splits:  pick(r, 0, 0, 20),
		copies:  pick(r, 0, 0, 0, 30),

		nodeTimeout: between(r, 10*time.Millisecond, 60*time.Millisecond),
		maxTTL:      pick(r, 500*time.Millisecond, 2*time.Second, 8*time.Second),
		slice:       pick(r, -1, 5*time.Millisecond, 20*time.Millisecond),
		drift:       pick(r, 0.01, 0.01, 0.05),
		notify:      r.IntN(4) != 0,
		chaos:       pick(r, 500*time.Millisecond, time.Second, 2*time.Second),
	}
	p.spike, p.enough = 4*p.nodeTimeout, 1000
	p.quarantine = p.nodes >= 3 && r.IntN(4) != 0
	p.forgets, p.faithful = r.IntN(3) == 0, r.IntN(p.nodes)
	inStep := p.forgets && r.IntN(2) == 0
	p.loose = p.forgets && !inStep
	for range p.nodes {
		offset, rate := time.Duration(r.Int64N(int64(48*time.Hour)))-24*time.Hour, 1+(2*r.Float64()-1)*p.drift*0.98
		if inStep {
			offset, rate = 0, 1
		}
		p.offsets, p.rates = append(p.offsets, offset), append(p.rates, rate)
	}
	p.addFaults(r)
	more := rand.New(rand.NewPCG(seed, 9)) // separate, so that most seeds keep their meaning
	p.addSteps(more)
	p.addAmnesia(more)
	p.addReturns(rand.New(rand.NewPCG(seed, 10)))
	p.addRefusals(rand.New(rand.NewPCG(seed, 11)))
	p.addRights(rand.New(rand.NewPCG(seed, 12)))
	p.addOldData(rand.New(rand.NewPCG(seed, 13)))
	p.addLinger(rand.New(rand.NewPCG(seed, 14)))
	p.addMute(rand.New(rand.NewPCG(seed, 15)))
	p.addEager(rand.New(rand.NewPCG(seed, 16)))
	p.addOblivion(rand.New(rand.NewPCG(seed, 18)))
	slices.SortStableFunc(p.faults, func(a, b fault) int { return int(a.at - b.at) })
	if m := (p.nodes - 1) / 2; m > 0 && r.IntN(4) == 0 {
		p.down = r.Perm(p.nodes)[:1+r.IntN(m)]
	}
	return p
}

func pick[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

// addFaults makes the schedule. Each world has a few kinds of faults only, some of them
// often: all kinds at once hide each other.
func (p *plan) addFaults(r *rand.Rand) {
	var usual []what
	for k := range kinds {
		if r.IntN(3) == 0 {
			usual = append(usual, k)
		}
	}
	if len(usual) == 0 {
		return
	}
	for range r.IntN(24) {
		f := fault{
			what: usual[r.IntN(len(usual))],
			at:   time.Duration(r.Int64N(int64(p.chaos))), lasts: between(r, time.Millisecond, p.chaos/2),
			server: r.IntN(p.nodes), client: r.IntN(p.clients),
			late: r.IntN(2) == 0,
			jump: -between(r, time.Millisecond, time.Second),
		}
		switch r.IntN(4) {
		case 0:
			f.up = true
		case 1:
			f.down = true
		default:
			f.up, f.down = true, true
		}
		if p.forgets && !p.mayForget(r, &f) {
			continue
		}
		if f.what == flushServer && !p.forgets {
			continue
		}
		p.faults = append(p.faults, f)
	}
}

// ahead is how much a server's clock may gain by steps, in all: validity loses 2 ms besides
// what clock drift subtracts.
const ahead = 1900 * time.Microsecond

// addSteps has clocks step ahead a little, in some worlds.
func (p *plan) addSteps(r *rand.Rand) {
	if r.IntN(4) != 0 || p.forgets && !p.loose {
		return
	}
	for s := range p.nodes {
		for left := ahead; left > 10*time.Microsecond && r.IntN(2) == 0; {
			step := between(r, 10*time.Microsecond, left)
			left -= step
			p.faults = append(p.faults, fault{what: jumpClock, at: time.Duration(r.Int64N(int64(p.chaos))), server: s,
				jump: step})
		}
	}
}

// addAmnesia has servers lose data just when others come back that were away, in some worlds whose
// locks are held for long: a lock acquired meanwhile is on too few nodes then, except for the
// quarantine.
func (p *plan) addAmnesia(r *rand.Rand) {
	if !p.forgets || !p.quarantine || r.IntN(2) != 0 {
		return
	}
	p.long = true
	need := p.nodes/2 + 1
	for range 1 + r.IntN(6) {
		others := slices.DeleteFunc(r.Perm(p.nodes), func(s int) bool { return s == p.faithful })
		from, lasts := time.Duration(r.Int64N(int64(p.chaos))), p.chaos/16+time.Duration(r.Int64N(int64(p.chaos/4)))
		back := from + lasts
		p.cutAll(others[:p.nodes-need], from, back)
		for _, s := range others[p.nodes-need : need] {
			p.faults = append(p.faults, fault{
				what: crashServer, at: back - between(r, 10*time.Microsecond, 10*time.Millisecond), lasts: between(r,
					10*time.Microsecond, 10*time.Millisecond),
				server: s, memory: pick(r, something, nothing),
			})
		}
	}
}

// addReturns has servers give way to a replica, and return, in some worlds. That takes 20 ms and two
// NodeTimeouts at least, which may be less than a client's check of their identity counts: a violation
// is one only if the server was away for longer than docs/guarantees.md requires. Others may be
// away meanwhile: then a lock that was refreshed is on too few in the end, but for the quarantine.
func (p *plan) addReturns(r *rand.Rand) {
	if !p.forgets || !p.quarantine || r.IntN(2) != 0 {
		return
	}
	least, away := 20*time.Millisecond+2*p.nodeTimeout, p.nodes-(p.nodes/2+1)
	for range 1 + r.IntN(4) {
		from, lasts := time.Duration(r.Int64N(int64(p.chaos))), between(r, least, least+p.chaos/4)
		others := slices.DeleteFunc(r.Perm(p.nodes), func(s int) bool { return s == p.faithful })
		p.faults = append(p.faults, fault{what: giveWay, at: from, lasts: lasts, server: others[away],
			memory: pick(r, everything, something)})
		if r.IntN(2) == 0 {
			p.cutAll(others[:away], from, from+lasts)
		}
	}
}

// addRefusals has servers refuse writes, in some worlds: for a while, or when they come back and are
// met for the first time. A write of boot.lua that fails must not be taken for written. Where locks
// are held for long, that takes so long that a client meets them, and not so long that they end.
func (p *plan) addRefusals(r *rand.Rand) {
	if r.IntN(2) != 0 {
		return
	}
	p.appendOnly = r.IntN(4) != 0
	for i := range p.faults {
		switch f := &p.faults[i]; {
		case f.what != crashServer && f.what != giveWay:
		case p.long:
			f.refuses = between(r, p.nodeTimeout, p.nodeTimeout+p.chaos/8)
		case r.IntN(2) == 0:
			f.refuses = between(r, time.Millisecond, 20*time.Millisecond+2*p.nodeTimeout)
		}
	}
	for range r.IntN(3) {
		p.faults = append(p.faults, fault{
			what: refuseWrites, at: time.Duration(r.Int64N(int64(p.chaos))), lasts: between(r, time.Millisecond,
				p.chaos/4), server: r.IntN(p.nodes),
		})
	}
}

// addRights has INFO refused for a while, in some worlds, so that memories begin without it, and no server
// has a vote.
func (p *plan) addRights(r *rand.Rand) {
	if p.forgets && p.quarantine && !p.loose && r.IntN(4) == 0 {
		p.informed = between(r, time.Millisecond, p.chaos/2)
	}
}

// addOldData has one of one or two servers come back with old data instead of none, in some worlds,
// after all locks have ended: only the tokens must rise still.
func (p *plan) addOldData(r *rand.Rand) {
	if p.nodes > 2 || p.loose || r.IntN(2) != 0 {
		return
	}
	for i := range p.faults {
		if f := &p.faults[i]; f.what == crashServer && f.memory == nothing {
			f.memory = something
		}
	}
}

// addLinger has the processes retain leases, in half of the worlds.
func (p *plan) addLinger(r *rand.Rand) {
	if r.IntN(2) == 0 {
		p.linger = between(r, time.Millisecond, time.Second)
	}
}

// addMute has the servers refuse PUBLISH to some processes, in some worlds: no message of theirs about a
// turn, a grant or a recall arrives.
func (p *plan) addMute(r *rand.Rand) {
	if r.IntN(8) == 0 {
		for range p.clients {
			p.mute = append(p.mute, r.IntN(2) == 0)
		}
	}
}

// addEager has workers come back for the same key, in some worlds: then releases bring the next offer.
func (p *plan) addEager(r *rand.Rand) {
	if p.eager = !p.long && r.IntN(3) == 0; p.eager {
		p.workers, p.slice = pick(r, 1, 1, p.workers), max(p.slice, 5*time.Millisecond)
	}
}

// addOblivion has all servers lose all data at the same time, in some worlds: of those in which the servers
// were used before, since a new deployment takes longer than most worlds. Nobody may begin after that who
// does not know better, so no process crashes or closes, and each had time to lock before.
func (p *plan) addOblivion(r *rand.Rand) {
	p.deployed = r.IntN(4) != 0 && p.informed == 0
	if !p.deployed || !p.forgets || !p.quarantine || r.IntN(2) != 0 {
		return
	}
	at := between(r, 500*time.Millisecond, 3*time.Second)
	// locks are held for longer than a bootstrap takes
	p.long, p.chaos, p.maxTTL = true, 16*time.Second, 8*time.Second
	p.faults = slices.DeleteFunc(p.faults, func(f fault) bool {
		return f.at < at || f.what == crashClient || f.what == closeClient
	})
	lasts := between(r, 10*time.Microsecond, 10*time.Millisecond)
	for s := range p.nodes {
		p.faults = append(p.faults, fault{what: crashServer, at: at, lasts: lasts, server: s, memory: nothing})
	}
}

// cutAll disconnects servers from all clients. What was held back is lost.
func (p *plan) cutAll(servers []int, from, back time.Duration) {
	for _, s := range servers {
		for c := range p.clients {
			p.faults = append(p.faults,
				fault{what: cutLink, at: from, lasts: back - from, client: c, server: s, up: true, down: true},
				fault{what: resetConns, at: back - 2*time.Millisecond, client: c, server: s})
		}
	}
}

// mayForget has a fault cost a server its memory, as far as locks must survive that. It says
// no to a fault that must not be at all.
func (p *plan) mayForget(r *rand.Rand, f *fault) bool {
	switch faithful := f.server == p.faithful; {
	case f.what == jumpClock:
		return p.loose
	case f.what == flushServer:
		return p.quarantine && !faithful
	case f.what != crashServer || r.IntN(2) == 0:
	case !p.quarantine:
		f.memory, f.lasts = nothing, p.maxTTL+p.maxTTL/10
	case !faithful:
		f.memory = pick(r, something, nothing)
	}
	return true
}

// forgetAll has a majority of the servers lose all data at once, now and again, which no
// lock on them can survive.
func (p *plan) forgetAll() {
	r := rand.New(rand.NewPCG(p.seed, 4))
	p.maxTTL, p.quarantine = max(p.maxTTL, 2*time.Second), false
	for range 8 {
		at := time.Duration(r.Int64N(int64(p.chaos)))
		for _, s := range r.Perm(p.nodes)[:p.nodes/2+1] {
			p.faults = append(p.faults, fault{what: crashServer, at: at, lasts: time.Millisecond, server: s,
				memory: nothing})
		}
	}
}

// jumpAhead has the clocks of a majority of the servers jump ahead at once, now and again, by
// more than any ttl: keys expire before their time.
func (p *plan) jumpAhead() {
	r := rand.New(rand.NewPCG(p.seed, 6))
	for range 8 {
		at := time.Duration(r.Int64N(int64(p.chaos)))
		for _, s := range r.Perm(p.nodes)[:p.nodes/2+1] {
			p.faults = append(p.faults, fault{what: jumpClock, at: at, server: s, jump: p.maxTTL})
		}
	}
}

// inject begins a fault, and schedules its end.
func (w *world) inject(f fault) {
	if w.healed {
		return
	}
	s, c := w.servers[f.server], w.slots[f.client]
	w.logf("FAULT  %v", f)
	switch f.what {
	case cutLink:
		w.cutFor(f, c, s)
	case cutClient:
		for _, s := range w.servers {
			w.cutFor(f, c, s)
		}
	case resetConns:
		for _, k := range c.inOrder() {
			if k.server == s {
				w.after(time.Duration(w.net.Int64N(int64(time.Millisecond))), func() {
					if slices.Contains(c.conns, k) {
						k.reset(f.late)
					}
				})
			}
		}
	case stopServer:
		s.stop(true)
		w.after(f.lasts, func() { s.stop(false) })
	case crashServer:
		if !s.up { // what it may lose depends on how long it is away
			return
		}
		s.crash()
		w.after(f.lasts, func() {
			if !s.up {
				s.restart(f.memory)
				s.refuseWrites(f.refuses)
			}
		})
	case giveWay:
		s.giveWay(f.memory, f.lasts, f.refuses)
	case refuseWrites:
		s.refuseWrites(f.lasts)
	case flushServer:
		if s.up {
			s.keys = map[string]*value{}
		}
	case loadServer:
		s.loading = true
		w.after(f.lasts, func() { s.loading = false })
	case forgetScripts:
		clear(s.scripts)
	case jumpClock:
		s.jump(f.jump)
	case pauseClient:
		c.pause(true)
		w.after(f.lasts, func() { c.pause(false) })
	case crashClient:
		c.crash()
	case closeClient:
		c.close()
	}
}

func (w *world) cutFor(f fault, c *client, s *server) {
	l := w.link(c.id, s.id)
	w.cut(l, f.up, f.down)
	w.after(f.lasts, func() { w.cut(l, false, false) })
}

// heal ends all faults except those that stay.
func (w *world) heal() {
	w.logf("MEND   all but %v", w.plan.down)
	w.healed = true
	for _, c := range w.clients {
		c.pause(false)
		for _, s := range w.servers {
			w.cut(w.link(c.id, s.id), false, false)
		}
	}
	for _, s := range w.servers {
		s.loading, s.refuses = false, false
		s.stop(false)
		switch {
		case slices.Contains(w.plan.down, s.id):
			s.crash()
		default:
			s.restart(everything)
		}
	}
}
