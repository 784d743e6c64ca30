package main

// rules are what a world obeys. Each can be taken out.
type rules struct {
	grants bool // a release grants the key; else it keeps it for a turn, and the contender acquires it

	memory   bool // S17: a node that has lost its memory grants nothing that counts
	causal   bool // S18: the validity of a grant begins when the poll was sent that the node had; else when it came
	over     bool // S19: an owner that was given up counts no more; else the contender waits on under it
	withdraw bool // S19: what is granted to nobody is released, and so is what a caller that leaves has asked for
	block    bool // S20: a block is of one size for all nodes, as the owner says; else each poll asks for its own
	turn     bool // S20: a turn is as long as the waiter says; else as the one says that releases
	minimum  bool // a lease has the least of its votes' validities; else the largest
	raise    bool // S8: unequal tokens are raised; else the largest is taken
	reraise  bool // S9: a refresh raises a counter that is behind; else it leaves it
	once     bool // S15: a node has one vote; else a message that comes twice counts twice
	younger  bool // a want is replaced by a younger one only; else by any that comes

	named bool    // the one that releases names the next for all nodes; else each node takes its first
	turns float64 // how long a turn is
}

func all() rules {
	return rules{
		grants: true, memory: true, causal: true, over: true, withdraw: true, block: true, turn: true,
		minimum: true, raise: true, reraise: true, once: true, younger: true, named: true, turns: 150,
	}
}

// faults are what may happen in a world, in its first part. After that all is well, and whoever waits is served.
type faults struct {
	loss     bool // requests, answers and messages
	late     bool // requests that are executed long after their connection has died
	twice    bool // messages that come twice
	pauses   bool // of clients
	restarts bool // of nodes, which are empty then; of two never within a ttl
	deaf     bool // subscriptions that are broken
	leaving  bool // callers that give up
	steps    bool // of the nodes' clocks
}

func every() faults {
	return faults{
		loss: true, late: true, twice: true, pauses: true, restarts: true, deaf: true, leaving: true, steps: true,
	}
}

// variant is a world's rules, and what is expected of them.
type variant struct {
	name   string
	change func(*rules, *faults)
	breaks string // what some of its worlds must find; "": none finds anything
}

const (
	twoHolders = "two valid leases"
	lowToken   = "a token that does not rise"
	starved    = "a waiter that is not served"
)

var variants = []variant{
	{"turns", func(r *rules, _ *faults) { r.grants = false }, ""},
	{"grants", func(*rules, *faults) {}, ""},
	{"grants, nothing fails", func(_ *rules, f *faults) { *f = faults{} }, ""},
	{"each node takes its first", func(r *rules, _ *faults) { r.named = false }, ""},
	{"no S17: forgetful nodes grant", func(r *rules, _ *faults) { r.memory = false }, twoHolders},
	{"no S18: valid from receipt", func(r *rules, _ *faults) { r.causal = false }, twoHolders},
	{"no S19: an owner that was given up counts", func(r *rules, _ *faults) { r.over = false }, twoHolders},
	{"no S20: each poll has its block", func(r *rules, _ *faults) { r.block = false }, lowToken},
	{"no S20: the turn is the releaser's", func(r *rules, _ *faults) { r.turn = false }, twoHolders},
	{"the largest validity of the votes", func(r *rules, _ *faults) { r.minimum = false }, twoHolders},
	{"no S8: unequal tokens are not raised", func(r *rules, _ *faults) { r.raise = false }, lowToken},
	{"no S9: a refresh raises no counter", func(r *rules, _ *faults) { r.reraise = false }, lowToken},
	{"no S19: nothing is withdrawn", func(r *rules, _ *faults) { r.withdraw = false }, ""}, // it costs turns only
	{"an older want replaces a younger one", func(r *rules, _ *faults) { r.younger = false }, ""},
	{"no S15: a vote that comes twice is two", func(r *rules, _ *faults) { r.once = false }, twoHolders},
}
