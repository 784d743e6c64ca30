package node

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// A node that lost data may grant what it had granted before. So a fresh grant is a vote only with a
// proof that the node has all it was told since its memory began. One call of the acquire script is
// that proof. It is granted only where all of these hold, for the price of one read, and of a closer
// look now and then:
//
//  1. The process is one in which boot.lua has succeeded and named this memory. The script has the
//     memory in its text, and that text is sent to a server only behind boot.lua's answer, on the same
//     connection, which is dialled once and leads to one process (askAndLoad). Any other process,
//     after a restart or a failover, answers NOSCRIPT. Before Redis 7 scripts outlive their process: it
//     hands them on to its replicas and writes them to its files. There the script compares the
//     process, too.
//  2. The data is of this memory: the marker has its name. After a flush there is none, and another
//     one as soon as some client's boot.lua has found that something was lost. The answer is FORGOT.
//  3. The data is this process's own, not that of another master which it followed for a while. A closer
//     look finds out, see look: a full copy makes the marker's encoding another one (boot.lua says how),
//     and INFO tells of a change of masters without one.
//  4. The memory is kept. This client was told so by boot.lua, or the quorum found out (counts, in
//     internal/quorum). Else the grant is written, and is no vote.
//  5. It is a master and accepts writes: the grant is one.
//
// Each can be missing for a moment only, and what was true before must not stand in for it. These are
// the ways; TestNoSecondGrantWhenBootIsRefusedFirst and those beside it try them:
//
//   - boot.lua is refused (OOM, NOREPLICAS, READONLY, NOPERM, LOADING, MISCONF, BUSY), or its answer
//     does not come: no script that votes is loaded, so 1 is missing. If it was executed, that is as if
//     somebody else had asked. A node that refuses is Unverified, which the log, a metric and Check
//     tell. What refreshes and releases needs no memory, and goes on.
//   - The connection ends, or the process does, between boot.lua's answer and SCRIPT LOAD: the rest
//     fails. What came to be known was sent to the process that had answered.
//   - boot.lua or SCRIPT LOAD is executed twice, or late: the same process hears it, and boot.lua says
//     what it said before. The name for a memory that a late boot.lua might make a second time does not
//     do: the script has the microsecond in which the memory began in it as well.
//   - Two clients boot at once: a server does one after the other, and the second finds the first's name.
//   - A replica is promoted in between: boot.lua answers READONLY before, and another memory after.
//   - Clients of versions before this one load scripts in advance. Theirs have another text.
//
// All of that is for clients that are told the process (INFO). One that is not takes the marker at its
// word, unless it came from a dump, and asks now and then whether it is told by now. The first that is
// told, of a memory that such clients began, believes it if the process is older than that.
//
// The closer look is for a dump, for the process, and for when it was last made a master, which INFO
// tells. That takes some microseconds, so it has a script of its own, which is used when nobody has
// looked for lookEvery, or when a connection died since, or the server said that it is no master. To
// escape it a server must answer a request, give way, have its successor make promises, and get its
// place back, all within lookEvery and NodeTimeout (nine times NodeTimeout if this process is late: an
// older grant needs another proof, see prove), and without refusing a request in between; or have
// read no dump, and had no replica for so long that it does not know any more when it was made a master.
// To look for a dump in each acquire as well would close the first of these for a twentieth to a
// ninth of the script's time; but masters are not replaced that fast.
//
// With one node or two no vote is refused for what a node forgot: nobody could vote instead. But what it
// forgot are tokens, too. So they are asked as others are, and the acquire script has in it when the
// memory began, above which tokens go on: a process that is new does not know it, and one that gave way, and
// came back, is found by the closer look.
//
// Where a marker's encoding cannot be asked for, because the rights are missing or the server is
// another than Redis, the script does not look for it, and has another text, as that of a client that
// is not told the process. What leaves no trace at all stands in docs/guarantees.md.
//
// Simpler ways that were dropped: to have boot.lua run when a fence bucket is missing does not see a
// FLUSHALL after which another client has used the bucket first. To load the scripts in the same
// pipeline as boot.lua, one round trip less, loads them as well when boot.lua is refused: then a
// process with old data, and the old marker in it, votes as soon as it accepts writes. To have each
// connection boot before it is used for votes needs lanes with connections of their own.

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
	// votes in it. It must not block. nil: whatever its memory, its votes count, and say nothing of
	// it. It is asked for the sake of tokens, which go on above the beginning of a memory.
	Changed func(m Memory, take func())
}

// memory is what a lane has to know of its server's memory: the scripts with which a vote is
// asked for.
type memory struct {
	Memory
	usual, closer *scripts
	told          bool // the server has told of this memory
}

// scripts are those by which a server votes in this memory.
func (m *memory) scripts() []lua.Script {
	return []lua.Script{m.usual.acquire, m.usual.batch, m.closer.acquire, m.closer.batch}
}

