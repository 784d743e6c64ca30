package node

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/link"
	"github.com/flightlock/flightlock/lua"
)

// Epoch is what a server has reported of its epoch, and how it is asked for votes in that: by which
// scripts, and with which arguments. It is immutable.
//
// An epoch is a period during which a node has lost no data. A node that lost data may grant what it
// had granted before. So a new grant is a vote only with a proof that the node has all that it was sent
// since its epoch began. One call of the acquire script is that proof. It grants only where all of
// these hold, for the price of one read, and of a strict check now and then:
//
//  1. The process is one in which boot.lua has succeeded and named this epoch. A vote is asked for only
//     on a connection on which that has happened (Encode takes the epoch from the session), and a
//     connection is dialed once and leads to one process. A proxy may keep it over a change of servers,
//     so the script names the process in its text, which is sent only after boot.lua's reply, on the
//     same connection (bootOn): a process after a restart or a failover answers NOSCRIPT. Before Redis 7
//     scripts outlive their process: it passes them to its replicas and writes them to its files. There
//     the script compares the process, too. So it does where it is sent as a text (see scripts.go), which
//     any process executes, and which names none: else the next process would know that name.
//  2. The data is of this epoch: the marker has its name, which is an argument. After a flush there is
//     no marker, and another one as soon as some client's boot.lua has found the loss. The reply is
//     EPOCH.
//  3. The data is this process's own, not that of another master which it followed for a while. A
//     strict check finds that (see verification): a full copy changes the encoding of the marker
//     (boot.lua explains it), and INFO reports a change of masters without one.
//  4. The epoch is established. boot.lua replied so, or the quorum found out (isVote,
//     in internal/quorum/votes.go). Otherwise the grant is written, and is no vote.
//  5. The server is a master and accepts writes: the grant is one.
//
// The proof rests on these facts of Redis:
//
//   - A script runs atomically, and what is sent on a connection reaches the process that answered the
//     command before it on that connection.
//   - run_id is another one in each process, and the script cache of Redis 7 and later ends with it.
//   - A replica refuses writes with READONLY, and a process that is promoted keeps the replication id
//     that it had as a replica, with an offset (master_replid2, second_repl_offset).
//   - A string that SET began and APPEND ended has the encoding raw; a short one that was read from a
//     dump has another.
//   - The text of a script is its name: no server takes one process's script for another's.
//
// Each of the five conditions can fail for a moment only, and what was true before must not stand in
// for it. These are the ways; TestNoSecondGrantWhenBootIsRefusedFirst and those beside it try them:
//
//   - boot.lua is refused (OOM, NOREPLICAS, READONLY, NOPERM, LOADING, MISCONF, BUSY), or its reply is
//     lost: the session has no epoch, and asks for no vote, so 1 does not hold. If it was executed, that
//     is as if another client had run it. A node that refuses is Unverified, which the log, a metric and
//     Check report. Refresh and release need no epoch, and continue: a release without one grants
//     nothing.
//   - The connection ends, or the process does, between boot.lua's reply and SCRIPT LOAD: the rest
//     fails, and what was written behind it is lost. What was loaded was sent to the process that had
//     answered. If it refuses to load a script, the acquire behind that is answered with NOSCRIPT.
//   - boot.lua or SCRIPT LOAD is executed late: in the same process, and boot.lua reports what it
//     reported before, or begins an epoch in which nobody has asked for anything. Each call brings a
//     name of its own, and is sent once, so no name begins two epochs.
//   - Two clients run boot.lua at once: a server runs one after the other, and the second finds the
//     name that the first wrote.
//   - A replica is promoted in between: boot.lua answers READONLY before, and another epoch after.
//   - Another client has loaded the scripts, for this process or for any: that proves nothing, and need
//     not. The session and the arguments are the asking client's own.
//
// All of that needs the process (INFO). A client to which a node does not report it counts no vote of
// that node, as if boot.lua were refused. The first client that may see the process, in an epoch that
// others began, believes the marker if the process is older than the epoch.
//
// The strict check is for a dump, for the process, and for when it was last promoted, which INFO
// reports. That takes some microseconds, so it is made only when the last one is older than
// verifyEvery, or when a connection died since, or the server reported that it is no master. To escape
// it a server must answer a request, step down, have its successor make promises, and get its place
// back, all within verifyEvery and NodeTimeout (nine times NodeTimeout if this process is late: an older
// grant is no vote, see request.tooOld; a second after its poll for one that comes by message, see
// quorum.MaxVoteAge), and without refusing a request in between; or have read no dump, and had no
// replica for so long that it does not know any more when it was promoted. To check for a dump in each
// acquire as well would prevent the first of these for a twentieth to a ninth of the script's time; but
// masters are not replaced that fast.
//
// With one node or two, no vote is refused because a node lost data: no other node could vote instead.
// So 2 and 4 do not apply, nor does the check for a dump, which is of the marker. But lost data includes
// tokens: such nodes boot as others do, and the acquire brings when the epoch began, above which tokens
// continue. A new process gets a new connection, and does not know the script; one that stepped down and
// came back is found by the strict check.
//
// Where a marker's encoding cannot be read, because the rights are missing or the server is not Redis,
// the strict check leaves that out. What leaves no trace at all is listed in docs/guarantees.md.
//
// Simpler ways that were rejected: to run boot.lua when a fence bucket is missing does not notice a
// FLUSHALL after which another client has used the bucket first. To load the scripts in the same
// pipeline as boot.lua, one round trip less, loads them also when boot.lua is refused, or in a process
// whose name is not known before its reply. To leave the process out of the text, so that there is one
// text for all servers, would rely on there being no proxy. (boot.lua itself is loaded in the pipeline that
// runs it, at a client's first boot: its text names no process.)
type Epoch struct {
	Name   string     // changes when data was lost
	State  EpochState // as of that report
	Began  time.Time  // by the client's clock, a round trip late at most
	Server string     // product and version, as "Valkey 8.0.1"

	// Apart is why scripts may not access keys of two hash slots, so that none can compare the marker: the
	// server is one of several, and its votes count in any epoch. nil: they may, or that is not known.
	Apart error

	scripts       *scripts // by which the server votes
	process       string   // whose they are; "": of any
	marked        bool     // they compare the marker
	usual, strict []byte   // the first arguments of these, encoded: see lua.Epoch.Args
}

