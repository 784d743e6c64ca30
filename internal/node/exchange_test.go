package node

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// A batch is one command, whatever its requests are, and each gets the answer that it would have
// got alone.
func TestABatchIsOneCommand(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	keys := sameLane(12)
	var as []*attempt
	for _, key := range keys {
		as = append(as, newAttempt(t, n, key))
	}
	asked := make([]*ear, len(as))
	oneBatch(n, func() { // the scripts are loaded
		for i, a := range as {
			asked[i] = a.acquire()
		}
	})
	for _, e := range asked {
		e.want(t, Granted)
	}
	var before int64
	late := func(key, owner, contender string) *Entry {
		target := &Target{}
		target.Init(key, owner, contender)
		e := &Entry{}
		e.Init(n, target, 0)
		return e
	}
	// Both wait already, since urgent requests are sent first.
	for _, e := range []*Entry{late(keys[0], "late-0", "late-0"), late(keys[1], "late-2", "late-2")} {
		heard := newEar()
		e.Acquire(new(RequestBuf), heard, longTTL, 1, 0, false)
		heard.want(t, Held)
	}
	other, rival := late(keys[0], "late-1", "late-0"), late(keys[1], "late-3", "late-2")
	s.Do(t, "DEL", keys[2])
	before = evals(t, s)
	ears := []*ear{newEar(), newEar(), newEar(), newEar()}
	oneBatch(n, func() {
		other.Acquire(new(RequestBuf), ears[0], longTTL, 1, 0, false)
		as[0].Refresh(ears[1], longTTL, 1, 7, 0, soon(), "asker-1")
		rival.Acquire(new(RequestBuf), ears[2], longTTL, 1, 0, false)
		as[1].Release(&as[1].buf, ears[3], false, &TurnPass{Contender: as[1].Entry.t.Owner(), Rival: "late-2"})
		ears = append(ears, as[2].release(), as[3].refresh(), as[4].release())
	})
	for i, want := range []Kind{Held, Renewed, Granted, Deleted, Missing, Renewed, Deleted} {
		rep := ears[i].want(t, want)
		switch {
		case i == 0 && (rep.Holder != as[0].Entry.t.Owner() || rep.TTL <= 0):
			t.Errorf("held by %q for %v", rep.Holder, rep.TTL)
		case i == 1 && rep.Rival != "late-0":
			t.Errorf("rival %q", rep.Rival)
		}
	}
	if calls := evals(t, s) - before; calls != 1 {
		t.Errorf("%d commands", calls)
	}
	if got := s.Do(t, "GET", keys[1]); got != "late-3" { // in its turn
		t.Errorf("%s holds %v", keys[1], got)
	}
}

// Releases that leave nothing to decide go as a group, from wherever in the batch they are, and
// each request gets its own answer. A user without MGET gets the same, with more commands.
func TestReleasesOfABatchGoAsAGroup(t *testing.T) {
	t.Parallel()
	for rights, want := range map[string]map[string]int64{
		// Five of the keys are still ours, and another client waits for one of them.
		"+@all":       {"mget": 1, "exists": 1 + 5, "zrange": 2, "del": 1},
		"+@all -mget": {"mget": 0, "exists": 1, "zrange": 6, "del": 4},
	} {
		t.Run(rights, func(t *testing.T) {
			s := redistest.StartServer(t)
			args := []any{"ACL", "SETUSER", "app", "on", ">pw", "~*", "&*"}
			for _, w := range strings.Fields(rights) {
				args = append(args, w)
			}
			s.Do(t, args...)
			n := newNode(t, s.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "pw" }))
			keys := sameLane(9)
			var as []*attempt
			for _, key := range keys[:8] {
				a := newAttempt(t, n, key)
				a.acquire().want(t, Granted)
				as = append(as, a)
			}
			s.Do(t, "DEL", keys[1])
			s.Do(t, "SET", keys[2], "other#1")
			s.Do(t, "ZADD", newTarget(keys[3], "").wants().String(), 1, "waiter-1")
			late := newAttempt(t, n, keys[8])
			before := s.CommandCalls(t)
			var asked []*ear
			oneBatch(n, func() {
				asked = append(asked, late.acquire(), as[0].release(), as[7].refresh())
				for _, a := range as[1:7] {
					asked = append(asked, a.release())
				}
			})
			for i, kind := range []Kind{Granted, Deleted, Renewed, Missing, Held, Deleted, Deleted, Deleted, Deleted} {
				if rep := asked[i].want(t, kind); kind == Held && rep.Holder != "other#1" {
					t.Errorf("held by %q", rep.Holder)
				}
			}
			if got := s.Do(t, "GET", keys[3]); got != TurnOf+"waiter-1" {
				t.Errorf("the key that somebody waits for holds %v", got)
			}
			after := s.CommandCalls(t)
			for command, calls := range want {
				if got := after[command] - before[command]; got != calls {
					t.Errorf("%d calls of %s, want %d", got, command, calls)
				}
			}
			late.release().want(t, Deleted)
			as[7].release().want(t, Deleted)
			wantDebts(t, n, 0)
		})
	}
}

