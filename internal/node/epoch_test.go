package node

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// A vote is requested in the epoch that the server named last, by the script of its process, which was loaded
// after it had named that. Before Redis 7 the script checks the process too.
func TestTheScriptOfAnEpoch(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		run, version string
		always       bool // it compares the process
	}{
		{"r", "7.0.15", false}, {"r", "6.2.1", true},
	} {
		t.Run("version="+tc.version, func(t *testing.T) {
			f := &forgetful{run: tc.run, version: tc.version, loaded: map[string]bool{}}
			fake := redistest.StartFake(t, f.answer)
			n := newNode(t, fake.Client(t))
			changes := guard(n)
			if n.Epoch() != nil {
				t.Error("it knows the epoch of a node that it never asked")
			}
			names := []string{"m1", "m2", "m3", "m4"}
			for i, name := range names {
				if i == 2 {
					f.flushed(name)
				} else {
					f.forgets(name)
				}
				before := len(fake.Commands())
				for range 2 {
					rep := newAttempt(t, n, "k").acquire().want(t, Granted)
					if rep.Epoch == nil || rep.Epoch.Name != name || rep.Epoch.State != EpochKept {
						t.Errorf("granted in %+v, want %s", rep.Epoch, name)
					}
				}
				if got := changes(); !slices.Equal(got, names[:i+1]) {
					t.Errorf("%v was reported after %s", got, name)
				}
				epoch, voted := f.epoch(), 0
				epoch.AlwaysRun = tc.always
				for _, cmd := range fake.Commands()[before:] {
					if cmd[1] == lua.Acquire.In(epoch.Run).SHA && // strict: after an answer that a busy machine has delayed
						(epochArgs(cmd) == epoch.Args(false) || epochArgs(cmd) == epoch.Args(true)) {
						voted++
					}
				}
				if voted != 2 {
					t.Errorf("%d votes were requested in the epoch %s, want 2", voted, name)
				}
			}
			if len(f.unproven) > 0 {
				t.Errorf("the scripts %v became known before the server had named its process", f.unproven)
			}
		})
	}
}

// A server whose boot.lua did not reply, or whose connection broke after the reply, has been given
// no script that votes: neither that of a process that the client knew before, nor of the one that it named.
// Otherwise it might vote, as soon as it accepts writes, in an epoch that nobody has compared with
// its process.
func TestNothingIsLoadedUnlessBootSucceeds(t *testing.T) {
	t.Parallel()
	for _, answer := range []string{
		"-NOREPLICAS Not enough good replicas to write.\r\n",
		"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
		readOnly,
		"-MISCONF Redis is configured to save RDB snapshots\r\n",
		"-LOADING Redis is loading the dataset in memory\r\n",
		"-BUSY Redis is busy running a script.\r\n",
		"-NOPERM User default has no permissions\r\n",
		":1\r\n", // no reply of boot.lua at all
		redistest.Hangup,
		"*9\r\n$2\r\nm2" + redistest.Hangup,
		"ANSWER" + redistest.Hangup, // the process ended after it
	} {
		t.Run(fmt.Sprintf("%.12q", answer), func(t *testing.T) {
			f := &forgetful{name: "m1", run: "r", version: "7.0", loaded: map[string]bool{}}
			fake := redistest.StartFake(t, f.answer)
			n := newNode(t, fake.Client(t))
			guard(n)
			newAttempt(t, n, "k").acquire().want(t, Granted)
			f.forgets("m2")
			f.refuse(answer)
			for range 3 {
				newAttempt(t, n, "k").acquire().want(t, Failed)
			}
			if len(f.unproven) > 0 || f.proven == 0 {
				t.Errorf("the scripts %v became known, and %d of the processes that the server had named", f.unproven,
					f.proven)
			}
			f.refuse("")
			redistest.Eventually(t, patience, "it votes again", func() bool {
				rep := <-newAttempt(t, n, "k").acquire().heard
				return rep.Kind == Granted && rep.Epoch.Name == "m2"
			})
		})
	}
}

