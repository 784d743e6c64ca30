package sim

import (
	"fmt"
	"io"
	"math/rand/v2"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/jitter"
)

var uuids = regexp.MustCompile(`#[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}-`)

// dialTimeout is that of the clients' connections.
func (p *plan) dialTimeout() time.Duration { return max(4*p.nodeTimeout, 100*time.Millisecond) }

// result is the outcome of a run.
type result struct {
	violations []string
	grants     int
	attaches   int    // calls of Attach
	attached   int    // of these, those that had the lock
	direct     uint64 // of these, by the release of another client
	steps      int
	loads      int           // of Fetchers
	longest    time.Duration // for which a key was free while somebody waited, if the plan has a limit
	reused     uint64        // locks from retained leases
	recalled   uint64        // of these
}

// simulate runs the plan, and writes the trace to out unless that is nil.
func simulate(t *testing.T, p *plan, out io.Writer) (res result) {
	defer func() {
		if r := recover(); r != nil {
			res.violations = append(res.violations, fmt.Sprintf("panic: %v\n%s", r, stacks()))
		}
	}()
	seedJitter(p.seed)
	defer p.lua.forget()
	defer func() { clock.AfterFunc = time.AfterFunc }()
	synctest.Test(t, func(*testing.T) {
		w := newWorld(p, out)
		w.play()
		ch := &w.checker
		res = result{violations: ch.violations, grants: ch.grants, attaches: ch.attaches, attached: ch.attached,
			steps: w.steps, loads: w.cache.loads, longest: ch.longest}
		for _, c := range w.clients {
			s := c.lib.Stats()
			res.direct += s.Grants
			res.reused, res.recalled = res.reused+s.Reused, res.recalled+s.Recalled
		}
	})
	return res
}

// savePause is how often a server saves its data to disk.
const savePause = 50 * time.Millisecond

func (w *world) saveAll() {
	for _, s := range w.servers {
		s.saved = s.copy()
	}
	if !w.healed {
		w.after(savePause, w.saveAll)
	}
}

// stacks are those of the goroutines in bubbles.
func stacks() string {
	all := make([]byte, 1<<20)
	var in []string
	for _, g := range strings.Split(string(all[:runtime.Stack(all, true)]), "\n\n") {
		if strings.Contains(g, "synctest bubble") {
			in = append(in, g)
		}
	}
	return strings.Join(in, "\n\n")
}

// play is a whole run: a time of faults, then one without, in which everything must settle.
func (w *world) play() {
	p := w.plan
	never := func() bool { return false }
	for _, f := range p.faults {
		w.at(f.at, func() { w.inject(f) })
	}
	if p.forgets {
		w.after(savePause, w.saveAll)
	}
	for _, c := range w.clients {
		c.start()
	}
	w.run(p.chaos, func() bool { return w.scripts > p.enough })
	w.heal()
	if !w.checker.broken() {
		settled := w.now() + 4*p.maxTTL + 10*time.Second
		w.run(settled, w.checker.idle)
		for n := 0; n < w.lapsing && !w.checker.broken(); n++ { // others waited for what was detached meanwhile
			settled += p.maxTTL
			w.run(settled, w.checker.idle)
		}
	}
	if !w.checker.broken() {
		w.checker.served()
	}
	if !w.checker.broken() {
		w.run(w.now()+5*time.Second, never)
		w.checker.clean()
	}
	w.shut()
}

// shut ends all goroutines of the run.
func (w *world) shut() {
	broken := w.checker.broken()
	for _, c := range w.clients {
		if !c.crashed && !c.closing {
			c.end(expired())
		}
		if !c.crashed {
			for _, k := range c.workers {
				k.die()
			}
		}
	}
	w.checker.holds = nil
	before := w.checker.violations
	w.checker.violations = nil
	w.run(w.now()+30*time.Second, func() bool {
		for _, c := range w.clients {
			if !c.ended {
				return false
			}
		}
		return true
	})
	for _, c := range w.clients {
		if !c.ended && !broken {
			w.checker.violation("%v does not close", c)
		}
	}
	late := w.checker.violations
	w.checker.violations = nil // or run would return at once
	// Let what Close has given up waiting for end by itself.
	w.run(w.now()+10*time.Second, func() bool { return false })
	w.checker.violations = append(append(before, late...), w.checker.violations...)
}

// seedJitter makes the library's own chance that of the seed. It depends on the time, and
// not on which of several goroutines comes first.
func seedJitter(seed uint64) {
	jitter.N = func(d time.Duration) time.Duration {
		r := rand.New(rand.NewPCG(seed, uint64(time.Now().UnixNano())))
		return time.Duration(r.Int64N(int64(d)))
	}
}