// What fails one request of a batch does not affect the others: a key of another type, a key that
// the server's user must not use.
func TestOneRequestsErrorIsNotTheBatchs(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	rules := "on >pw ~* &* +@all"
	for name, c := range map[string]struct {
		rule  []any
		spoil func(key string)
		want  string
	}{
		"wrong type": {spoil: func(key string) { s.Do(t, "RPUSH", key, "x") }, want: "WRONGTYPE"},
		"no right":   {rule: []any{"~k*", "~" + Reserved + "*"}, want: "NOPERM"},
	} {
		t.Run(name, func(t *testing.T) {
			s.Do(t, "FLUSHALL")
			words := strings.Fields(rules)
			args := []any{"ACL", "SETUSER", "app", "reset"}
			for _, w := range words {
				if w == "~*" && c.rule != nil {
					args = append(args, c.rule...)
				} else {
					args = append(args, w)
				}
			}
			s.Do(t, args...)
			n := newNode(t, s.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "pw" }))
			keys := sameLane(8)
			bad := "bad" + keys[0]
			for i := 0; newTarget(bad, "").lane != 0; i++ {
				bad = fmt.Sprint("bad", i)
			}
			if c.spoil != nil {
				c.spoil(bad)
			}
			var as []*attempt
			var asked []*ear
			oneBatch(n, func() {
				for i, key := range keys {
					if i == 3 {
						key = bad
					}
					a := newAttempt(t, n, key)
					as, asked = append(as, a), append(asked, a.acquire())
				}
			})
			for i, e := range asked {
				if i != 3 {
					e.want(t, Granted)
				} else if rep := e.want(t, Failed); !conn.HasCode(rep.Err, c.want) || !Final(rep.Err) || !neverRan(rep.Err) {
					t.Errorf("error %v", rep.Err)
				}
			}
			as[3].release().wantNow(t, Missing) // it has left nothing
			for i, a := range as {
				if i != 3 {
					a.release().want(t, Deleted)
				}
			}
			wantDebts(t, n, 0)
		})
	}
}

// If a server refuses a batch as a whole, before it runs, each request is sent by itself, and for a
// while there are no more batches. If nothing proves that it did not run, each request has failed
// and is undone.
func TestARefusedBatchGoesInParts(t *testing.T) {
	t.Parallel()
	for _, c := range classes {
		if conn.HasCode(redisError(c.line), "MOVED") || strings.Contains(c.line, "@user_script") {
			continue // of a Cluster; of a script
		}
		t.Run(c.line[:min(len(c.line), 40)], func(t *testing.T) {
			t.Parallel()
			var refused, alone atomic.Int32
			f := redistest.StartFake(t, func(cmd []string) string {
				switch cmd[1] {
				case lua.Batch.SHA:
					refused.Add(1)
					return "-" + c.line + "\r\n"
				case lua.Release.SHA, lua.Undo.SHA:
					return ":1\r\n"
				}
				return fmt.Sprintf(":%d\r\n", alone.Add(1))
			})
			n := newNode(t, f.Client(t))
			var as []*attempt
			for range 2 {
				var asked []*ear
				oneBatch(n, func() {
					for _, key := range sameLane(5) {
						a := newAttempt(t, n, key)
						as, asked = append(as, a), append(asked, a.acquire())
					}
				})
				for i, e := range asked {
					if c.clean || len(as) > 5 {
						if rep := e.want(t, Granted); rep.Counter != int64(alone.Load())-int64(len(asked)-1-i) {
							t.Errorf("request %d got counter %d", i, rep.Counter)
						}
					} else {
						e.want(t, Failed)
					}
				}
			}
			for _, a := range as {
				a.release().want(t, Deleted)
			}
			if got := refused.Load(); got != 1 {
				t.Errorf("%d batches, want one", got)
			}
			never := !c.clean || strings.HasPrefix(c.line, "CROSSSLOT")
			if apart := n.servers[0].noBatchUntil.Load(); (apart == math.MaxInt64) != never {
				t.Errorf("apart until %d", apart)
			}
			wantDebts(t, n, 0)
		})
	}
}