// scripts are those for each kind of request, and for a batch.
type scripts struct {
	acquire, batch lua.Script
	names          [opBatch + 1][]byte
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

// blindLookEvery is lookEvery for who is not told the process: it looks whether it is by now, and each
// look that it is refused stands in the server's ACL LOG.
const blindLookEvery = 10 * time.Second

func (k *look) counts(m *memory, now time.Time) bool {
	return k != nil && k.at == m && !clock.Passed(now, k.until)
}

// saw notes a look that was sent at a time, when before was the last one.
func (s *Server) saw(before *look, m *memory, sent time.Time) {
	every := lookEvery
	if m.Blind != nil {
		every = blindLookEvery
	}
	s.looked.CompareAndSwap(before, &look{m, sent.Add(every)})
}

// doubt has the next vote take a look.
func (s *Server) doubt() { s.looked.Store(&look{}) }

// doubtful reports whether err may mean that the server was, or is, somebody else.
func doubtful(err error) bool {
	return err != nil && (!conn.IsReply(err) || conn.HasCode(err, "NOSCRIPT", "FORGOT", "READONLY", "MASTERDOWN", "LOADING"))
}

func newScripts(acquire, batch lua.Script) *scripts {
	return &scripts{acquire, batch, [...][]byte{
		opAcquire: []byte(acquire.SHA), opRepair: []byte(acquire.SHA), opRefresh: []byte(lua.Refresh.SHA),
		opRelease: []byte(lua.Release.SHA), opBatch: []byte(batch.SHA),
	}}
}

// always is the memory of servers that have no guard.
var always = &memory{Memory: Memory{State: MemoryKept}, usual: trusting, closer: trusting}

var trusting = newScripts(lua.Acquire, lua.Batch)

// unknown is the memory of a server before it was asked: no server knows its scripts.
var unknown = &memory{usual: newScripts(noScript, noScript), closer: newScripts(noScript, noScript)}

var noScript = lua.Script{SHA: strings.Repeat("0", 40)}

// SetGuard is called before the first request. A Cluster cannot be guarded.
func (n *Node) SetGuard(g Guard) {
	n.guard = &g
	n.server.memory.Store(unknown)
}

// Guardable reports whether the node can tell of its memory.
func (n *Node) Guardable() bool { return !n.IsCluster() }

// Memory is what the node said last, nil if it was never asked.
func (n *Node) Memory() *Memory {
	if m := n.server.memory.Load(); m.told {
		return &m.Memory
	}
	return nil
}

// Unverified is why the node's memory cannot be verified, so that it has no vote: it refuses boot.lua,
// or the scripts by which it would vote. nil: it does not, or was not asked.
func (n *Node) Unverified() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.unverified
}

// setUnverified notes that the node's memory cannot be verified, and why, or with nil that it was. If
// that is news, a goroutine tells, which ends when it has told the latest.
func (n *Node) setUnverified(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.unverified = err
	n.unsure.Store(err != nil)
	if n.Verified != nil && !n.telling && !n.closed && (err == nil) != (n.told == nil) {
		n.telling = true
		n.wg.Go(n.tellVerified)
	}
}

func (n *Node) tellVerified() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for (n.unverified == nil) != (n.told == nil) {
		n.told = n.unverified
		err := n.told
		n.mu.Unlock()
		n.Verified(n.name, err)
		n.mu.Lock()
	}
	n.telling = false
}

// Ask has a guarded node tell of its memory, and tells done, once. establish is the name of
// a memory that is to be established; "" for none.
func (n *Node) Ask(establish string, done func(Memory, error)) {
	s := n.server
	if !n.begin() {
		done(Memory{}, ErrClosed)
		return
	}
	go func() { // ends with the exchange
		defer n.wg.Done()
		if state := s.suspended.Load(); state != nil {
			done(Memory{}, state.err)
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), n.ExchangeTime())
		defer cancel()
		if err := s.takeLoading(ctx); err != nil {
			done(Memory{}, err)
			return
		}
		defer s.putLoading()
		_ = s.boot(ctx, establish, done)
	}()
}

// boot has the server say what it remembers, tells done, once, and then loads the scripts of that
// memory. The caller has the token of loading.
func (s *Server) boot(ctx context.Context, establish string, done func(Memory, error)) error {
	began := time.Now()
	err := s.askAndLoad(ctx, establish, done)
	switch {
	case err == nil:
		s.hasAnswered()
		s.loads.Add(1)
		s.n.setUnverified(nil)
	case errors.Is(err, conn.ErrLogin):
		s.suspend(err)
	case conn.IsReply(err), errors.Is(err, errUnexpected):
		s.n.setUnverified(err)
	default: // nothing is known
		s.judge(err, nil, began)
	}
	if doubtful(err) {
		s.doubt()
	}
	return err
}

// askAndLoad is on a connection of its own, which is dialled once: what the scripts prove is that the
// process that knows them is the one that answered. A connection of the client's pool would do as
// well, but the owner of the client may have all of them in use.
func (s *Server) askAndLoad(ctx context.Context, establish string, done func(Memory, error)) error {
	c := conn.DialOnce(s.from, s.n.timeout, func(*redis.Options) {})
	defer c.Close()
	before, asked := s.looked.Load(), time.Now()
	said, err := s.ask(ctx, c, establish)
	if err != nil {
		done(Memory{}, err)
		return err
	}
	next := said.memory(s.n.guard.Changed == nil)
	s.take(next)
	s.saw(before, next, asked)
	done(next.Memory, nil)
	return loadScripts(ctx, c, next.scripts())
}

