package node

import (
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
)

// loadRefusals are what servers say to SCRIPT LOAD, in place of loading.
var loadRefusals = []string{
	"NOPERM this user has no permissions to run the 'script|load' command",
	"ERR unknown command 'script', with args beginning with: 'LOAD' ",
	"ERR unknown command `SCRIPT`, with args beginning with: `LOAD`, ",
	"ERR SCRIPT is not supported",
	"ERR upstream failure",
}

// A server that refuses to load scripts, in whatever words, is sent them as texts, and does all that others
// do.
func TestAServerThatLoadsNoScripts(t *testing.T) {
	t.Parallel()
	for _, refusal := range loadRefusals {
		for _, guarded := range []bool{false, true} {
			t.Run(fmt.Sprint(refusal, guarded), func(t *testing.T) {
				t.Parallel()
				s := redistest.StartServer(t)
				proxy := redistest.StartKind(t, redistest.Plain, s.Addr())
				proxy.RefuseScript(refusal)
				n := newNode(t, s.Client(t, at(proxy.Addr())))
				if guarded {
					guard(n)
				}
				for range 2 {
					a := newAttempt(t, n, "k")
					a.acquire().want(t, Granted)
					a.refresh().want(t, Renewed)
					s.Do(t, "ZADD", wantsOf(a.t0()), 1, "w-1")
					a.release().want(t, Deleted)
					if owner := s.Do(t, "GET", "k"); owner != TurnOf+"w-1" {
						t.Errorf("the key is %v's after a release for which somebody waits", owner)
					}
					s.Do(t, "FLUSHALL")
					undone, e := newAttempt(t, n, "k"), newEar()
					undone.acquire().want(t, Granted)
					undone.Release(&undone.buf, e, false, nil)
					e.want(t, Deleted)
				}
				if hellos := s.CommandCalls(t)["hello"]; hellos > 20 { // most are of Do
					t.Errorf("%d connections were made", hellos)
				}
			})
		}
	}
}

// A server without EVALSHA is sent texts as well.
func TestAServerWithoutNamesOfScripts(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	s.Do(t, "ACL", "SETUSER", "default", "-evalsha")
	n := newNode(t, s.Client(t))
	guard(n)
	a := newAttempt(t, n, "k")
	a.acquire().want(t, Granted)
	a.release().want(t, Deleted)
}

// A script that a server has loaded and does not know, as one that is several, is sent as a text. One that it
// has merely lost is loaded again.
func TestAScriptThatIsUnknownWhereItWasLoaded(t *testing.T) {
	t.Parallel()
	var known atomic.Bool
	var texts atomic.Int32
	f := redistest.StartFake(t, func(cmd []string) string {
		switch {
		case strings.EqualFold(cmd[0], "SCRIPT"):
			return bulk("x")
		case strings.EqualFold(cmd[0], "EVAL"):
			texts.Add(1)
			return ":1\r\n"
		case !known.Swap(true):
			return "-NOSCRIPT No matching script. Please use EVAL.\r\n"
		}
		return ":1\r\n"
	})
	n := newNode(t, f.Client(t))
	newAttempt(t, n, "k").acquire().want(t, Granted)
	if texts.Load() != 0 {
		t.Error("what is merely lost is sent as a text")
	}
	known.Store(false)
	a := newAttempt(t, n, "k")
	a.acquire().want(t, Granted)
	a.release().want(t, Deleted)
	if texts.Load() != 0 {
		t.Error("what was lost twice is sent as a text")
	}

	unknown := redistest.StartFake(t, func(cmd []string) string {
		if strings.EqualFold(cmd[0], "EVALSHA") {
			return "-NOSCRIPT No matching script. Please use EVAL.\r\n"
		}
		return ":1\r\n"
	})
	n = newNode(t, unknown.Client(t))
	newAttempt(t, n, "k").acquire().want(t, Granted)
	before := len(unknown.Commands())
	newAttempt(t, n, "k").acquire().want(t, Granted)
	if more := unknown.Commands()[before:]; len(more) != 1 || !strings.EqualFold(more[0][0], "EVAL") {
		t.Errorf("another acquire took %d commands", len(more))
	}
}