// A server that has the scripts of requests and not that of a batch, or none, gets them inside the
// attempt.
func TestABatchIsHealed(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	for _, script := range append(lua.Voteless, lua.Acquire) {
		s.Do(t, "SCRIPT", "LOAD", script.Source)
	}
	for range 2 {
		var as []*attempt
		var asked []*ear
		oneBatch(n, func() {
			for _, key := range sameLane(minBatchCmd) {
				a := newAttempt(t, n, key)
				as, asked = append(as, a), append(asked, a.acquire())
			}
		})
		for i, e := range asked {
			e.want(t, Granted)
			as[i].release().want(t, Deleted)
		}
		s.Do(t, "SCRIPT", "FLUSH")
	}
}

// Votes in a batch are requested in the epoch of the node too: a batch in one that is over grants
// nothing, and its other requests are executed.
func TestABatchAsksInTheMemoryOfTheNode(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	changes := guard(n)
	keys := sameLane(6)
	ask := func() (as []*attempt) {
		t.Helper()
		var asked []*ear
		oneBatch(n, func() {
			for _, key := range keys {
				a := newAttempt(t, n, key)
				as, asked = append(as, a), append(asked, a.acquire())
			}
		})
		for _, e := range asked {
			if rep := e.want(t, Granted); rep.Epoch == nil || rep.Epoch.Name != changes()[len(changes())-1] {
				t.Errorf("granted in %v, not in the last of %v", rep.Epoch, changes())
			}
		}
		return as
	}
	as := ask()
	s.Do(t, "FLUSHALL") // which keeps the scripts
	again, ears := newAttempt(t, n, keys[0]), []*ear{}
	oneBatch(n, func() {
		ears = append(ears, again.acquire())
		for _, a := range as[1:] {
			ears = append(ears, a.release())
		}
	})
	if rep := ears[0].want(t, Granted); rep.Epoch.Name != changes()[1] || rep.Epoch.State != EpochNew {
		t.Errorf("granted in %v", rep.Epoch)
	}
	for _, e := range ears[1:] {
		e.want(t, Missing)
	}
	again.release().want(t, Deleted)
	ask()
	if got := changes(); len(got) != 2 {
		t.Errorf("epochs: %v", got)
	}
}

// Requests whose batch was lost with its connection are indeterminate, and undone.
func TestALostBatchIsInDoubt(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	p := redistest.StartProxy(t, s.Addr())
	n := newNode(t, s.Client(t, at(p.Addr())))
	warm := newAttempt(t, n, sameLane(1)[0])
	warm.acquire().want(t, Granted)
	warm.release().want(t, Deleted)
	before := evals(t, s)
	p.CutReplies(0)
	var as []*attempt
	var asked []*ear
	oneBatch(n, func() {
		for _, key := range sameLane(6) {
			a := newAttempt(t, n, key)
			as, asked = append(as, a), append(asked, a.acquire())
		}
	})
	for i, e := range asked {
		if rep := e.want(t, Failed); neverRan(rep.Err) || errors.Is(rep.Err, ErrExpired) {
			t.Errorf("error %v", rep.Err)
		}
		as[i].mu.Lock()
		if as[i].indeterminate != 1 {
			t.Errorf("request %d: %d indeterminate", i, as[i].indeterminate)
		}
		as[i].mu.Unlock()
	}
	if got := evals(t, s) - before; got != 1 {
		t.Errorf("%d commands", got)
	}
	for _, a := range as {
		a.release().want(t, Deleted)
	}
	wantDebts(t, n, 0)
	if keys := lockKeys(t, s); len(keys) > 0 {
		t.Errorf("left behind: %q", keys)
	}
}

