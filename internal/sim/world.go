package sim

import (
	"cmp"
	"container/heap"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// A world is everything in one run: servers, clients, the network between them and what is
// to happen. All of it belongs to the loop, the one goroutine that calls run, except the actions.
//
// A step is: do the next event; wait until every goroutine of the system under test rests;
// take their actions in a fixed order; check the invariants. Timers of
// the system fire between events, each at an instant of its own, and are steps too if
// anything comes of them.
//
// Chance is drawn from many small generators, so that nothing depends on the order in which
// goroutines ran: each connection has one for its delays. Two connections that a client
// makes to a server in the same instant have the same, and do the same until more than
// their names tells them apart.
type world struct {
	plan    *plan
	began   time.Time
	net     *rand.Rand // faults
	app     *rand.Rand // of the programs
	readers *rand.Rand // of those that read
	servers []*server
	clients []*client        // all there ever were
	slots   []*client        // those that live
	parcels []*parcel        // detached locks, the oldest first
	lapsing int              // how many were detached when the faults had ended: nobody attaches these
	healed  bool             // the time of faults is over
	links   map[[2]int]*link // by client and server

	events events
	seq    int

	cache   cache
	checker checker
	traced  bool      // there is a trace
	out     io.Writer // where it goes
	steps   int
	scripts int // executed

	mu    sync.Mutex // guards what follows
	named map[string]*client
	news  []action
	awake chan struct{} // has an entry when there may be actions
}

// event is something to be done by the loop at a time.
type event struct {
	at time.Duration
	n  int // of two at one time, the one that was put in first goes first
	do func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].n < e[j].n
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	(*e)[len(*e)-1] = event{}
	*e = (*e)[:len(*e)-1]
	return last
}

// action is something that a goroutine of the system under test has done: written to a connection,
// dialled, returned from a call. Its place among others of the same step depends on what
// it is, not on who ran first.
type action struct {
	client, server int
	text           string
	do             func() // by the loop
	on             *conn  // of a write, whose text is what is written
}

func newWorld(p *plan, out io.Writer) *world {
	w := &world{
		plan: p, began: time.Now(), out: out, traced: out != nil, awake: make(chan struct{}, 1),
		net: rand.New(rand.NewPCG(p.seed, 1)), app: rand.New(rand.NewPCG(p.seed, 2)),
		readers: rand.New(rand.NewPCG(p.seed, 3)),
		links:   map[[2]int]*link{}, named: map[string]*client{},
	}
	w.checker.w, w.cache.w = w, w
	clock.AfterFunc = w.afterFunc
	for i := range p.nodes {
		w.servers = append(w.servers, newServer(w, i))
		if p.deployed {
			w.servers[i].deploy()
		}
	}
	for slot := range p.clients {
		w.slots = append(w.slots, w.addClient(slot))
	}
	return w
}

// now is the time since the world began.
func (w *world) now() time.Duration { return time.Since(w.began) }

// after has the loop do something, later. Two things put in for the same instant happen in
// that order.
func (w *world) after(d time.Duration, do func()) { w.at(w.now()+d, do) }

func (w *world) at(at time.Duration, do func()) {
	w.seq++
	heap.Push(&w.events, event{at, w.seq, do})
}

// report hands an action of the system under test to the loop. Writes to one connection in the
// same step are one: they must keep their order.
func (w *world) report(n action) {
	w.mu.Lock()
	before := -1
	if n.on != nil {
		before = slices.IndexFunc(w.news, func(o action) bool { return o.on == n.on })
	}
	if before >= 0 {
		w.news[before].text += n.text
	} else {
		w.news = append(w.news, n)
	}
	w.mu.Unlock()
	select {
	case w.awake <- struct{}{}:
	default:
	}
}

// quiesce waits until all goroutines are blocked, and takes their actions.
func (w *world) quiesce() {
	for {
		synctest.Wait()
		w.mu.Lock()
		all := w.news
		w.news = nil
		w.mu.Unlock()
		select {
		case <-w.awake:
		default:
		}
		if len(all) == 0 {
			return
		}
		slices.SortStableFunc(all, func(a, b action) int {
			return cmp.Or(cmp.Compare(a.client, b.client), cmp.Compare(a.server, b.server),
				strings.Compare(a.text, b.text))
		})
		for _, n := range all {
			if n.on != nil {
				n.on.written([]byte(n.text))
			} else {
				n.do()
			}
		}
	}
}

// run makes steps until done says so, the time is up, or an invariant is broken.
func (w *world) run(until time.Duration, done func() bool) {
	for {
		w.quiesce()
		w.steps++
		w.checker.check()
		if w.checker.broken() || done() || w.now() >= until {
			return
		}
		wait := until - w.now()
		if len(w.events) > 0 {
			wait = min(wait, w.events[0].at-w.now())
		}
		if wait > 0 {
			select {
			case <-w.awake:
			case <-time.After(wait):
			}
			continue // both may have come in one instant
		}
		for at := w.events[0].at; len(w.events) > 0 && w.events[0].at == at; {
			heap.Pop(&w.events).(event).do()
		}
	}
}

// logf writes a line of the trace.
func (w *world) logf(format string, args ...any) {
	if !w.traced {
		return
	}
	line := fmt.Sprintf("%12.6f  ", float64(w.now())/float64(time.Millisecond)) + fmt.Sprintf(format, args...) +
		"\n"
	_, _ = io.WriteString(w.out, line)
}

// chance is true once in so many times, never for 0.
func chance(r *rand.Rand, oneIn int) bool { return oneIn > 0 && r.IntN(oneIn) == 0 }

// between is a time from low to high, spread evenly over orders of magnitude rather than
// over the range: short times are as interesting as long ones.
func between(r *rand.Rand, low, high time.Duration) time.Duration {
	for low*4 < high {
		if r.IntN(2) == 0 {
			high = low * 4
			break
		}
		low *= 4
	}
	return low + time.Duration(r.Int64N(int64(high-low)+1))
}