// A release whose two scripts are both unknown, as after an upgrade beside clients that wait, has each
// loaded.
func TestTwoUnknownScriptsOfAReleaseAreLoaded(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	for _, script := range []lua.Script{lua.Boot, lua.Slots} {
		s.Do(t, "SCRIPT", "LOAD", script.Source)
	}
	n := newNode(t, s.Client(t))
	guard(n)
	a := newAttempt(t, n, "k")
	a.acquire().want(t, Granted)
	s.Do(t, "ZADD", wantsOf(a.t0()), 1, "w-1")
	a.release().want(t, Deleted)
	if n.server.sendsTexts(time.Now()) {
		t.Errorf("scripts are sent as texts: %v", n.server.texts.Load().why)
	}
}

// A script that was not loaded because the connection ended is loaded on the next one.
func TestALoadThatIsLostWithItsConnectionIsRepeated(t *testing.T) {
	t.Parallel()
	var known, cut atomic.Bool
	var texts atomic.Int32
	f := redistest.StartFake(t, func(cmd []string) string {
		switch {
		case strings.EqualFold(cmd[0], "SCRIPT"):
			if !cut.Swap(true) {
				return redistest.Hangup
			}
			known.Store(true)
			return bulk("x")
		case strings.EqualFold(cmd[0], "EVAL"):
			texts.Add(1)
		case !known.Load():
			return "-NOSCRIPT No matching script. Please use EVAL.\r\n"
		}
		return ":1\r\n"
	})
	n := newNode(t, f.Client(t))
	// What is behind the load is lost with it, unless it was not written yet: then it goes to the next
	// connection.
	if rep := <-newAttempt(t, n, "k").acquire().heard; rep.Kind != Granted && !rep.Lost {
		t.Errorf("what was behind the load: %v", rep)
	}
	eventuallyGranted(t, n, "k")
	if texts.Load() != 0 {
		t.Error("it is sent as a text")
	}
}

// A server that is busy when boot.lua is to be loaded, and no more when it is to be executed, has refused
// nothing.
func TestALoadThatIsRefusedForNowIsRepeated(t *testing.T) {
	t.Parallel()
	f := &forgetful{name: "m1", run: "r", version: "7.0", loaded: map[string]bool{}}
	var loads, texts atomic.Int32
	fake := redistest.StartFake(t, func(cmd []string) string {
		switch {
		case strings.EqualFold(cmd[0], "EVAL"):
			texts.Add(1)
		case strings.EqualFold(cmd[0], "SCRIPT") && loads.Add(1) <= 4:
			return "-BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.\r\n"
		}
		return f.answer(cmd)
	})
	n := newNode(t, fake.Client(t))
	guard(n)
	newAttempt(t, n, "k").acquire().want(t, Failed)
	time.Sleep(2 * refusedPause)
	newAttempt(t, n, "k").acquire().want(t, Granted)
	if texts.Load() != 0 {
		t.Errorf("%d scripts were sent as texts", texts.Load())
	}
}

// One odd answer to SCRIPT LOAD does not keep a user without EVAL from what it holds: the server knows those
// scripts.
func TestWhatIsHeldNeedsNoTexts(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	s.Do(t, "ACL", "SETUSER", "default", "-eval")
	proxy := redistest.StartKind(t, redistest.Plain, s.Addr())
	proxy.RefuseScript("")
	n := newNode(t, s.Client(t, at(proxy.Addr())))
	guard(n)
	a, b, c := newAttempt(t, n, "a"), newAttempt(t, n, "b"), newAttempt(t, n, "c")
	for _, held := range []*attempt{a, b, c} {
		held.acquire().want(t, Granted)
	}
	proxy.RefuseScript("ERR upstream failure")
	s.Do(t, "ZADD", wantsOf(a.t0()), 1, "w-1")
	before := s.CommandCalls(t)["hello"]
	<-a.release().heard // which is not known yet
	b.refresh().want(t, Renewed)
	c.release().want(t, Deleted)
	b.release().want(t, Deleted)
	if more := s.CommandCalls(t)["hello"] - before; more > 2 { // of Do
		t.Errorf("%d connections were made", more)
	}
}

