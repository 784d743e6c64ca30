package node

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/lua"
)

// A node that lost its memory may grant what it had granted before. How that is noticed, at
// no cost but two reads in the acquire script:
//
// The name of the node's memory stands in a marker on the node and in the text of its acquire
// script. Whatever loses memory leaves one of five things: another process or another
// master, which does not know the script (NOSCRIPT); no marker (FORGOT); a marker of
// a later memory, because somebody else noticed first (FORGOT); a marker that came with
// a dump (FORGOT), in a master that was another's replica meanwhile: it knows the script from
// before, but had to take all of the other's data for its own; or such a master that needed no dump,
// for the two were in step (FORGOT, to who looks closer). Either way boot.lua runs
// before the request goes again, and the vote comes with what boot.lua said. What leaves none
// of these stands in docs/guarantees.md.
//
// The closer look is for when the process was last made a master, which INFO tells. That takes some
// microseconds, so it has a script of its own, which is used when nobody has looked for
// lookEvery, or when a connection died since, or the server said that it is no master. To escape it
// a server must answer a request, give way, have its successor make promises, and get its
// place back, all within lookEvery and NodeTimeout, and without refusing a request in between.
//
// How a marker from a dump is told from one that was written here stands in boot.lua. Where
// it cannot be, because the rights are missing or the server is another than Redis, the script
// does not look for it, and has another text, as that of who is not told the process.
//
// A script must not become known to a server whose marker is out of date: an old marker, from
// a disk or a replica, would pass for the truth. So a script is loaded only behind a
// boot.lua in the same pipeline, which is the same connection and so the same process: it
// has put that right by then. Nor may the client take another name for the truth than the
// one of the script that it has loaded; if boot.lua gives another, it all begins again.
//
// Before Redis 7 scripts outlive their server: it hands them on to its replicas and writes them
// to its files. There the acquire script compares the process as well, which costs it some
// microseconds.
//
// The simpler way, to have boot.lua run when a fence bucket is missing, does not see a
// FLUSHALL after which another client has used the bucket first.

// MemoryState says whether a node's memory can be relied upon.
type MemoryState uint8

// The states of memories.
const (
	MemoryNew  MemoryState = iota // the node never had a vote, as far as it knows
	MemoryLost                    // it had, and may have forgotten locks
	MemoryKept                    // it knows all locks that count
)

// Memory is what a server has said of its memory.
type Memory struct {
	Name  string      // changes when something was lost
	State MemoryState // as of that answer
	Began time.Time   // by the client's clock, a round trip late at most
	Blind error       // why the server does not tell its process: then not all that is lost is noticed
}

// Guard has a node tell of its memory. A server's memory is looked at before its first vote.
type Guard struct {
	Limit time.Duration // how long a node that forgot has no vote
	Name  func() string // a name for a memory that begins: letters, digits and -, lua.MaxName at most, never the same twice

	// Changed hears that the node's memory is another one than it was, or that its state
	// is. It has to call take, which makes m what Memory says, and from then on there may be
	// votes in it. It must not block.
	Changed func(m Memory, take func())
}

// memory is what a lane has to know of its server's memory: the scripts with which a vote is
// asked for.
type memory struct {
	Memory
	usual, closer *scripts
	told          bool // the server has told of this memory
}

// scripts are those for each kind of request, and for a batch.
type scripts struct {
	acquire, batch lua.Script
	names          [opRelease + 1]any
}

// A look is a request whose answer told that the server is what it was when it told of its
// memory.
//
// What a lane has heard by its look counts only if nobody doubts since it was sent: it puts its look
// in the place of the one that was there then, or not at all, and a doubt is a look of its own
// that counts for nothing.
type look struct {
	at    *memory
	until time.Time // it counts no longer than that, by either clock
}

// lookEvery is how long a look counts. Who lets a replica take over, and the first come
// back, has waited much longer to find out that a server is gone.
const lookEvery = 100 * time.Millisecond

func (k *look) counts(m *memory, now time.Time) bool {
	return k != nil && k.at == m && !clock.Passed(now, k.until)
}

// saw notes a look that was sent at a time, when before was the last one.
func (s *server) saw(before *look, m *memory, sent time.Time) {
	s.looked.CompareAndSwap(before, &look{m, sent.Add(lookEvery)})
}

// doubt has the next vote take a look.
func (s *server) doubt() { s.looked.Store(&look{}) }

// doubtful reports whether err may mean that the server was, or is, somebody else.
func doubtful(err error) bool {
	return err != nil && (!isReply(err) || hasCode(err, "NOSCRIPT", "FORGOT", "READONLY", "MASTERDOWN", "LOADING"))
}

func newScripts(acquire, batch lua.Script) *scripts {
	return &scripts{acquire, batch, [...]any{
		opAcquire: acquire.SHA, opRepair: acquire.SHA, opRefresh: lua.Refresh.SHA, opRelease: lua.Release.SHA,
	}}
}

// always is the memory of servers that have no guard.
var always = &memory{Memory: Memory{State: MemoryKept}, usual: trusting, closer: trusting}

var trusting = newScripts(lua.Acquire, lua.Batch)

// unknown is the memory of a server before it was asked: no server knows its scripts.
var unknown = &memory{usual: newScripts(noScript, noScript), closer: newScripts(noScript, noScript)}

var noScript = lua.Script{SHA: strings.Repeat("0", 40)}

