package quorum

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/node"
)

// A quarantine keeps the votes out of nodes that may have forgotten locks: a fresh grant of
// such a node is written, so that the lease is on it, but does not count. Everything else that it
// says does: what it has by now, it was told after it forgot.
//
//	new or lost --Limit after it began--> kept        boot.lua, when it is asked next
//	all nodes new --a roll call, twice--> all kept    a deployment that begins
//	any --memory lost--> new or lost                  see internal/node/memory.go
//
// Why waiting is enough: a lease that was granted by a memory that is lost ends within its
// ttl, at most MaxTTL later, unless a majority confirmed a refresh; and whoever confirmed
// had the key then, so after the loss.
//
// Why a roll call is safe: it reads all nodes, and when they have answered, all again. If
// they are all new both times, and each has the same memory, there is an instant between at
// which none of these was established, so none had ever had a vote, and no lock rests on
// them: a majority would have to have lost its memory since it was granted. Each node is
// then established by the name of that memory. Whatever was granted after that instant is in
// it; and a node that has lost it has another name, which is refused. One reading would not
// do: a node might be new in it because it restarted after another client had
// established all, and the others because they had been asked before that. A node that could not be told
// then is told by the next roll call, by the same name, for which the same holds.
//
// While a roll call is under way, votes that do not count are in limbo: rounds that need
// them wait for its end, because a deployment that begins must not turn anybody away.
type quarantine struct {
	q    *Quorum
	wake chan struct{} // there is reason for a roll call. Buffered

	calling atomic.Bool // a roll call is under way, or is about to be. Written under mu

	found []*node.Memory // by the roll call that found all new; nil if none has. For run's goroutine

	mu      sync.Mutex     // guards what follows; nothing that blocks is called while it is held
	running bool           // the goroutine lives
	blind   bool           // it was told that nodes do not tell enough
	again   bool           // what was heard since the roll call began may not be in it
	rounds  map[*round]int // that wait for the end of the roll call, numbered as they came
	out     uint64         // bit i: node i was told to be in quarantine
}

// A Quarantined is how a node stands that may have forgotten locks.
type Quarantined struct {
	Memory node.Memory
	Until  time.Time
}

func (e *Quarantined) Error() string {
	why := "it was restarted, or failed over, and may have forgotten locks"
	if e.Memory.State == node.MemoryNew {
		why = "it has no memory of any lock, and not all nodes are new: it was restarted, or flushed, or added"
	}
	return fmt.Sprintf("quarantined until %s (for %v): %s",
		e.Until.Format("15:04:05.000"), time.Until(e.Until).Round(time.Millisecond), why)
}

// counts reports whether a fresh grant is a vote that was given in memory m, by a node
// whose memory is now as said last.
func counts(m, now *node.Memory) bool {
	return m.State == node.MemoryKept || now != nil && now.Name == m.Name && now.State == node.MemoryKept
}

// verdict is what the answers to a roll call come to.
type verdict uint8

const (
	asItIs    verdict = iota // some have a vote, the others wait
	lookAgain                // another client may be about to establish them
	allNew                   // all are new, and were so before: they are to be established
)

// judge compares what all nodes answered, nil for one that did not, with what they had
// answered before any of them was asked again.
func judge(before, now []*node.Memory, need int) verdict {
	fresh, kept, same := 0, 0, len(before) == len(now)
	for i, m := range now {
		switch {
		case m == nil:
			return asItIs
		case m.State == node.MemoryNew:
			fresh++
		case m.State == node.MemoryKept:
			kept++
		}
		same = same && before[i] != nil && before[i].Name == m.Name && before[i].State == m.State
	}
	switch {
	case fresh == len(now) && same:
		return allNew
	case fresh == len(now), fresh > 0 && kept > 0 && kept < need:
		return lookAgain
	}
	return asItIs
}

// newQuarantine has all nodes of q guarded.
func newQuarantine(q *Quorum) *quarantine {
	if q.Quarantine <= 0 { // a sum that wrapped: no node would ever be out, and nobody would know
		panic(fmt.Sprintf("quorum: a quarantine of %v", q.Quarantine))
	}
	k := &quarantine{q: q, wake: make(chan struct{}, 1), rounds: map[*round]int{}}
	for _, n := range q.Nodes {
		n.SetGuard(node.Guard{Limit: q.Quarantine, Name: q.MemoryName, Changed: k.changed})
	}
	return k
}