// take makes next what the server remembers, as far as this client knows.
func (s *Server) take(next *memory) {
	m := s.memory.Load()
	take := func() { s.memory.Store(next) }
	if changed := s.n.guard.Changed; changed != nil && (!m.told || next.Name != m.Name || next.State != m.State) {
		changed(next.Memory, take)
	} else {
		take()
	}
}

// ask runs boot.lua. In the same pipeline it has the server know the scripts that need no memory, for
// they may be of use to it even if boot.lua is refused: they refresh and release what is held.
func (s *Server) ask(ctx context.Context, c *redis.Client, establish string) (answer, error) {
	g := s.n.guard
	boot := func(c redis.Cmdable) *redis.Cmd {
		return c.EvalSha(ctx, lua.Boot.SHA, []string{lua.Marker, lua.Past}, g.Name(), g.Limit.Microseconds(), establish)
	}
	pipe := c.Pipeline()
	cmd := boot(pipe)
	loaded := pipe.ScriptLoad(ctx, lua.Boot.Source)
	for _, script := range []lua.Script{lua.Refresh, lua.Release} {
		pipe.ScriptLoad(ctx, script.Source)
	}
	_, err := pipe.Exec(ctx)
	if conn.HasCode(cmd.Err(), "NOSCRIPT") && loaded.Err() == nil {
		cmd = boot(c)
	}
	switch {
	case conn.NotLoggedIn(cmd.Err()):
		return answer{}, conn.LoginRefused(cmd.Err())
	case conn.HasCode(cmd.Err(), "NOSCRIPT") && loaded.Err() != nil:
		return answer{}, withoutVote(loaded.Err())
	case cmd.Err() != nil:
		return answer{}, withoutVote(cmd.Err())
	case cmd.Val() == nil && conn.IsReply(err): // to the handshake: nothing was written
		return answer{}, conn.LoginRefused(err)
	case cmd.Val() == nil && err != nil:
		return answer{}, withoutVote(err)
	}
	said, err := heardOf(cmd.Val())
	if err != nil {
		return answer{}, withoutVote(err)
	}
	return said, nil
}

// withoutVote says what it means that boot, or part of it, has failed.
func withoutVote(err error) error {
	return fmt.Errorf("it has no vote, for it has not said whether it lost data: %w", err)
}

// loadScripts has them known to the process at the other end of c.
func loadScripts(ctx context.Context, c *redis.Client, scripts []lua.Script) error {
	pipe := c.Pipeline()
	for _, script := range scripts {
		pipe.ScriptLoad(ctx, script.Source)
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return fmt.Errorf("the lock scripts could not be loaded: %w", err)
	}
	return nil
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

var errUnexpected = errors.New("unexpected reply to boot.lua")

var memoryStates = map[string]MemoryState{"new": MemoryNew, "lost": MemoryLost, "kept": MemoryKept}

func heardOf(val any) (answer, error) {
	v, _ := val.([]any)
	if len(v) != 9 {
		return answer{}, fmt.Errorf("%w: %T", errUnexpected, val)
	}
	var texts [9]string
	for i, x := range v {
		texts[i] = fmt.Sprint(x)
	}
	state, known := memoryStates[texts[1]]
	age, err := strconv.ParseInt(texts[2], 10, 64)
	since, err2 := strconv.ParseInt(texts[6], 10, 64)
	if !known || err != nil || err2 != nil || texts[0] == "" {
		return answer{}, fmt.Errorf("%w: %v", errUnexpected, v)
	}
	began := time.Now().Add(-clock.Mul(age, time.Microsecond))
	return answer{
		name: texts[0], state: state, began: began, run: texts[3], version: texts[4], why: texts[5],
		since: since, raw: texts[7] == "1", promoted: texts[8],
	}, nil
}

// memory is what the server has said. always says that it votes in any.
func (a answer) memory(always bool) *memory {
	next := Memory{Name: a.name, State: a.state, Began: a.began}
	if a.run == "" || a.why != "" {
		next.Blind = errBlind
		if a.why != "" {
			next.Blind = fmt.Errorf("%w: %s", errBlind, a.why)
		}
	}
	in := lua.Memory{
		Name: a.name, Run: a.run, Strict: major(a.version) < 7, Raw: a.raw, Promoted: a.promoted, Since: a.since, Always: always,
	}
	usual := newScripts(lua.AcquireIn(in), lua.BatchIn(in))
	in.Closer = true
	return &memory{Memory: next, usual: usual, closer: newScripts(lua.AcquireIn(in), lua.BatchIn(in)), told: true}
}

var errBlind = errors.New("INFO does not tell run_id, or master_replid2")

// major is the first number of a version.
func major(version string) int {
	first, _, _ := strings.Cut(version, ".")
	n, _ := strconv.Atoi(first)
	return n
}