// A node in quarantine is asked each second, by every client. Only in another process does that load scripts.
func TestANodeThatIsAskedAgainLoadsNothing(t *testing.T) {
	t.Parallel()
	f := &forgetful{name: "m1", run: "r", version: "7.0", loaded: map[string]bool{}}
	fake := redistest.StartFake(t, f.answer)
	n := newNode(t, fake.Client(t))
	guard(n)
	asks := func(name string) (commands int) {
		t.Helper()
		before, done := len(fake.Commands()), make(chan struct{})
		n.Boot("", func(e Epoch, err error) {
			if err != nil || e.Name != name {
				t.Errorf("%+v: %v", e, err)
			}
			close(done)
		})
		<-done
		newAttempt(t, n, "k").acquire().want(t, Granted)
		for _, cmd := range fake.Commands()[before:] {
			if strings.EqualFold(cmd[0], "SCRIPT") {
				commands++
			}
		}
		return commands
	}
	for _, c := range []struct {
		name  string
		loads bool
	}{{"m1", true}, {"m1", false}, {"m1", false}, {"m2", true}, {"m2", false}, {"flushed", false}} {
		if c.name == "flushed" {
			f.flushed(c.name)
		} else if c.name != f.name {
			f.forgets(c.name)
		}
		if n := asks(c.name); (n > 0) != c.loads {
			t.Errorf("%s: %d scripts were loaded", c.name, n)
		}
	}
	f.forgets("flushed") // as by SCRIPT FLUSH: the next that needs them loads them
	if asks("flushed") == 0 {
		t.Error("scripts that are gone are not loaded")
	}
}

// lookout is a guarded node over a forgetful server.
type lookout struct {
	t             *testing.T
	n             *Node
	fake          *redistest.Fake
	acquire       string                                  // the script
	usual, strict [3]string                               // its first arguments
	instead       atomic.Pointer[func(key string) string] // answers an acquire, unless it says ""
}

func newLookout(t *testing.T) *lookout {
	f := &forgetful{name: "m", run: "r", version: "7.0", promoted: "abc:7", loaded: map[string]bool{}}
	in := f.epoch()
	k := &lookout{t: t, acquire: lua.Acquire.In(f.run).SHA, usual: in.Args(false), strict: in.Args(true)}
	k.fake = redistest.StartFake(t, func(cmd []string) string {
		if instead := k.instead.Load(); instead != nil && k.asks(cmd) {
			if answer := (*instead)(cmd[3]); answer != "" {
				return answer
			}
		}
		return f.answer(cmd)
	})
	k.n = newNode(t, k.fake.Client(t))
	guard(k.n)
	k.vote("k") // after boot.lua, which checks as well
	return k
}

func (k *lookout) asks(cmd []string) bool { return len(cmd) > 3 && cmd[1] == k.acquire }

// vote returns in which way it was requested.
func (k *lookout) vote(key string) (args [3]string) {
	k.t.Helper()
	newAttempt(k.t, k.n, key).acquire().want(k.t, Granted)
	return k.last()
}

// last is how the last vote was requested.
func (k *lookout) last() (args [3]string) {
	for _, cmd := range k.fake.Commands() {
		if k.asks(cmd) {
			args = epochArgs(cmd)
		}
	}
	return args
}

// checks is how many there were so far: boot.lua makes one, too.
func (k *lookout) checks() (n int) {
	for _, cmd := range k.fake.Commands() {
		if k.asks(cmd) && epochArgs(cmd) == k.strict || len(cmd) > 1 && cmd[1] == lua.Boot.SHA {
			n++
		}
	}
	return n
}

const readOnly = "-READONLY You can't write against a read only replica.\r\n"

// A check is valid for a while; then the next vote makes another. A connection that breaks and a
// server that is not a master make one necessary at once, or a boot, and its other refusals do not.
func TestWhenALookIsDue(t *testing.T) {
	k := newLookout(t)
	looked := func() {
		redistest.Eventually(t, patience, "the last check counts", func() bool { return k.vote("k") == k.usual })
	}
	looked()
	time.Sleep(verifyEvery)
	if k.vote("k") != k.strict {
		t.Error("no check when the last one had expired")
	}
	for answer, want := range map[string]bool{
		readOnly: true,
		"-LOADING Redis is loading the dataset in memory\r\n": true,
		"-MASTERDOWN Link with MASTER is down\r\n":            true,
		redistest.Hangup: true,
		"-OOM command not allowed when used memory > 'maxmemory'.\r\n": false,
		"-WRONGTYPE Operation against a key\r\n":                       false,
	} {
		instead := func(string) string { return answer }
		redistest.Eventually(t, patience, fmt.Sprintf("a vote after %q", answer), func() bool {
			settle()
			looked()
			until, checks := k.n.server.verified.Load().until, k.checks()
			k.instead.Store(&instead)
			newAttempt(t, k.n, "k").acquire().want(t, Failed)
			k.instead.Store(nil)
			k.vote("k")
			if time.Now().After(until) { // it would be due anyway
				return false
			}
			if got := k.checks() > checks; got != want {
				t.Errorf("after %q the server is checked: %v", answer, got)
			}
			return true
		})
	}
}