// A reply to a batch that is not a list of as many replies is a vote for nobody, and each request
// is undone.
func TestAnswersThatDoNotFitABatchAreFailures(t *testing.T) {
	t.Parallel()
	for _, line := range []string{
		":1\r\n", "*0\r\n", "*3\r\n:1\r\n:1\r\n:1\r\n", "$-1\r\n", "*4\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n",
	} {
		f := redistest.StartFake(t, func(cmd []string) string {
			if cmd[1] == lua.Batch.SHA {
				return line
			}
			return ":1\r\n"
		})
		n := newNode(t, f.Client(t))
		var as []*attempt
		var asked []*ear
		oneBatch(n, func() {
			for _, key := range sameLane(5) {
				a := newAttempt(t, n, key)
				as, asked = append(as, a), append(asked, a.acquire())
			}
		})
		for i, e := range asked {
			e.want(t, Failed)
			as[i].release().want(t, Deleted)
		}
	}
}

// Where a batch leaves a request's arguments out, they are those of the request before it: for all kinds of
// requests, of contenders with and without an offer, and of offers themselves.
func TestArgumentsThatABatchLeavesOutAreTheSame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, redistest.StartMemNode(t, "10.0.0.1:6379").Client(t))
		var entries []*Entry
		for i, contender := range []string{"", "c", "d", "c", "c", "d"} {
			target := new(Target)
			target.Init("key", fmt.Sprint("owner", i), contender)
			switch i {
			case 3, 4: // two polls of one offer
				target.Carry(&Offer{Target: entries[2].t, Tokens: 1}, uint32(i), time.Second, i == 4)
			case 5: // an offer
				target.Carry(&Offer{Target: target, Tokens: 1}, 0, time.Second, false)
			}
			e := new(Entry)
			e.Init(n, target, 0)
			entries = append(entries, e)
		}
		var all []*request
		passes := []*TurnPass{nil, {}, {Contender: "c"}, {Contender: "c", Rival: "d"}}
		for _, e := range entries {
			for _, op := range []op{opAcquire, opRepair, opRefresh, opRelease} {
				for i := range 8 {
					r := &request{e: e, op: op, ttl: time.Second, tokens: int64(i & 1), more: int64(i & 2)}
					if op == opRefresh && i&4 != 0 {
						r.rivalsOf = "c"
					}
					if op == opRelease {
						r.ttl, r.tokens, r.more, r.turnPass = 0, 0, 0, passes[i%len(passes)]
					}
					all = append(all, r)
				}
			}
		}
		values := func(r *request) (texts []string) {
			for _, v := range r.values(nil)[1:] { // without the owner
				switch v := v.(type) {
				case *int64:
					texts = append(texts, fmt.Sprint(*v))
				default:
					texts = append(texts, fmt.Sprint(v))
				}
			}
			return texts
		}
		same := 0
		for _, r := range all {
			for _, p := range all {
				if letterOf[r.script()] != letterOf[p.script()] || !r.sameArgs(p) {
					continue
				}
				if same++; !slices.Equal(values(r), values(p)) {
					t.Errorf("%v of %s: %q, and not %q of %s", r.op, r.e.t.Owner(), values(r), values(p), p.e.t.Owner())
				}
			}
		}
		if same <= len(all) {
			t.Errorf("%d pairs of %d requests", same, len(all))
		}
	})
}