// EpochState says whether a node's data can be relied upon.
type EpochState uint8

// The states of epochs.
const (
	EpochNew  EpochState = iota // the node never had a vote, as far as it knows
	EpochLost                   // it had, and may have lost locks
	EpochKept                   // it has all locks that count
)

// Guard has a node report its epoch, before its first vote.
type Guard struct {
	Limit time.Duration // how long a node that lost data has no vote
	// Name returns a name for an epoch that begins: letters, digits and -, lua.MaxName at most, never the same
	// twice.
	Name func() string

	// Relied reports whether votes have counted in epochs that were not established. nil: no.
	Relied func() bool

	// Changed is called when the node's epoch, or the state of its epoch, has changed. It must call
	// store, which makes e what Epoch returns, and from then on there may be votes in it. It must not
	// block. nil: the node's votes count in any epoch, and do not report it. It is asked for the sake of
	// tokens, which continue above the beginning of an epoch.
	Changed func(e Epoch, store func())
}

// anyEpoch is that of servers without a guard. unknownEpoch is that of a server that has not reported:
// no server knows its script. Neither has a name.
var (
	anyEpoch = &Epoch{State: EpochKept, Server: "Redis", scripts: scriptsIn(""),
		usual: noCheck, strict: noCheck}
	noCheck      = encodeArgs(lua.Epoch{}.Args(false))
	unknownEpoch = &Epoch{
		scripts: newScripts(noScript, lua.Release, noScript, noScript, lua.SharedRelease),
		usual:   grantNothing, strict: grantNothing,
	}
	noScript     = lua.Script{SHA: strings.Repeat("0", 40)}
	grantNothing = encodeArgs(lua.GrantNothing)
)

// newEpoch is one in which the server votes by in.
func newEpoch(in lua.Epoch) *Epoch {
	return &Epoch{
		State: EpochKept, scripts: scriptsIn(in.Run),
		process: in.Run, marked: in.Name != "",
		usual: encodeArgs(in.Args(false)), strict: encodeArgs(in.Args(true)),
	}
}

func encodeArgs(args [3]string) (b []byte) {
	for _, arg := range args {
		b = link.AppendArg(b, arg)
	}
	return b
}

// apart has the server, which is one of several, vote in any epoch: its scripts run on the others as well.
func (e *Epoch) apart(why error) {
	e.Apart = why
	e.scripts, e.process, e.marked, e.usual, e.strict = anyEpoch.scripts, "", false, anyEpoch.usual,
		anyEpoch.strict
}

// A verification is a request whose reply proved that the server is the one that reported its epoch.
//
// What a request proves counts only if nobody has called invalidate since it was sent: its verification
// replaces the verification that was there when it was sent, or is not recorded at all, and
// invalidate stores one that counts for nothing.
type verification struct {
	of    *Epoch
	until time.Time // it counts no longer than that, by either clock
}

