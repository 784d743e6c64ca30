package main

// rules are the rules that a world follows. Each can be switched off.
type rules struct {
	cluster bool // the nodes are one Cluster, whose slots move, and whose masters fail
	pollers bool // client 1 makes no offers: it can be sent no messages, or its ttl is too short
	oldOnes bool // client 0 is of before: its releases keep the key for a contender without an offer

	once     bool // S15: a node has one vote; else a message that arrives twice counts twice
	memory   bool // S17: a node that has lost its data grants nothing that counts
	causal   bool // S18: a grant is valid from the poll that its node had; else from its arrival
	echoed   bool // S18: from that poll, by its number; else from the last poll
	over     bool // S19: an offer that was given up counts no more; else the contender continues with it
	withdraw bool // S19: what is granted to nobody is released, and what a caller that leaves has offered
	block    bool // S20: a block is of one size for all nodes, as the owner says; else each poll has its own
	span     bool // S20: a grant lasts for as long as the waiter says; else as the releasing client says
	minimum  bool // a lease has the shortest of its votes' validities; else the longest
	raise    bool // S8: unequal tokens are raised; else the largest is taken
	reraise  bool // S9: a refresh raises a counter that is behind; else it leaves it
	silent   bool // S19: a link that has ended delivers nothing
	linked   bool // S17, on a Cluster: a message counts on the open link only that carried its poll

	// a release may bring its contender's next offer, with which that waits again, behind all others
	rejoins bool

	retains bool // a client keeps a lease that it does not use, for its next caller
	recalls bool // S21: it releases such a lease when another client wants the key; else it ignores the recall
	checks  bool // a lease is not retained if the last refresh has named a contender
	ends    bool // S21: a caller is given such a lease only as long as it is valid; else as if it were new
	idle    bool // S12: such a lease is not refreshed
	// S22: after a recall no caller gets the lease; else one does that comes before the release is answered
	refuses bool

	// These bound what a contender costs that is gone.
	received bool // a grant that no link receives is none, and the next one is granted the key
	spends   bool // a pass leaves the key free for a contender that polls once, until that has made a request
	bounded  bool // a grant lasts for a short time; else for the ttl

	// These are for speed.
	named    bool // a release names the next for all nodes; else each node takes its first
	asksWho  bool // after a short release, too; else each node takes its first then
	others   bool // where the one that is named has no want, the first one is next; else the key is free there
	frees    bool // the short release deletes the key although somebody waits
	anywhere bool // a pass grants also where its owner has no key, if that is free
	waits    bool // a poll leaves a free key to the one that waits longest, unless the last one did
	asks     bool // the nodes whose message has not arrived are asked; else they are waited for
}

func all() rules {
	return rules{
		once: true, memory: true, causal: true, echoed: true, over: true, withdraw: true,
		block: true, span: true, minimum: true, raise: true, reraise: true,
		recalls: true, checks: true, ends: true, idle: true, refuses: true,
		silent: true, linked: true, received: true, spends: true, bounded: true,
		named: true, asksWho: true, others: true, anywhere: true, waits: true, asks: true,
	}
}

// faults are what may happen in a world, in its first part. After that there are no faults, and every
// waiter must be served.
type faults struct {
	loss     bool // requests, answers and messages
	late     bool // requests that are executed long after their connection has broken
	twice    bool // messages that come twice
	pauses   bool // of clients
	restarts bool // of nodes, which are empty then; of two never within a ttl
	breaks   bool // links that break; what was sent on them is executed late
	leaving  bool // callers that give up
	steps    bool // of the nodes' clocks
	kills    bool // processes that are killed; with steady: that only wait
	stops    bool // processes that wait, and are stopped for a second

	// of a Cluster
	moves     bool // of the slot, to another master
	failovers bool // to a replica that lags

	steady bool // all messages take a few milliseconds: then how long nobody has the key is looked at
}

func every() faults {
	return faults{
		loss: true, late: true, twice: true, pauses: true, restarts: true, breaks: true, leaving: true, steps: true,
		kills: true,
	}
}

// variant is the rules of a world, and the expected result.
type variant struct {
	name   string
	change func(*rules, *faults)
	breaks string // what some of its worlds must find; "": none finds anything
}

const (
	twoHolders = "two valid leases"
	lowToken   = "a token that does not rise"
	starved    = "a waiter that is not served"
	outlives   = "an unused lease that outlives its ttl"
	idles      = "a key that nobody has for too long"
	again      = "another turn of a contender that is dead"
)

// rare is the first seed for the variant of that name, of which so few worlds find anything that
// some are known. Any change to the model changes it.
var rare = map[string]uint64{
	"no S18: valid from the last poll":                     16800,
	"the largest validity of the votes":                    700,
	"a Cluster, no S19: an owner that was given up counts": 950,
}