// A node that answers with an error is a node with an error for its observer: also one that is not
// suspended for it, and for requests of callers and of lanes.
func TestErrorRepliesAreObserved(t *testing.T) {
	t.Parallel()
	for _, line := range []string{
		"OOM command not allowed when used memory > 'maxmemory'.",
		"LOADING Redis is loading the dataset in memory",
		"READONLY You can't write against a read only replica.",
		"NOPERM this user has no permissions to run the 'evalsha' command",
	} {
		for _, alone := range []bool{true, false} {
			code, _, _ := strings.Cut(line, " ")
			t.Run(fmt.Sprintf("%s/alone=%v", code, alone), func(t *testing.T) {
				n := startNode(t, redistest.StartFake(t, redistest.ErrorFor("EVALSHA", line)).Client(t), patience, alone)
				var o observed
				o.of(n)
				for range 2 { // by a lane, and by the caller itself if it is alone
					newAttempt(t, n, "k").acquireHere().want(t, Failed)
				}
				if !o.has(code) {
					t.Errorf("observed: %q", o.failures)
				}
				if n.Suspended() {
					t.Error("suspended by an answer")
				}
			})
		}
	}
}

// That a server does not have the scripts yet is no error, but that it refuses to load them is.
func TestRefusedScriptsAreObserved(t *testing.T) {
	t.Parallel()
	refused := redistest.ErrorFor("SCRIPT", "NOPERM this user has no permissions to run the 'script|load' command")
	n := newNode(t, redistest.StartFake(t, func(cmd []string) string {
		if strings.EqualFold(cmd[0], "EVALSHA") {
			return "-NOSCRIPT No matching script.\r\n"
		}
		return refused(cmd)
	}).Client(t))
	var o observed
	o.of(n)
	newAttempt(t, n, "k").acquire().want(t, Failed)
	if !o.has("NOPERM") || o.has("NOSCRIPT") {
		t.Errorf("observed: %q", o.failures)
	}
}

// A process that was paused between a request and its answer does not take the grant for a vote, if
// the server may have been another's replica meanwhile: without the strict check nobody would
// notice. The key is released.
func TestAGrantAfterALongPauseIsNoProof(t *testing.T) {
	t.Parallel()
	f := &forgetful{name: "m1", run: "r", version: "7.0", loaded: map[string]bool{}}
	f.forgets("m1")
	n := newNode(t, redistest.StartFake(t, f.answer).Client(t))
	guard(n)
	newAttempt(t, n, "k").acquire().want(t, Granted)
	long := 10 * n.timeout
	for _, tc := range []struct {
		looks bool
		took  time.Duration
		kind  Kind
	}{
		{false, n.timeout, Granted}, {false, long, Failed}, {true, long, Granted},
	} {
		a := newAttempt(t, n, "k")
		e, l := newEar(), &n.servers[0].lanes[0]
		redistest.Eventually(t, patience, "the lane rests", l.claim)
		l.epoch = n.servers[0].epoch.Load()
		l.by, l.strict, l.lasted = l.epoch.usual, tc.looks, tc.took
		a.create = &request{e: &a.Entry, op: opAcquire, sink: e, ttl: longTTL}
		l.complete(a.create, response{val: int64(7)}, true, true)
		l.rest()
		if rep := e.want(t, tc.kind); tc.kind == Failed && !errors.Is(rep.Err, errOld) {
			t.Error(rep.Err)
		}
		if !a.present {
			t.Error("nobody would release it")
		}
	}
}

// After a pause of the process a grant counts if the server proves that its epoch is still the one
// in which it granted.
func TestAGrantAfterALongPauseIsProvenByTheEpochThatIsStillThere(t *testing.T) {
	t.Parallel()
	for epoch, kind := range map[string]Kind{"m1": Granted, "m2": Failed} {
		f := &forgetful{name: "m1", run: "r", version: "7.0", loaded: map[string]bool{}}
		f.forgets("m1")
		n := newNode(t, redistest.StartFake(t, f.answer).Client(t))
		guard(n)
		a := newAttempt(t, n, "k")
		a.acquire().want(t, Granted)
		e, l := newEar(), &n.servers[0].lanes[0]
		redistest.Eventually(t, patience, "the lane rests", l.claim)
		f.forgets(epoch)
		l.epoch = n.servers[0].epoch.Load()
		l.by, l.strict, l.lasted = l.epoch.usual, false, 10*n.timeout
		if !l.tooOld() {
			t.Error("a long pause is nothing")
		}
		l.prove(t.Context())
		a.create = &request{e: &a.Entry, op: opAcquire, sink: e, ttl: longTTL}
		l.complete(a.create, response{val: int64(7)}, true, true)
		l.rest()
		e.want(t, kind)
	}
}