// verifyEvery is how long a verification counts. An operator that promotes a replica, and then the
// old master again, has waited much longer to find that a server is gone.
const verifyEvery = 100 * time.Millisecond

func (v *verification) counts(e *Epoch, now time.Time) bool {
	return v != nil && v.of == e && !clock.Passed(now, v.until)
}

// recordVerified records a verification that was sent at a time when before was the last one.
func (s *Server) recordVerified(before *verification, e *Epoch, sent time.Time) {
	s.verified.CompareAndSwap(before, &verification{e, sent.Add(verifyEvery)})
}

// invalidate has the next vote make a strict check.
func (s *Server) invalidate() { s.verified.Store(&verification{}) }

// invalidates reports whether err may mean that the server was replaced, or is another one.
func invalidates(err error) bool {
	return err != nil && (!conn.IsReply(err) || conn.Says(err, conn.Replaced))
}

// SetGuard is called before the first request. A Cluster cannot be guarded.
func (n *Node) SetGuard(g Guard) {
	n.guard = &g
	n.server.epoch.Store(unknownEpoch)
}

// Guardable reports whether the node can report its epoch.
func (n *Node) Guardable() bool { return !n.IsCluster() }

// Epoch is what the node reported last, nil if it was never asked.
func (n *Node) Epoch() *Epoch {
	if e := n.server.epoch.Load(); e.Name != "" {
		return e
	}
	return nil
}

// TakesOffers reports whether the node grants a key to the next contender that has made an offer. A Cluster
// does not, because it has no inboxes; nor does an endpoint of one.
func (n *Node) TakesOffers() bool { return !n.IsCluster() && n.Apart() == nil }

// Apart is why scripts on the node may not access keys of two hash slots, as was found when it was asked for
// its epoch last; nil: they may, or that is not known. There is no quarantine with such a node: see Epoch.
func (n *Node) Apart() error {
	if n.server == nil {
		return nil
	}
	return n.server.epoch.Load().Apart
}

// Unverified is why the node's epoch cannot be verified, so that it has no vote: it refuses boot.lua,
// or the scripts by which it would vote, or does not report its process. nil: it does not, or was not asked.
func (n *Node) Unverified() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.unverified
}

// setUnverified records why the node's epoch cannot be verified, or with nil that it was, and reports it if
// that is a change. It is for the goroutine that boots.
func (n *Node) setUnverified(err error) {
	n.mu.Lock()
	changed := (err == nil) != (n.unverified == nil)
	n.unverified = err
	n.mu.Unlock()
	if changed && n.Verified != nil {
		n.Verified(n.name, err)
	}
}

// Boot has a guarded node report its epoch, and calls done, once. establish is the name of an epoch
// that is to be established; "" for none.
func (n *Node) Boot(establish string, done func(Epoch, error)) {
	s := n.server
	s.boots.want(establish, done)
	s.link.Reboot()
	if err := s.link.Err(); err != nil {
		s.boots.fail(err)
	}
}

// refusedPause is how long after a refusal of boot.lua it is tried again, if votes are wanted: a master that
// waits for its replicas may refuse for hours.
const refusedPause = 50 * time.Millisecond

// booted is what a boot has found out, for the session in which it was.
type booted struct {
	epoch   *Epoch
	err     error  // why the server has no vote in this session
	encoded []byte // memory for Encode
}

// boot is the Boot of the link. Votes of a session need a boot.lua that has succeeded on it, and named their
// epoch: what the scripts prove is that the process that knows them is the one that answered. A server that
// refuses boot.lua, or hides its process from a client that needs it, goes on without votes, for what is
// held.
func (s *Server) boot(on *link.Session) error {
	establish, waiting := s.boots.take()
	s.votes.Store(nil)
	in, err := s.bootOn(on, establish)
	if invalidates(err) {
		s.invalidate()
	}
	e, refused := Epoch{}, err
	if refused == nil {
		refused, e = in.err, *in.epoch
		on.Data = in
	}
	early := s.early.take(on)
	if refused == nil {
		s.votes.Store(on)
		for _, text := range early {
			s.n.Vote(text)
		}
		s.n.found.Store(true)
		s.foundPushes(on)
		s.n.foundMode()
	}
	for _, done := range waiting {
		done(e, refused)
	}
	return err
}