// A node that does not report its process, or reports only half of what is asked, has no vote, as one that
// refuses boot.lua: it is given no script that votes, and the error says what to do. It votes as soon as it
// reports. Where nobody relies on a quarantine it votes all the same.
func TestANodeThatHidesItsProcessHasNoVote(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ run, why, says string }{
		{"", "", "neither run_id, nor process_id"},
		{"", "NOPERM no right to 'info'", "+info"},
		{"r", "NOPERM no right to 'info|replication'", "+info"},
	} {
		f := &forgetful{name: "m", run: "r", version: "7.0", loaded: map[string]bool{}}
		f.refuse((&forgetful{name: "m", run: tc.run, why: tc.why, version: "7.0"}).tells())
		server := redistest.StartFake(t, f.answer)
		n, unguarded := newNode(t, server.Client(t)), newNode(t, server.Client(t))
		guard(n)
		for range 3 {
			err := fmt.Sprint(newAttempt(t, n, "k").acquire().want(t, Failed).Err)
			if !strings.Contains(err, tc.says) || !strings.Contains(err, tc.why) ||
				!strings.Contains(err, "DisableQuarantine") || fmt.Sprint(n.Unverified()) != err {
				t.Errorf("%s; unverified: %v", err, n.Unverified())
			}
		}
		if f.proven > 0 || len(f.unproven) > 0 || n.Epoch() != nil {
			t.Errorf("%d scripts and %v were loaded; %+v", f.proven, f.unproven, n.Epoch())
		}
		unguarded.SetGuard(Guard{Limit: time.Minute, Name: func() string { return "m2" }})
		newAttempt(t, unguarded, "k").acquire().want(t, Granted)
		f.refuse("")
		redistest.Eventually(t, patience, "it votes", func() bool {
			rep := <-newAttempt(t, n, "k").acquire().heard
			return rep.Kind == Granted && n.Unverified() == nil
		})
	}
}

// A doubt outlives a check that was sent before it, whenever its answer arrives.
func TestALookThatIsOlderThanADoubt(t *testing.T) {
	k := newLookout(t)
	k.n.server.invalidate()
	arrived, release := make(chan struct{}), make(chan struct{})
	instead := func(key string) string {
		if key != "doubt" {
			return ""
		}
		close(arrived)
		<-release
		return "-LOADING Redis is loading the dataset in memory\r\n" // which keeps the connection
	}
	k.instead.Store(&instead)
	doubt := newAttempt(t, k.n, "doubt").acquire()
	<-arrived
	asked := newAttempt(t, k.n, "slow").acquire()
	if k.last() != k.strict {
		t.Error("no check in doubt")
	}
	close(release)
	doubt.want(t, Failed)
	asked.want(t, Granted)
	if k.vote("slow") != k.strict {
		t.Error("no check after the doubt, because of one that was sent before it")
	}
}

// A server whose epoch has another name at each request grants nothing.
func TestAServerThatForgetsAllTheTime(t *testing.T) {
	t.Parallel()
	f := &forgetful{name: "m", run: "r", version: "7.0", restless: true, loaded: map[string]bool{}}
	n := newNode(t, redistest.StartFake(t, f.answer).Client(t))
	guard(n)
	if rep := newAttempt(t, n, "k").acquire().want(t, Failed); !conn.HasCode(rep.Err, "EPOCH") {
		t.Error(rep.Err)
	}
}

// A node that was flushed grants in another epoch than before, also to a client that does not
// notice the flush first; and a release or a refresh in between does not hide it.
func TestEveryClientNoticesAFlush(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	x, y := newNode(t, s.Client(t)), newNode(t, s.Client(t))
	guard(x)
	guard(y)
	for _, n := range []*Node{x, y} {
		a := newAttempt(t, n, "k")
		a.acquire().want(t, Granted)
		a.release().want(t, Deleted)
	}
	before := x.Epoch().Name
	s.Do(t, "FLUSHALL")
	first := newAttempt(t, x, "k")
	m := first.acquire().want(t, Granted).Epoch
	first.release().want(t, Deleted) // the fence bucket stays
	newAttempt(t, y, "k").refresh().want(t, Missing)
	if rep := newAttempt(t, y, "k").acquire().want(t, Granted); rep.Epoch.Name != m.Name || m.Name == before {
		t.Errorf("granted in %+v, the other in %+v, before in %s", rep.Epoch, m, before)
	}
}

