package node

import (
	"fmt"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/link"
	"github.com/flightlock/flightlock/lua"
)

// A script is sent by its name (EVALSHA). A server that does not know the name has the script loaded, with
// the next boot. A client's first boot brings boot.lua in any case, so that it takes one round trip, and
// finds out by lua.Slots whether the server knows the others. That of release is as long as all others
// together, and the first lock does not need it: it is loaded for the first release by which somebody else
// gets the lock, and that of undo for the first attempt that fails. (Release names the process, and is sent
// only after that has answered boot.lua.) That of attach is loaded for the first attempt that attaches. A
// client that has known the node before may hold locks that are waited for, and loads all at once.
//
// Some servers, and proxies before them, refuse SCRIPT LOAD, or have the script in one of several processes.
// These are sent texts instead (EVAL), for a while: what one odd answer has begun is over some minutes later.
// A text is executed by whatever process there is, so it names none, and all votes make the strict check,
// which compares the process.

// scripts are those for each kind of request, and from opShared on those for the same of a read lease.
type scripts [2 * opShared]lua.Script

// newScripts are those with which a server votes, and the others.
func newScripts(acquire, release, attach, sharedAcquire, sharedRelease lua.Script) *scripts {
	return &scripts{
		opAcquire: acquire, opRepair: acquire, opRefresh: lua.Refresh,
		opRelease: release, opUndo: lua.Undo, opDone: lua.Done, opAttach: attach,

		opShared + opAcquire: sharedAcquire, opShared + opRepair: sharedAcquire,
		opShared + opRefresh: lua.SharedRefresh, opShared + opRelease: sharedRelease,
		opShared + opUndo: lua.SharedUndo, opShared + opDone: lua.SharedDone,
	}
}

// scriptsIn are those of a process, as boot.lua reports it.
func scriptsIn(process string) *scripts {
	return newScripts(lua.Acquire.In(process), lua.Release.In(process), lua.Attach.In(process),
		lua.SharedAcquire.In(process), lua.SharedRelease.In(process))
}

// ops is a set of kinds of requests, for their scripts.
type ops uint32

// bit is the set of o alone. A repair has the script of acquire.
func (o op) bit() ops {
	if o%opShared == opRepair {
		o--
	}
	return 1 << o
}

const (
	// Those whose scripts name the process; and those of read leases, which are loaded when the first is needed.
	votingOps = ops(1<<opAcquire | 1<<opRelease | 1<<opAttach | (1<<opAcquire|1<<opRelease)<<opShared)
	sharedOps = (allOps &^ (1 << opAttach)) << opShared
	allOps    = ops(1<<opAcquire | 1<<opRefresh | 1<<opRelease | 1<<opUndo | 1<<opDone | 1<<opAttach)

	// What the first lock needs, and where there is no boot.lua before it, also what attempts do that fail.
	firstOps     = allOps &^ (1<<opRelease | 1<<opUndo | 1<<opAttach)
	unguardedOps = allOps &^ (1<<opRelease | 1<<opAttach)
)

// sending is how boot.lua is sent.
type sending uint8

const (
	byName sending = iota
	loaded         // by its name, after it was loaded in the same pipeline
	byText
)

// otherwise is how boot.lua is sent to a server that may not know its name.
func (s *Server) otherwise() sending {
	if s.sendsTexts(clock.Now()) {
		return byText
	}
	return loaded
}

// asTexts says that the scripts of a server are sent as texts.
type asTexts struct {
	why     error
	until   time.Time
	refused error // how the server refuses texts as well; nil: it does not
}

const (
	// textsFor is how long scripts are sent as texts before their names are tried again, which costs a server
	// that refuses them a pause of some round trips.
	textsFor = 10 * time.Minute

	// textsRefusedFor is that for a server that refuses texts as well: its user may be given either right.
	textsRefusedFor = time.Second
)

// textsAt is why scripts are sent as texts; nil: by their names.
func (s *Server) textsAt(now time.Time) *asTexts {
	if t := s.texts.Load(); t != nil && !clock.Passed(now, t.until) {
		return t
	}
	return nil
}

// sendsTexts reports whether scripts are sent as texts.
func (s *Server) sendsTexts(now time.Time) bool { return s.textsAt(now) != nil }

// refusesTexts is how the server has refused texts just now; nil: it has not. Then what keeps and ends locks
// is sent by name, once: the server may know that, and refuse texts for good, and what began them may have
// been one odd answer.
func (s *Server) refusesTexts(now time.Time) error {
	if t := s.textsAt(now); t != nil {
		return t.refused
	}
	return nil
}

// sendTexts has scripts sent as texts from now on, for the first of these errors.
func (s *Server) sendTexts(why ...error) {
	now := clock.Now()
	for _, err := range why {
		if err != nil && !s.sendsTexts(now) {
			s.texts.Store(&asTexts{why: err, until: now.Add(textsFor)})
		}
	}
}

// judgeText returns err, the answer to a script. If it was sent as a text, and the server refuses texts as
// well, that was the last resort: the error has both refusals.
func (s *Server) judgeText(text bool, err error) error {
	t := s.texts.Load()
	if !text || t == nil || !conn.RefusesCommand(err, "eval") {
		return err
	}
	err = fmt.Errorf("%w; and the script as a text: %w", t.why, err)
	if t.refused == nil {
		s.texts.CompareAndSwap(t, &asTexts{t.why, clock.Now().Add(textsRefusedFor), err})
	}
	return err
}

// isUnknown reports whether a server does not execute a script for its name alone.
func isUnknown(err error) bool {
	return conn.HasCode(err, "NOSCRIPT") || conn.RefusesCommand(err, "evalsha")
}

// miss notes that the server did not know the script of o. Where there is no epoch, and so no boot.lua that
// would show it, this says that it has lost all others, too, unless o may be the first that needed its own.
func (s *Server) miss(o op) {
	missing := o.bit()
	switch {
	case o >= opShared:
		missing = sharedOps
	case s.n.guard != nil || o == opRelease || o == opAttach:
	case o.votes():
		missing = unguardedOps
	default:
		missing = allOps
	}
	s.missing.Or(uint32(missing))
}

// loads are the commands that load those of e's scripts that are missing, of those of ops. They are not
// missing any more. While scripts are sent as texts there are none: who sends the name later finds out that
// it is missing (miss).
func (s *Server) loads(e *Epoch, of ops) (cmds [][]string) {
	missing := ops(s.missing.And(uint32(^of))) & of // And returns the old value
	if s.sendsTexts(clock.Now()) {
		return nil
	}
	for o := range e.scripts {
		if missing&(1<<o) != 0 {
			cmds = append(cmds, loadOf(e.scripts[o]))
		}
	}
	return cmds
}

func loadOf(script lua.Script) []string { return []string{"SCRIPT", "LOAD", script.Source} }

// load loads, in the process at the other end of on, those of e's scripts that are missing, of those of ops.
// They are not waited for: what needs one is executed after it, and finds out if that was refused. It reports
// whether there are any.
func (s *Server) load(on *link.Session, e *Epoch, of ops) bool {
	cmds := s.loads(e, of)
	on.Post(cmds, func(err error) {
		if isOfLoads(err) {
			s.sendTexts(err)
		}
	})
	return len(cmds) > 0
}

// isOfLoads reports whether err, the answer to a load, is the server's opinion of loads, and not of any
// command.
func isOfLoads(err error) bool { return conn.IsReply(err) && !conn.Says(err, conn.Always) }