func (s *Server) bootOn(on *link.Session, establish string) (*booted, error) {
	if s.n.guard == nil {
		waits := s.load(on, anyEpoch, allOps|sharedOps) && on.Data == nil
		var asked error
		if waits || s.Suspended() { // or it would be ready, or back, although it answers no script
			_, asked = on.Exec("EVALSHA", noScript.SHA, "0")
		}
		return &booted{epoch: anyEpoch}, endsLink(asked)
	}
	before, sent := s.verified.Load(), clock.Now()
	how := byName
	// maybe no client was here before, which is not worth a round trip
	if on.Data == nil && s.epoch.Load().Name == "" {
		how = s.otherwise()
	}
	next, err := s.runBoot(on, establish, how)
	if err == nil {
		s.enter(next)
		s.recordVerified(before, next, sent)
		s.load(on, next, allOps|sharedOps)
	}
	if ends := endsLink(err); ends != nil {
		if conn.IsReply(err) && !conn.NotLoggedIn(err) {
			s.n.setUnverified(err)
		}
		return nil, ends
	}
	if err != nil { // it grants nothing: see Encode
		s.load(on, anyEpoch, (allOps|sharedOps)&^votingOps|opRelease.bit())
	}
	err = s.judge(err)
	s.refused.Store(nil)
	if err != nil {
		s.refused.Store(&bootRefusal{err, time.Now()})
	}
	s.n.setUnverified(err)
	return &booted{epoch: s.epoch.Load(), err: err}, nil
}

// endsLink is why a link with such an answer to its boot is closed; nil: it is kept.
func endsLink(err error) error {
	switch {
	case conn.NotLoggedIn(err):
		return conn.LoginRefused(err)
	case err != nil && !conn.IsReply(err) && !errors.Is(err, errUnexpected),
		conn.Says(err, conn.Unready):
		return err
	}
	return nil
}

// enter makes next the server's epoch, as far as this client knows.
func (s *Server) enter(next *Epoch) {
	e := s.epoch.Load()
	if next.Name == e.Name {
		next.Began = e.Began // whatever became of the node's clock
	}
	store := func() { s.epoch.Store(next) }
	if changed := s.n.guard.Changed; changed != nil &&
		(next.Name != e.Name || next.State != e.State || (next.Apart == nil) != (e.Apart == nil)) {
		changed(*next, store)
	} else {
		store()
	}
}

// refusesMarker reports whether err, the answer to r, says that scripts may not access keys of two hash
// slots, where that was not known: the next boot finds out, with the slot of r.
func (s *Server) refusesMarker(r *request, err error) bool {
	if !conn.RefusesSlots(err) || s.n.guard == nil || s.epoch.Load().Apart != nil {
		return false
	}
	s.refusedSlot.Store(int32(r.e.t.slot) + 1)
	return true
}

// triedKeys are the keys with which lua.Slots is tried, and the marker: of slots that are far apart, and of
// the one that was refused, if any, as Server.refusedSlot has it. A Cluster behind one address has the marker
// in one place, and other slots elsewhere.
func triedKeys(refused int32) (keys []string) {
	slots := spreadSlots[:]
	if refused > 0 {
		slots = append([]uint16{uint16(refused - 1)}, slots...)
	}
	for _, slot := range slots {
		tag := slotTags()[slot]
		keys = append(keys, Reserved+string(tag[:])+"}:slots")
	}
	return append(keys, lua.Marker)
}

// apart is the error by which the try was refused, if err or text is it. Other errors prove nothing: then
// acquire compares the marker, or fails.
func apart(text string, err error) error {
	if err == nil && text != "" {
		err = conn.ServerError(text)
	}
	if conn.RefusesSlots(err) {
		return fmt.Errorf("scripts may not access keys of two hash slots: %w", err)
	}
	return nil
}