// After a batch that took long, in a process whose processors are busy, a lane's scripts make the
// strict check. Otherwise each such batch would need a proof: a call of boot.lua, on a connection
// of its own.
func TestALateLaneTakesTheCloserLook(t *testing.T) {
	t.Parallel()
	for _, blind := range []error{nil, errors.New("NOPERM")} {
		f := &forgetful{name: "m1", run: "r", version: "7.0", loaded: map[string]bool{}}
		f.forgets("m1")
		n := newNode(t, redistest.StartFake(t, f.answer).Client(t))
		guard(n)
		newAttempt(t, n, "k").acquire().want(t, Granted)
		l := &n.servers[0].lanes[0]
		redistest.Eventually(t, patience, "the lane rests", l.claim)
		m := *l.s.epoch.Load()
		m.NoInfo = blind
		l.s.epoch.Store(&m)
		for _, tc := range []struct {
			lasted time.Duration
			looks  bool
		}{{n.timeout / 2, false}, {n.timeout * 2, blind == nil}, {n.timeout, false}} {
			l.s.verified.Store(&verification{of: &m, until: time.Now().Add(time.Minute)})
			l.lasted = tc.lasted
			if l.begin(time.Now()); l.strict != tc.looks {
				t.Errorf("after a batch that took %v, refused by %v: closer look %v", tc.lasted, blind, l.strict)
			}
		}
		l.rest()
	}
}

// Only grants wait for their proof. The other answers of the batch are settled before the proof is
// asked for. If nothing was granted, or nobody waits for a grant any more, no proof is asked for.
func TestOnlyGrantsWaitForTheirProof(t *testing.T) {
	t.Parallel()
	f := &forgetful{name: "m1", run: "r", version: "7.0", loaded: map[string]bool{}}
	f.forgets("m1")
	var boots atomic.Int64
	hang, goOn := make(chan struct{}, 1), make(chan struct{})
	n := newNode(t, redistest.StartFake(t, func(cmd []string) string {
		if len(cmd) > 1 && cmd[1] == lua.Boot.SHA {
			boots.Add(1)
			select {
			case <-hang:
				<-goOn
			default:
			}
		}
		return f.answer(cmd)
	}).Client(t))
	guard(n)
	held := newAttempt(t, n, "held")
	held.acquire().want(t, Granted)
	l := &n.servers[0].lanes[0]
	redistest.Eventually(t, patience, "the lane rests", l.claim)
	before := boots.Load()
	asked := func(got response, sink Sink) *request {
		a := newAttempt(t, n, "k")
		a.create = &request{e: &a.Entry, op: opAcquire, sink: sink, ttl: longTTL}
		l.answers = append(l.answers, got)
		return a.create
	}
	complete := func(batch ...*request) {
		l.epoch = n.servers[0].epoch.Load()
		l.by, l.strict, l.lasted = l.epoch.usual, false, time.Second
		l.completeEach(t.Context(), batch, true, true)
		l.answers = l.answers[:0]
	}

	l.answers = l.answers[:0]
	ear := newEar()
	complete(asked(response{val: []any{"other", int64(1000)}}, ear), asked(response{val: int64(7)}, nil))
	ear.want(t, Held)
	if got := boots.Load() - before; got != 0 {
		t.Errorf("asked %d times for a proof of nothing", got)
	}

	hang <- struct{}{}
	granted, renewed := newEar(), newEar()
	a := asked(response{val: int64(7)}, granted)
	l.answers = append(l.answers, response{val: int64(9)})
	settled := make(chan struct{})
	go func() {
		defer close(settled)
		complete(a, &request{e: &held.Entry, op: opRefresh, sink: renewed, ttl: longTTL, deadline: n.now().Add(time.Hour)})
	}()
	renewed.want(t, Renewed) // while the proof has no answer
	close(goOn)
	granted.want(t, Granted)
	<-settled
	l.rest()
}