var variants = []variant{
	{"grants", func(*rules, *faults) {}, ""},
	{"grants, nothing fails", func(_ *rules, f *faults) { *f = faults{} }, ""},
	{"no S15: a vote that comes twice is two", func(r *rules, _ *faults) { r.once = false }, twoHolders},
	{"no S17: forgetful nodes grant", func(r *rules, _ *faults) { r.memory = false }, twoHolders},
	{"no S18: valid from receipt", func(r *rules, _ *faults) { r.causal = false }, twoHolders},
	{"no S18: valid from the last poll", func(r *rules, _ *faults) { r.echoed = false }, twoHolders},
	{"no S19: an owner that was given up counts", func(r *rules, _ *faults) { r.over = false }, twoHolders},
	{"no S20: each poll has its block", func(r *rules, _ *faults) { r.block = false }, lowToken},
	{"no S20: the span is the releaser's", func(r *rules, _ *faults) { r.span = false }, twoHolders},
	{"the largest validity of the votes", func(r *rules, _ *faults) { r.minimum = false }, twoHolders},
	{"no S8: unequal tokens are not raised", func(r *rules, _ *faults) { r.raise = false }, lowToken},
	{"no S9: a refresh raises no counter", func(r *rules, _ *faults) { r.reraise = false }, lowToken},

	{"releases bring offers", func(r *rules, _ *faults) { r.rejoins = true }, ""},
	{"releases bring offers, nothing fails", func(r *rules, f *faults) { r.rejoins, *f = true, faults{} }, ""},
	{"releases bring offers, no S18: valid from receipt",
		func(r *rules, _ *faults) { r.rejoins, r.causal = true, false }, twoHolders},
	{"releases bring offers, no S19: an owner that was given up counts",
		func(r *rules, _ *faults) { r.rejoins, r.over = true, false }, twoHolders},

	{"retained leases", func(r *rules, _ *faults) { r.retains = true }, ""},
	{"retained leases, nothing fails", func(r *rules, f *faults) { r.retains, *f = true, faults{} }, ""},
	{"no S21: recalls are ignored",
		func(r *rules, _ *faults) { r.retains, r.recalls, r.checks = true, false, false }, starved},
	{"recalls are ignored, but not refreshes that name a contender",
		func(r *rules, _ *faults) { r.retains, r.recalls = true, false }, ""},
	{"no S21: retained after its validity", func(r *rules, _ *faults) {
		r.retains, r.ends = true, false
	}, twoHolders},
	{"no S12: refreshed while nobody uses it", func(r *rules, _ *faults) {
		r.retains, r.idle = true, false
	}, outlives},
	{"no S22: given to a caller after the recall",
		func(r *rules, _ *faults) { r.retains, r.refuses = true, false }, twoHolders},

	{"a contender that polls", func(r *rules, _ *faults) { r.pollers = true }, ""},
	{"a contender of before", func(r *rules, _ *faults) { r.oldOnes = true }, ""},
	{"both", func(r *rules, _ *faults) { r.oldOnes, r.pollers = true, true }, ""},
	{"both, nothing fails", func(r *rules, f *faults) { r.oldOnes, r.pollers, *f = true, true, faults{} }, ""},

	{"a Cluster", onCluster(func(*rules) {}), ""},
	{"a Cluster, no S15: a vote that comes twice is two", onCluster(func(r *rules) { r.once = false }), ""},
	{"a Cluster, no S17: a message counts on any link", onCluster(func(r *rules) { r.linked = false }), ""},
	{"a Cluster, no S17: and links that have ended deliver",
		onCluster(func(r *rules) { r.linked, r.silent = false, false }), ""},
	{"a Cluster, no S18: valid from receipt", onCluster(func(r *rules) { r.causal = false }), twoHolders},
	{"a Cluster, no S19: an owner that was given up counts", onCluster(func(r *rules) {
		r.over = false
	}), twoHolders},
	{"a Cluster, no S20: the span is the releaser's", onCluster(func(r *rules) { r.span = false }), twoHolders},

	{"a waiter is killed", func(_ *rules, f *faults) { *f = faults{kills: true, steady: true} }, ""},
	{"a waiter is killed, beside one that polls",
		func(r *rules, f *faults) { r.pollers, *f = true, faults{kills: true, steady: true} }, ""},
	{"a waiter is killed, and granted the key all the same",
		func(r *rules, f *faults) { r.received, *f = false, faults{kills: true, steady: true} }, idles},
	{"a waiter that polls is killed, and keeps its want", func(r *rules, f *faults) {
		r.pollers, r.spends, *f = true, false, faults{kills: true, steady: true}
	}, again},
	{"a waiter is stopped", func(_ *rules, f *faults) { *f = faults{stops: true, steady: true} }, ""},
	{"a waiter is stopped, and grants last for the ttl",
		func(r *rules, f *faults) { r.bounded, *f = false, faults{stops: true, steady: true} }, idles},

	// These only cost time.
	{"no S19: nothing is withdrawn", func(r *rules, _ *faults) { r.withdraw = false }, ""},
	{"each node takes its first", func(r *rules, _ *faults) { r.named = false }, ""},
	{"each node takes its first after a short release", func(r *rules, _ *faults) { r.asksWho = false }, ""},
	{"where the one that is named does not wait, the key is free",
		func(r *rules, _ *faults) { r.others = false }, ""},
	{"the short release deletes the key in any case", func(r *rules, _ *faults) { r.frees = true }, ""},
	{"a free node is left out", func(r *rules, _ *faults) { r.anywhere = false }, ""},
	{"polls take what is free", func(r *rules, _ *faults) { r.waits = false }, ""},
	{"nobody is asked", func(r *rules, _ *faults) { r.asks = false }, ""},
}

// onCluster is the protocol on a Cluster, but for that change. A node does not lose its data there without a
// failover.
func onCluster(change func(*rules)) func(*rules, *faults) {
	return func(r *rules, f *faults) {
		r.cluster, f.restarts, f.moves, f.failovers = true, false, true, true
		change(r)
	}
}