// runBoot runs boot.lua, sent as how says.
func (s *Server) runBoot(on *link.Session, establish string, how sending) (*Epoch, error) {
	g, e := s.n.guard, s.epoch.Load()
	known, over := "0", ""
	if e.Name != "" && (e.State != EpochNew || g.Relied != nil && g.Relied()) {
		known = "1"
	}
	if e.State != EpochKept && clock.Since(e.Began) >= g.Limit {
		over = e.Name
	}
	var cmds [][]string
	call := func(script lua.Script, keys []string, args ...string) {
		cmd := []string{"EVALSHA", script.SHA}
		if how == byText {
			cmd = []string{"EVAL", script.Source}
		}
		cmds = append(cmds, slices.Concat(cmd, []string{strconv.Itoa(len(keys))}, keys, args))
	}
	loads := 0
	if how == loaded {
		call(lua.Slots, triedKeys(0)) // is it known already, as from another client?
		cmds = append(cmds, loadOf(lua.Boot), loadOf(lua.Slots))
		loads = len(cmds)
	}
	call(lua.Boot, []string{lua.Marker, lua.Past},
		g.Name(), strconv.FormatInt(g.Limit.Microseconds(), 10), establish, known, over)
	tries := on.Data == nil || e.Apart != nil || s.refusedSlot.Load() > 0 // else it was tried on this connection
	if tries {
		call(lua.Slots, triedKeys(s.refusedSlot.Load()))
	}
	results := on.ExecAll(cmds)
	var refusedLoad error
	if how == loaded {
		refusedLoad = cmp.Or(results[1].Err, results[2].Err)
		if isUnknown(results[0].Err) {
			s.missing.Or(uint32(firstOps))
		}
	}
	boot, try := results[loads], link.Result{}
	if tries {
		try = results[loads+1]
	}
	switch unknown := isUnknown(boot.Err) || isUnknown(try.Err); {
	case unknown && how == byName:
		s.missing.Or(uint32(allOps)) // what is held may depend on any
		return s.runBoot(on, establish, s.otherwise())
	case unknown && how == loaded && conn.Says(refusedLoad, conn.Always): // which is no opinion of loads
		return nil, withoutVote(refusedLoad)
	case unknown && how == loaded:
		// else it is loaded elsewhere
		if refusedLoad != nil || !conn.HasCode(cmp.Or(boot.Err, try.Err), "NOSCRIPT") {
			s.sendTexts(refusedLoad, boot.Err, try.Err)
		}
		return s.runBoot(on, establish, byText)
	case boot.Err != nil:
		return nil, withoutVote(s.judgeText(how == byText, boot.Err))
	}
	why := apart(string(try.Value.Text), try.Err)
	next, err := parseBootReply(&boot.Value, g.Changed == nil || why != nil)
	if err != nil {
		return nil, withoutVote(err)
	}
	if why != nil {
		next.apart(why)
	}
	return next, nil
}

// withoutVote wraps the error of boot.lua, or of a part of it.
func withoutVote(err error) error {
	return fmt.Errorf("no vote: the node did not report whether it lost data: %w", err)
}

var errUnexpected = errors.New("unexpected reply to boot.lua")

// hidden is why a node has no vote that does not report its process: it could restart with old data, or fail
// over to a replica that lagged, and nobody would notice. why is how it has refused INFO, or "".
func hidden(why string) error {
	const otherwise = "use one node, or set Options.DisableQuarantine, " +
		"by which a node that comes back with old data may grant a lock that is held"
	if why == "" {
		return conn.ServerError("INFO reports neither run_id, nor process_id and uptime_in_seconds: " + otherwise)
	}
	return fmt.Errorf("INFO is refused: give the user +info, or %s: %w", otherwise, conn.ServerError(why))
}

var epochStates = map[string]EpochState{"new": EpochNew, "lost": EpochLost, "kept": EpochKept}

// parseBootReply reads the reply of boot.lua, which documents it. anyMarker says that the server votes in
// any epoch; else it must have reported its process.
func parseBootReply(v *link.Value, anyMarker bool) (*Epoch, error) {
	if len(v.Items) != 9 {
		return nil, fmt.Errorf("%w: %s", errUnexpected, v)
	}
	var texts [9]string
	for i, x := range v.Items {
		if texts[i] = string(x.Text); x.Kind == link.Int {
			texts[i] = strconv.FormatInt(x.N, 10)
		}
	}
	name, run, why, promoted := texts[0], texts[3], texts[5], texts[8]
	product, version, named := strings.Cut(texts[4], " ")
	if !named {
		product, version = "Redis", texts[4]
	}
	if !anyMarker && (run == "" || why != "") {
		return nil, hidden(why)
	}
	state, known := epochStates[texts[1]]
	age, err := strconv.ParseInt(texts[2], 10, 64)
	since, err2 := strconv.ParseInt(texts[6], 10, 64)
	if !known || err != nil || err2 != nil || name == "" {
		return nil, fmt.Errorf("%w: %v", errUnexpected, v)
	}
	in := lua.Epoch{
		Name: name, Run: run, Raw: texts[7] == "1",
		// A server without a run_id is not Redis, and its snapshots may contain scripts.
		AlwaysRun: major(version) < 7 || strings.Contains(run, "@"),
		Promoted:  promoted, Since: since,
	}
	if anyMarker {
		in.Name = ""
	}
	e := newEpoch(in)
	e.Name, e.State, e.Began = name, state, clock.Now().Add(-clock.Mul(age, time.Microsecond))
	e.Server = strings.TrimSpace(product + " " + version)
	return e, nil
}

// major is the first number of a version.
func major(version string) int {
	first, _, _ := strings.Cut(version, ".")
	n, _ := strconv.Atoi(first)
	return n
}