// SetGuard is called before the first request. A Cluster cannot be guarded, nor the only node
// of a quorum.
func (n *Node) SetGuard(g Guard) {
	n.guard = &g
	n.notices.home.memory.Store(unknown)
}

// Guardable reports whether the node can tell of its memory.
func (n *Node) Guardable() bool { return n.notices.router == nil && !n.alone }

// Memory is what the node said last, nil if it was never asked.
func (n *Node) Memory() *Memory {
	if m := n.notices.home.memory.Load(); m.told {
		return &m.Memory
	}
	return nil
}

// Ask has a guarded node tell of its memory, and tells done, once. establish is the name of
// a memory that is to be established; "" for none.
func (n *Node) Ask(establish string, done func(Memory, error)) {
	s := n.notices.home
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		done(Memory{}, ErrClosed)
		return
	}
	n.wg.Add(1)
	n.mu.Unlock()
	go func() { // ends with the exchange
		defer n.wg.Done()
		if state := s.suspended.Load(); state != nil {
			done(Memory{}, state.err)
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), n.exchangeTime())
		defer cancel()
		if err := s.takeLoading(ctx); err != nil {
			done(Memory{}, err)
			return
		}
		m, err := s.boot(ctx, establish)
		s.putLoading()
		done(m, err)
	}()
}

var errRestless = errors.New("its memory was another one each time it was asked")

// boot finds out about the server's memory, and loads the scripts for it. The caller has the
// token of loading.
func (s *server) boot(ctx context.Context, establish string) (Memory, error) {
	for range 4 {
		m := s.memory.Load()
		before, asked := s.looked.Load(), time.Now()
		said, err := s.ask(ctx, establish, m)
		if err != nil {
			return Memory{}, err
		}
		next := said.memory()
		take := func() { s.memory.Store(next) }
		if !m.told || next.Name != m.Name || next.State != m.State {
			s.n.guard.Changed(next.Memory, take)
		} else {
			take()
		}
		s.saw(before, next, asked)
		if next.closer.acquire == m.closer.acquire { // which is loaded, and so is the usual one
			s.loads.Add(1)
			return next.Memory, nil
		}
	}
	return Memory{}, errRestless
}

// ask runs boot.lua, and then, on the same connection, loads the scripts for m.
func (s *server) ask(ctx context.Context, establish string, m *memory) (answer, error) {
	g := s.n.guard
	pipe := s.client.Pipeline()
	pipe.ScriptLoad(ctx, lua.Boot.Source)
	cmd := pipe.EvalSha(ctx, lua.Boot.SHA, []string{lua.Marker, lua.Past}, g.Name(), g.Limit.Microseconds(), establish)
	if m.told {
		for _, of := range []*scripts{m.usual, m.closer} {
			pipe.ScriptLoad(ctx, of.acquire.Source)
			pipe.ScriptLoad(ctx, of.batch.Source)
		}
	}
	pipe.ScriptLoad(ctx, lua.Refresh.Source)
	pipe.ScriptLoad(ctx, lua.Release.Source)
	if _, err := pipe.Exec(ctx); err != nil {
		return answer{}, fmt.Errorf("asking for its memory: %w", err)
	}
	return heardOf(cmd.Val())
}

// answer is that of boot.lua.
type answer struct {
	name, run, version, why string
	state                   MemoryState
	began                   time.Time
	since                   int64 // when it began, in microseconds of the node's clock
	raw                     bool
	promoted                string
}

var memoryStates = map[string]MemoryState{"new": MemoryNew, "lost": MemoryLost, "kept": MemoryKept}

func heardOf(val any) (answer, error) {
	v, _ := val.([]any)
	if len(v) != 9 {
		return answer{}, fmt.Errorf("unexpected reply %T to boot", val)
	}
	var texts [9]string
	for i, x := range v {
		texts[i] = fmt.Sprint(x)
	}
	state, known := memoryStates[texts[1]]
	age, err := strconv.ParseInt(texts[2], 10, 64)
	since, err2 := strconv.ParseInt(texts[6], 10, 64)
	if !known || err != nil || err2 != nil || texts[0] == "" {
		return answer{}, fmt.Errorf("unexpected reply %v to boot", v)
	}
	began := time.Now().Add(-time.Duration(age) * time.Microsecond)
	return answer{
		name: texts[0], state: state, began: began, run: texts[3], version: texts[4], why: texts[5],
		since: since, raw: texts[7] == "1", promoted: texts[8],
	}, nil
}

// memory is what the server has said.
func (a answer) memory() *memory {
	informed := a.run != ""
	next := Memory{Name: a.name, State: a.state, Began: a.began}
	if !informed || a.why != "" {
		next.Blind = errBlind
		if a.why != "" {
			next.Blind = fmt.Errorf("%w: %s", errBlind, a.why)
		}
	}
	run := ""
	if major(a.version) < 7 {
		run = a.run
	}
	in := lua.Memory{Name: a.name, Run: run, Informed: informed, Raw: a.raw, Promoted: a.promoted, Since: a.since}
	usual := newScripts(lua.AcquireIn(in), lua.BatchIn(in))
	in.Closer = true
	return &memory{Memory: next, usual: usual, closer: newScripts(lua.AcquireIn(in), lua.BatchIn(in)), told: true}
}

var errBlind = errors.New("INFO does not tell run_id, or master_replid2")