// A text is executed by whatever process has the connection. So it names no process, and each acquire and
// each release that may grant the key compares it.
func TestTextsCompareTheProcess(t *testing.T) {
	t.Parallel()
	f := &forgetful{name: "m1", run: "r", version: "7.0", loaded: map[string]bool{}}
	fake := redistest.StartFake(t, func(cmd []string) string {
		switch strings.ToUpper(cmd[0]) {
		case "SCRIPT":
			return "-NOPERM this user has no permissions to run the 'script|load' command\r\n"
		case "EVAL":
			sum := sha1.Sum([]byte(cmd[1]))
			cmd = slices.Clone(cmd)
			cmd[1] = hex.EncodeToString(sum[:])
			f.mu.Lock()
			f.loaded[cmd[1]] = true
			f.mu.Unlock()
		}
		return f.answer(cmd)
	})
	n := newNode(t, fake.Client(t))
	guard(n)
	voted := 0
	for range 3 {
		a, e := newAttempt(t, n, "k"), newEar()
		a.acquire().want(t, Granted)
		a.Release(&a.buf, e, false, &TurnPass{Contender: "w-1"})
		e.want(t, Deleted)
	}
	for _, cmd := range fake.Commands() {
		switch {
		case strings.Contains(cmd[1], "-- process"):
			t.Errorf("the text of a process was sent: %q", cmd)
		case cmd[1] == lua.Acquire.Source, cmd[1] == lua.Release.Source:
			if args := epochArgs(cmd); args != f.epoch().Args(true) {
				t.Errorf("a text was sent with %q, want %q", args, f.epoch().Args(true))
			}
			voted++
		}
	}
	if voted != 6 {
		t.Errorf("%d acquires and releases were sent as texts", voted)
	}
}

// One odd answer to SCRIPT LOAD has scripts sent as texts for some minutes, not for ever.
func TestScriptsAreNotSentAsTextsForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		var odd, texts atomic.Int32
		m.Mini.Server().SetPreHook(func(c *server.Peer, cmd string, _ ...string) bool {
			switch {
			case cmd == "SCRIPT" && odd.Add(1) == 1:
				c.WriteError("ERR upstream failure")
				return true
			case cmd == "EVAL":
				texts.Add(1)
			}
			return false
		})
		n := newNode(t, m.Client(t))
		lock := func() {
			a := newAttempt(t, n, "k")
			a.acquire().want(t, Granted)
			a.release().want(t, Deleted)
		}
		for range 3 {
			lock()
		}
		if texts.Load() != 6 {
			t.Errorf("%d texts were sent for three locks", texts.Load())
		}
		time.Sleep(textsFor)
		texts.Store(0)
		for range 3 {
			lock()
		}
		if texts.Load() != 0 {
			t.Errorf("%d texts are sent still", texts.Load())
		}
	})
}

// What a server did not know the script of is sent again behind what was sent since. By then its contender
// may have left: an undo gives it no want back, and a release no place at the end.
func TestAContenderThatHasLeftIsNotRegisteredByARepetition(t *testing.T) {
	const contender = "label#client-1"
	target := func(owner string) *Target {
		t := &Target{}
		t.Init("k", owner, contender)
		return t
	}
	for name, pass := range map[string]*TurnPass{
		"undo": nil, "release": {Contender: contender, Rival: "other#client-1"},
		"rejoin": {Contender: contender, Rival: "other#client-1", Leaves: true,
			rejoins: (&Offer{Target: target("offer"), Tokens: 1, First: make([]uint32, 1)}).terms(1, time.Minute)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := redistest.StartMemNode(t, "10.0.0.1:6379")
				n := newNode(t, m.Client(t))
				a, leaves := &attempt{t: t}, &attempt{t: t}
				a.Init(n, target("owner"), 0)
				leaves.Init(n, target("nobody"), 0)
				warm, released := newAttempt(t, n, "warm"), newEar()
				warm.acquire().want(t, Granted)
				warm.Release(&warm.buf, released, false, &TurnPass{Contender: contender}) // by the script of the release
				released.want(t, Deleted)
				a.acquire().want(t, Granted)
				if _, err := m.Mini.ZAdd(wantsOf(a.t0()), 1, "other#client-1"); err != nil {
					t.Fatal(err)
				}
				m.SetDelay(5 * time.Millisecond)
				m.Mini.Server().SetPreHook(unknownOnce(a.t0().Owner()))
				a.Release(&a.buf, nil, false, pass)
				leaves.Release(&leaves.buf, nil, false, &TurnPass{Contender: contender})
				time.Sleep(time.Second)
				if all, err := m.Mini.SortedSet(wantsOf(a.t0())); err != nil || all[contender] > 0 || len(all) != 1 {
					t.Errorf("%v, %v wait", err, all)
				}
			})
		})
	}
}

// unknownOnce has a server say once that it does not know a script, for owner.
func unknownOnce(owner string) server.Hook {
	var said atomic.Bool
	return func(c *server.Peer, cmd string, args ...string) bool {
		if cmd != "EVALSHA" || !slices.Contains(args, owner) || said.Swap(true) {
			return false
		}
		c.WriteError("NOSCRIPT No matching script. Please use EVAL.")
		return true
	}
}