// A node that is asked for the sake of tokens votes whatever its epoch is, and does not report it.
// A process that is another one is not known to have begun when the last one did.
func TestAGuardForTokens(t *testing.T) {
	t.Parallel()
	f := &forgetful{name: "m1", run: "r", version: "7.0", loaded: map[string]bool{}}
	fake := redistest.StartFake(t, f.answer)
	n := newNode(t, fake.Client(t))
	n.SetGuard(Guard{Limit: time.Minute, Name: func() string { return fmt.Sprint("m-", owners.Add(1)) }})
	for _, name := range []string{"m1", "m2"} {
		if f.forgets(name); n.Epoch() != nil && n.Epoch().Name == name {
			t.Error("it knows the future")
		}
		for range 2 {
			if rep := newAttempt(t, n, "k").acquire().want(t, Granted); rep.Epoch != nil {
				t.Errorf("%+v", rep)
			}
		}
		if n.Epoch().Name != name {
			t.Errorf("epoch %s", n.Epoch().Name)
		}
		in := f.epoch()
		in.Name = "" // any
		cmd := fake.Commands()[len(fake.Commands())-1]
		if args := epochArgs(cmd); cmd[1] != lua.Acquire.In(in.Run).SHA ||
			args != in.Args(false) && args != in.Args(true) {
			t.Errorf("the vote was requested by %s, in %q", cmd[1], args)
		}
	}
}

// A node that is not guarded has no epoch, and its votes carry none.
func TestNoGuardNoEpoch(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	if rep := newAttempt(t, n, "k").acquire().want(t, Granted); rep.Epoch != nil || n.Epoch() != nil {
		t.Errorf("%+v", rep)
	}
	if s.Do(t, "EXISTS", lua.Marker) != int64(0) {
		t.Error("it left a marker")
	}
	if !n.Guardable() {
		t.Error("it cannot be guarded")
	}
}

// A key that was created on the node in an epoch that was kept is unforgotten until a repair is
// sent: that may create it in another epoch before its answer arrives.
func TestARepairUnderWayIsNoProofThatTheNodeKeptTheKey(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	p := redistest.StartProxy(t, s.Addr())
	n := startNode(t, s.Client(t, at(p.Addr())), patience)
	guard(n)
	established := make(chan error, 1)
	n.Boot("", func(e Epoch, err error) {
		n.Boot(e.Name, func(_ Epoch, err error) { established <- err })
	})
	if err := <-established; err != nil {
		t.Fatal(err)
	}
	a := newAttempt(t, n, "lock:k")
	a.acquire().want(t, Granted)
	if !a.unforgotten() {
		t.Fatal("the key was put there in an epoch that is not kept")
	}
	p.HoldRequests()
	a.Repair(longTTL, 5, soon())
	if a.unforgotten() {
		t.Error("unforgotten, while a repair is under way")
	}
	p.ReleaseRequests()
	a.release().want(t, Deleted)
}

// A node that refuses boot.lua, as a new master that waits for a replica does, is asked again soon, and is
// not dialled for that.
func TestANodeThatRefusesBootIsNotDialledAgain(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	s.Do(t, "CONFIG", "SET", "min-replicas-to-write", "1")
	admin := s.Client(t, func(o *redis.Options) { o.PoolSize = 1 }).Conn()
	defer admin.Close()
	n := newNode(t, s.Client(t, quick))
	n.SetGuard(Guard{Limit: time.Minute, Name: func() string { return fmt.Sprint("m-", owners.Add(1)) }})
	rep := newAttempt(t, n, "k").acquire().want(t, Failed)
	if !strings.Contains(rep.Err.Error(), "NOREPLICAS") {
		t.Fatal(rep.Err)
	}
	before := connections(t, admin)
	hammer(t, n, 8, 200)
	if dialled := connections(t, admin) - before; dialled > 0 {
		t.Errorf("%d more connections", dialled)
	}
	s.Do(t, "CONFIG", "SET", "min-replicas-to-write", "0")
	redistest.Eventually(t, patience, "it locks", func() bool {
		e := newAttempt(t, n, "k2").acquire()
		return (<-e.heard).Kind == Granted
	})
}

// A server that forgets its scripts again while a refusal of boot.lua stands keeps and ends what is held:
// those scripts are loaded without boot.lua.
func TestWhileARefusalOfBootStandsLocksAreKept(t *testing.T) {
	t.Parallel()
	f := &forgetful{name: "m1", run: "r", version: "7.0", loaded: map[string]bool{}}
	n := newNode(t, redistest.StartFake(t, f.answer).Client(t))
	guard(n)
	held := newAttempt(t, n, "k")
	held.acquire().want(t, Granted)
	f.refuse("-NOREPLICAS Not enough good replicas to write.\r\n")
	for round := range 10 {
		f.forgets("m2")
		newAttempt(t, n, "k").acquire().want(t, Failed)
		if rep := <-held.refresh().heard; rep.Kind != Renewed {
			t.Fatalf("round %d: %v", round, rep)
		}
	}
}