// Quarantined reports whether node i is, as far as is known.
func (q *Quorum) Quarantined(i int) bool {
	k := q.quarantine
	if k == nil {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.out&(1<<i) != 0
}

// changed is told of a node's memory before there is a vote in it. The node takes it while mu is
// held, so that a roll call either is not over before that, or is followed by another: one
// that ended in between would have seen the memory before, and nobody would ask the node again.
func (k *quarantine) changed(m node.Memory, take func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer take()
	if m.Blind != nil && !k.blind && k.q.OnNoInfo != nil {
		k.blind = k.q.start(func() { k.q.OnNoInfo(m.Blind) })
	}
	if m.State == node.MemoryKept && !k.running {
		return
	}
	k.again = true
	k.calling.Store(true)
	if !k.running {
		k.running = k.q.start(k.run)
		k.calling.Store(k.running)
		return
	}
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// maxLooks bounds how often nodes are asked which another client seems to be establishing.
const maxLooks = 8

// run makes roll calls for as long as a node is in quarantine.
func (k *quarantine) run() {
	for k.q.ctx.Err() == nil {
		k.mu.Lock()
		k.again = false
		select { // what it was woken for will be in this one
		case <-k.wake:
		default:
		}
		k.mu.Unlock()
		k.call()
		wait, ended := k.close()
		if ended {
			return
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-k.wake:
		case <-k.q.ctx.Done():
		}
		timer.Stop()
		k.begin()
	}
	k.close()
}

func (k *quarantine) begin() {
	k.mu.Lock()
	k.calling.Store(true)
	k.mu.Unlock()
}

// call is one roll call.
func (k *quarantine) call() {
	before := k.ask(k.found)
	for look := range maxLooks {
		now := k.ask(nil)
		switch judge(before, now, k.q.need) {
		case asItIs:
			return
		case allNew:
			k.found = now
			k.ask(now)
			return
		}
		before = now
		if look > 0 && !k.pause(time.Millisecond<<look) {
			return
		}
	}
}

func (k *quarantine) pause(d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-k.q.ctx.Done():
		return false
	}
}

// ask has all nodes tell of their memories that are not known to be kept. Those in
// establish, if any, are established.
func (k *quarantine) ask(establish []*node.Memory) []*node.Memory {
	type answer struct {
		i   int
		m   node.Memory
		err error
	}
	all := make([]*node.Memory, len(k.q.Nodes))
	answers := make(chan answer, len(all))
	asked := 0
	for i, n := range k.q.Nodes {
		if m := n.Memory(); m != nil && m.State == node.MemoryKept {
			all[i] = m
			continue
		}
		name := ""
		if establish != nil {
			name = establish[i].Name
		}
		asked++
		n.Ask(name, func(m node.Memory, err error) { answers <- answer{i, m, err} })
	}
	timer := time.NewTimer(node.CloseTime(k.q.NodeTimeout)) // each step has a deadline of its own, but for what the owner of a client does
	defer timer.Stop()
	for range asked {
		select {
		case a := <-answers:
			if a.err == nil {
				all[a.i] = &a.m
			}
		case <-timer.C:
			return all
		case <-k.q.ctx.Done():
			return all
		}
	}
	return all
}

// retryAsk is when a node is asked again that did not answer when its quarantine was over, or that is
// new: another one may have answered too late for all to be established together.
const retryAsk = time.Second

// close ends a roll call, unless there is reason for another at once: rounds that waited for
// it go on, and whoever watches is told. It says how long to wait for the next, or that there
// is nothing to wait for, and then run has ended.
func (k *quarantine) close() (wait time.Duration, ended bool) {
	type news struct {
		i int
		e Quarantined
	}
	var told []news
	k.mu.Lock()
	if k.again && k.q.ctx.Err() == nil {
		k.mu.Unlock()
		return 0, false
	}
	k.calling.Store(false)
	wait = -1
	for i, n := range k.q.Nodes {
		m := n.Memory()
		if m == nil {
			continue
		}
		e := Quarantined{Memory: *m}
		out := m.State != node.MemoryKept
		if out {
			e.Until = m.Began.Add(k.q.Quarantine)
			left := time.Until(e.Until) + time.Millisecond
			if left <= 0 || m.State == node.MemoryNew && left > retryAsk {
				left = retryAsk
			}
			if wait < 0 || left < wait {
				wait = left
			}
		}
		if out != (k.out&(1<<i) != 0) {
			k.out ^= 1 << i
			told = append(told, news{i, e})
		}
	}
	k.running = wait >= 0 && k.q.ctx.Err() == nil
	rounds := k.rounds
	k.rounds = map[*round]int{}
	k.mu.Unlock()
	for _, r := range slices.SortedFunc(maps.Keys(rounds), func(a, b *round) int { return rounds[a] - rounds[b] }) {
		r.reconsider()
	}
	for _, t := range told {
		if k.q.OnQuarantine != nil {
			k.q.OnQuarantine(t.i, t.e)
		}
	}
	return wait, wait < 0
}

// join has r reconsidered at the end of the roll call, and says whether one is under way.
func (k *quarantine) join(r *round) bool {
	if k == nil {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.calling.Load() {
		return false
	}
	if _, joined := k.rounds[r]; !joined {
		k.rounds[r] = len(k.rounds)
	}
	return true
}

// open reports whether a roll call is under way.
func (k *quarantine) open() bool { return k != nil && k.calling.Load() }
