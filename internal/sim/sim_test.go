package sim

import (
	"cmp"
	"flag"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"go.uber.org/goleak"
)

var (
	seedFlag   = flag.Uint64("seed", 0, "run this seed only")
	firstFlag  = flag.Uint64("first", 1, "the first seed")
	seedsFlag  = flag.Uint64("seeds", 0, "how many seeds; 0: a few")
	enoughFlag = flag.Int("enough", 3, "how many bad seeds are enough")
	traceFlag  = flag.Bool("trace", false, "with -seed: print all that happens")
	dropFlag   = flag.String("drop", "",
		"with -seed: leave out the faults of these numbers, as -shrink tells them")
	readsFlag = flag.Bool("reads", false,
		"have programs take read locks with every seed, not only one in eight")
	shrinkFlag = flag.Bool("shrink", false,
		"with -seed: leave out faults as long as an invariant is still broken")
)

func TestMain(m *testing.M) {
	runtime.GOMAXPROCS(1) // goroutines take turns in a fixed order, nearly always
	_ = os.Setenv("GODEBUG", "tracebacklabels=1,"+os.Getenv("GODEBUG"))
	debug.SetGCPercent(-1)
	new(node.Target).Init("warm", "up", "") // what is built once must not be built in a bubble
	redistest.SilenceRedis()
	goleak.VerifyTestMain(m)
}

// Whatever happens to the nodes, the network and the clients, the invariants hold.
func TestSim(t *testing.T) {
	readsAlways = *readsFlag
	in := newInterpreter()
	if *seedFlag != 0 {
		replay(t, newPlan(*seedFlag, in))
		return
	}
	n := cmp.Or(*seedsFlag, fewSeeds)
	var grants, attaches, attached, steps, failed int
	var direct uint64
	var reused, recalled uint64
	for seed := *firstFlag; seed < *firstFlag+n; seed++ {
		res := simulate(t, newPlan(seed, in), nil)
		if len(res.violations) > 0 {
			t.Errorf("seed %d: %s\ngo test ./internal/sim -run TestSim -args -seed=%d -trace",
				seed, strings.Join(res.violations, "\n"), seed)
			if failed++; failed == *enoughFlag {
				t.Fatal("that is enough")
			}
		}
		grants += res.grants
		attaches, attached = attaches+res.attaches, attached+res.attached
		direct += res.direct
		reused, recalled = reused+res.reused, recalled+res.recalled
		steps += res.steps
		collect(seed)
	}
	t.Logf("%d seeds from %d: %d locks in %d steps; %d leases were granted by the release before them, "+
		"%d locks were from retained leases, of which %d were recalled; of %d calls of Attach %d had the lock",
		n, *firstFlag, grants, steps, direct, reused, recalled, attaches, attached)
	if n >= 50 && (reused == 0 || recalled == 0) {
		t.Error("the seeds retain nothing")
	}
}

// collect collects garbage, now and then, between worlds: in one, it would put goroutines into
// another order.
func collect(seed uint64) {
	if seed%4 == 0 {
		runtime.GC()
	}
}

// replay runs one plan, by the flags.
func replay(t *testing.T, p *plan) {
	p.drop(*dropFlag)
	if *shrinkFlag {
		p = shrink(t, p)
	}
	var out io.Writer
	if *traceFlag {
		out = os.Stdout
	}
	for i, f := range p.faults {
		t.Logf("fault %d: %v", i, f)
	}
	for _, v := range simulate(t, p, out).violations {
		t.Error(v)
	}
}

// The checker works: it detects what no lock can survive, a majority that loses its data.
func TestAmnesiaOfAMajorityIsNoticed(t *testing.T) {
	wantTwoHolders(t, (*plan).forgetAll)
}

// So does it for the other thing that no lock can survive: clocks of a majority that jump ahead.
func TestClocksThatJumpAheadAreNoticed(t *testing.T) {
	wantTwoHolders(t, (*plan).jumpAhead)
}

// wantTwoHolders expects two holders of a key in one of 200 worlds with more faults than usual.
func wantTwoHolders(t *testing.T, more func(*plan)) {
	t.Helper()
	in := newInterpreter()
	for seed := uint64(1); seed <= 200; seed++ {
		p := uniformPlan(seed, in)
		more(p)
		if strings.Contains(strings.Join(simulate(t, p, nil).violations, "\n"), "both hold") {
			return
		}
		collect(seed)
	}
	t.Error("no two clients held a key in 200 seeds")
}

// Tokens need the clocks when a node loses its counters: here one is flushed, or restarts with old
// data, and when its quarantine is over it votes together with a node that was down meanwhile. If
// its clock is in sync, its new counters are above all tokens that were given; if it is an hour
// behind, they are not, although only one node of three ever lost anything.
func TestTokensOfANodeThatForgotNeedTheClocks(t *testing.T) {
	in := newInterpreter()
	forgets := map[string]fault{
		"flushed": {what: flushServer, at: 240 * time.Millisecond},
		"restarted, old data": {
			what: crashServer, at: 240 * time.Millisecond, lasts: 500 * time.Microsecond, memory: something,
		},
	}
	fall := func(forgot fault, behind time.Duration, seed uint64) bool {
		p := uniformPlan(seed, in)
		p.nodes, p.clients, p.workers, p.keys, p.down = 3, 2, 2, 1, nil
		p.latency, p.spikes, p.copies, p.splits = 200*time.Microsecond, 0, 0, 0
		p.maxTTL, p.chaos, p.enough = 100*time.Millisecond, time.Second, 1<<20
		p.quarantine, p.forgets, p.loose, p.long = true, forgot.memory == something, false, false
		p.offsets, p.rates = []time.Duration{-behind, 0, 0}, []float64{1, 1, 1}
		p.faults = []fault{
			{what: stopServer, server: 2, at: 50 * time.Millisecond, lasts: 200 * time.Millisecond},
			forgot,
			{what: crashServer, server: 1, at: 241 * time.Millisecond, lasts: time.Second},
		}
		return strings.Contains(strings.Join(simulate(t, p, nil).violations, "\n"), "does not rise")
	}
	for name, forgot := range forgets {
		behind := false
		for seed := uint64(1); seed <= 3; seed++ {
			if fall(forgot, 0, seed) {
				t.Errorf("%s, its clock in step, seed %d: tokens fell", name, seed)
			}
			behind = behind || fall(forgot, time.Hour, seed)
		}
		if !behind {
			t.Errorf("%s, its clock an hour behind: no token fell", name)
		}
	}
}

// Seeds that once broke an invariant.
func TestSeedsThatFailed(t *testing.T) {
	in := newInterpreter()
	for seed, what := range map[uint64]string{
		10948: "a node with old data went on from its old counter",
		13358: "an old disk brought back a key that was released",
		18908: "a server that gave way came back with a key that its successor had released",
	} {
		for _, v := range simulate(t, uniformPlan(seed, in), nil).violations {
			t.Errorf("seed %d, %s: %s", seed, what, v)
		}
	}
}

// Who waits for a lock that was detached when the faults had ended, and that nobody attaches, has a ttl more
// for it.
func TestWaitersOfALapsingLockHaveTime(t *testing.T) {
	for _, v := range simulate(t, newPlan(207473, newInterpreter()), nil).violations {
		t.Error(v)
	}
}