// All clients of a process vote by the same scripts: those that the first one has loaded serve the others,
// also after FLUSHALL. They bring boot.lua, and what it is tried with, in any case.
func TestANewClientLoadsNothingByWhichItVotes(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	vote := func() {
		t.Helper()
		n := newNode(t, s.Client(t))
		guard(n)
		a := newAttempt(t, n, "k")
		a.acquire().want(t, Granted)
		a.release().want(t, Deleted)
	}
	vote()
	before := s.CommandCalls(t)["script|load"]
	vote()
	s.Do(t, "FLUSHALL")
	vote()
	if loads := s.CommandCalls(t)["script|load"] - before; before <= 2 || loads > 2*2 {
		t.Errorf("%d scripts were loaded by the first client, and %d by the two others", before, loads)
	}
}

// A release that knows of nobody deletes the key only if nobody waits for it. If somebody does, it passes the
// key on.
func TestAReleaseThatFindsSomebodyPassesTheKeyOn(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	guard(n)
	load := newEar() // release.lua, which no lock has needed so far
	a := newAttempt(t, n, "k")
	a.acquire().want(t, Granted)
	a.Release(&a.buf, load, false, &TurnPass{Contender: Nobody})
	load.want(t, Deleted)
	a = newAttempt(t, n, "k")
	a.acquire().want(t, Granted)
	s.Do(t, "ZADD", wantsOf(a.t0()), 1, "w-1")
	before := n.Commands()
	a.release().want(t, Deleted)
	if owner, sent := s.Do(t, "GET", "k"), n.Commands()-before; owner != TurnOf+"w-1" || sent != 2 {
		t.Errorf("the key is %v's after %d commands", owner, sent)
	}
	wantDebts(t, n, 0)
}

// If that is the end of work that others may no longer need, all who wait are notified, and nobody is granted
// the key.
func TestAReleaseThatFindsSomebodyReportsItsNews(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	guard(n)
	told := s.Client(t).Subscribe(t.Context(), Inbox+"x", Inbox+"y")
	defer told.Close()
	for range 2 {
		if _, err := told.Receive(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	a := newAttempt(t, n, "k")
	a.acquire().want(t, Granted)
	s.Do(t, "ZADD", wantsOf(a.t0()), 1, "w#x-1", 2, "w#y-1", 3, "w#y-2")
	end := newEar()
	a.Release(&a.buf, end, false, &TurnPass{News: NewsLook})
	end.want(t, Deleted)
	for _, want := range []string{"1 turn", "1 other", "2 other"} {
		m, err := told.ReceiveTimeout(t.Context(), 10*time.Second)
		if m, is := m.(*redis.Message); !is || m.Payload != want {
			t.Errorf("%v %v, want %q", m, err, want)
		}
	}
}

// A user who may not access the marker any more gets no vote, but what is held is released all the same.
func TestAReleaseDoesWithoutTheMarker(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	guard(n)
	for i, p := range []TurnPass{{}, {Contender: Nobody}} {
		s.Do(t, "ACL", "SETUSER", "default", "allkeys")
		key := fmt.Sprint("k", i)
		eventuallyGranted(t, n, key) // the release before may have found the server without votes
		a := newAttempt(t, n, key)
		a.acquire().want(t, Granted)
		s.Do(t, "ZADD", wantsOf(a.t0()), 1, "w-1")
		s.Do(t, "ACL", "SETUSER", "default", "resetkeys", "~k*", "~flightlock:{???}:*")
		released := newEar()
		a.Release(&a.buf, released, false, &p)
		released.want(t, Deleted)
		newAttempt(t, n, "k").acquire().want(t, Failed)
	}
}

// A server without a guard, as a master of a Cluster, that has refused to load the scripts is asked again.
func TestAServerThatHasRefusedScriptsIsAskedAgain(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	s.Do(t, "ACL", "SETUSER", "default", "-script", "-eval")
	rep := newAttempt(t, n, "k").acquire().want(t, Failed)
	if text := rep.Err.Error(); !strings.Contains(text, "'script|load'") || !strings.Contains(text, "'eval'") {
		t.Errorf("%v: it does not name both refusals", rep.Err)
	}
	s.Do(t, "ACL", "SETUSER", "default", "+script")
	eventuallyGranted(t, n, "k")
}
