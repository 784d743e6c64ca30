package lua_test

import (
	"crypto/sha1"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
)

const second = 1_000_000 // in microseconds

// boot runs the script with a minute of quarantine, and returns name, state and age.
func (s *store) boot(name, establish string) (got, state string, age int64) {
	s.t.Helper()
	v := s.must(lua.Boot, []string{lua.Marker, lua.Past}, name, 60*second, establish, 0, "").([]any)
	return v[0].(string), v[1].(string), v[2].(int64)
}

func (s *store) wantBoot(name, establish, wantName, wantState string) {
	s.t.Helper()
	if got, state, age := s.boot(name, establish); got != wantName || state != wantState || age < 0 {
		s.t.Errorf("memory %s is %s, %d old; want %s, %s", got, state, age, wantName, wantState)
	}
	if marker := s.value(lua.Marker); marker != wantName {
		s.t.Errorf("the marker is %s", marker)
	}
}

// past changes one field of the node's record of its last epoch: name, state, since, run, promoted.
func (s *store) past(word int, value any) {
	words := strings.Fields(s.value(lua.Past))
	words[word] = fmt.Sprint(value)
	s.set(lua.Past, strings.Join(words, " "), 0)
}

// process is what boot.lua reads about the server's process.
func (s *store) process() string {
	_, rest, _ := strings.Cut(s.Info(s.t.Context(), "server").Val(), "run_id:")
	return strings.Fields(rest)[0]
}

// now is the node's clock in microseconds.
func (s *store) now() int64 { return s.Time(s.t.Context()).Val().UnixMicro() }

// An epoch without marker is new, and keeps its name until it is lost; it is established by name,
// or when the quarantine is over.
func TestBootOfANewEpoch(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.wantBoot("m1", "", "m1", "new")
		s.wantBoot("m2", "", "m1", "new")
		s.wantBoot("m2", "m2", "m1", "new") // of another memory
		s.wantBoot("m2", "m1", "m1", "kept")
		s.wantBoot("m2", "", "m1", "kept")

		s.reset()
		s.wantBoot("m3", "m1", "m3", "new") // it was established before it was lost
		s.past(2, s.now()-59*second)
		s.wantBoot("m4", "", "m3", "new")
		s.past(2, s.now()-60*second)
		s.wantBoot("m4", "", "m3", "kept")

		s.Del(t.Context(), lua.Past)
		s.wantBoot("m5", "", "m5", "new")
		s.Del(t.Context(), lua.Marker)
		s.wantBoot("m6", "", "m6", "new")
		s.set(lua.Marker, "m5", 0) // an old one
		s.wantBoot("m7", "", "m7", "new")
	})
}

// bootKnown is boot for a client that has seen the node established, or lost; over is the epoch whose
// quarantine is over by its own clock.
func (s *store) bootKnown(name, establish, over string) string {
	s.t.Helper()
	v := s.must(lua.Boot, []string{lua.Marker, lua.Past}, name, 60*second, establish, 1, over).([]any)
	return fmt.Sprint(v[0], " ", v[1])
}

// Whoever has seen an epoch of the node knows that a missing marker, and a new one, mean that data was lost.
// It writes that for those who have not, and no name establishes what is lost.
func TestBootOfANodeThatIsKnown(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		want := func(got, want string) {
			t.Helper()
			if got != want {
				t.Errorf("%s, want %s", got, want)
			}
		}
		want(s.bootKnown("m1", "", ""), "m1 lost")
		s.wantBoot("m2", "m1", "m1", "lost")

		s.reset()
		s.wantBoot("m3", "", "m3", "new")
		want(s.bootKnown("m4", "m3", ""), "m3 lost")
		s.wantBoot("m5", "m3", "m3", "lost")

		s.reset()
		s.wantBoot("m6", "", "m6", "new")
		s.wantBoot("m7", "m6", "m6", "kept")
		want(s.bootKnown("m8", "", ""), "m6 kept")

		if s.real { // old data, in which the epoch was not established yet
			s.reset()
			s.wantBoot("m9", "", "m9", "new")
			s.past(3, "another")
			want(s.bootKnown("m10", "", ""), "m10 lost")
		}
	})
}

// Where the node's clock stands still, the quarantine ends by a client's.
func TestBootOfAnEpochThatIsOverByTheClientsClock(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		for _, c := range []struct{ over, want string }{{"", "m1 lost"}, {"m0", "m1 lost"}, {"m1", "m1 kept"}} {
			s.bootKnown("m1", "", "")
			if got := s.bootKnown("m2", "", c.over); got != c.want {
				t.Errorf("over %q: %s, want %s", c.over, got, c.want)
			}
		}
	})
}

// saying is a script for a server whose INFO has other fields (see redistest.Saying).
func saying(script lua.Script, fields map[string]string) lua.Script {
	source := redistest.Saying(fields) + script.Source
	return lua.Script{Source: source, SHA: fmt.Sprintf("%x", sha1.Sum([]byte(source)))}
}

// Only a master reports an epoch. Several active replicas accept writes, and each would grant what another
// has.
func TestBootOfANodeThatIsNoMaster(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		if !s.real {
			t.Skip("miniredis has no INFO replication")
		}
		for _, role := range []string{"slave", "active-replica"} {
			boot := saying(lua.Boot, map[string]string{"role": role})
			_, err := s.run(boot, []string{lua.Marker, lua.Past}, "m1", 60*second, "", 0, "")
			if err == nil || !strings.HasPrefix(err.Error(), "READONLY ") {
				t.Errorf("%s: %v", role, err)
			} else if role != "slave" && !strings.Contains(err.Error(), role) {
				t.Errorf("%s: %v", role, err)
			}
		}
		if n := s.Exists(t.Context(), lua.Marker, lua.Past).Val(); n != 0 {
			t.Error("it has written a marker")
		}
	})
}

// A server without run_id, such as Dragonfly or kvrocks, is known by its process id and by when it began.
func TestBootWithoutARunID(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		if !s.real {
			t.Skip("miniredis has no INFO server")
		}
		began := s.now()/second - 100 // the second in which the process began
		boot := func(name, establish, pid string, up int64) string {
			t.Helper()
			v := s.must(saying(lua.Boot, map[string]string{
				"run_id": "", "master_replid2": "", "second_repl_offset": "", "server_time_usec": "",
				"process_id": pid, "uptime_in_seconds": fmt.Sprint(up),
			}), []string{lua.Marker, lua.Past}, name, 60*second, establish, 0, "").([]any)
			if v[3] == "" || v[5] != "" || v[8] != "" {
				t.Errorf("%q", v)
			}
			return fmt.Sprint(v[0], " ", v[1])
		}
		up := func() int64 { return s.now()/second - began }
		for i, c := range []struct{ got, want string }{
			{boot("m1", "", "7", 3), "m1 new"},
			{boot("m2", "m1", "7", 4), "m1 new"}, // a second process would not be told from one that is so young
			{boot("m2", "m1", "7", 5), "m1 kept"},
		} {
			if c.got != c.want {
				t.Errorf("step %d: %s, want %s", i, c.got, c.want)
			}
		}
		s.reset()
		for i, c := range []struct{ got, want string }{
			{boot("m1", "", "7", up()), "m1 new"},
			{boot("m2", "m1", "7", up()), "m1 kept"},
			{boot("m2", "", "7", up()+1), "m1 kept"}, // a clock is read twice
			{boot("m2", "", "8", up()), "m2 lost"},
			{boot("m3", "", "8", up()), "m2 lost"},
			{boot("m4", "", "8", up()-10), "m4 lost"},
		} {
			if c.got != c.want {
				t.Errorf("step %d: %s, want %s", i, c.got, c.want)
			}
		}
		// A client that knows run_id only, as earlier ones do, neither sees a difference nor leaves one.
		s.reset()
		boot("m1", "", "7", up())
		boot("m1", "m1", "7", up())
		before := s.value(lua.Past)
		s.must(saying(lua.Boot, map[string]string{"run_id": "", "process_id": ""}), []string{lua.Marker, lua.Past},
			"m2", 60*second, "", 0, "")
		if after := s.value(lua.Past); after != before {
			t.Errorf("%q, was %q", after, before)
		}
		if got := boot("m3", "", "7", up()); got != "m1 kept" {
			t.Error(got)
		}
	})
}

// A marker of another process, or from before the server was promoted, belongs to an epoch that
// lost data. If it never had a vote, nothing can be missing.
func TestBootOfALostEpoch(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		if !s.real {
			t.Skip("miniredis has no INFO server")
		}
		s.wantBoot("m1", "", "m1", "new")
		s.past(3, "another")
		s.wantBoot("m2", "", "m2", "new")
		s.wantBoot("m3", "m2", "m2", "kept")
		s.past(3, "another")
		s.wantBoot("m3", "m2", "m3", "lost")
		s.wantBoot("m4", "m3", "m3", "lost") // only time can establish it
		s.past(2, s.now()-60*second)
		s.wantBoot("m4", "", "m3", "kept")

	})
}

// An epoch that was begun by clients that cannot read the process is trusted by the first client
// that can, if the process has begun before it, and was no replica since: otherwise it is old data
// that a restart, or a failover, brought back.
func TestBootByTheFirstWhoMayAskINFO(t *testing.T) {
	t.Parallel()
	eachOwnStore(t, func(t *testing.T, s *store) {
		if !s.real {
			t.Skip("miniredis has no ACL for scripts")
		}
		s.older()
		begin := func() {
			s.reset()
			s.allow("-info")
			s.wantBoot("m1", "", "m1", "new")
			s.wantBoot("m1", "m1", "m1", "kept")
		}
		begin()
		s.allow("")
		s.wantBoot("m2", "", "m1", "kept")

		begin()
		s.past(2, s.now()-3600*second) // before the process
		s.wantBoot("m2", "", "m1", "kept")
		s.allow("")
		s.wantBoot("m2", "", "m2", "lost")
		s.wantBoot("m3", "", "m2", "lost")

		begin()
		s.Do(t.Context(), "REPLICAOF", "127.0.0.1", "1")
		s.Do(t.Context(), "REPLICAOF", "NO", "ONE")
		s.wantBoot("m2", "", "m1", "kept")
		s.allow("")
		s.wantBoot("m2", "", "m2", "lost")
	})
}

// older waits until the server's process began in a second before the present one.
func (s *store) older() {
	if !s.real {
		return
	}
	_, up, _ := strings.Cut(s.Info(s.t.Context(), "server").Val(), "uptime_in_seconds:")
	if strings.HasPrefix(up, "0") {
		// The server's clock is ours, 100 ms late.
		time.Sleep(time.Until(time.Now().Truncate(time.Second).Add(1100 * time.Millisecond)))
	}
}

// A server that is promoted has a new epoch, each time; that it lost its replicas since, and with
// them its previous replication id, does not matter.
func TestBootAfterAPromotion(t *testing.T) {
	t.Parallel()
	eachOwnStore(t, func(t *testing.T, s *store) {
		if !s.real {
			t.Skip("miniredis has no replicas")
		}
		promote := func() {
			s.Do(t.Context(), "REPLICAOF", "127.0.0.1", "1")
			s.Do(t.Context(), "REPLICAOF", "NO", "ONE")
		}
		s.wantBoot("m1", "", "m1", "new")
		s.wantBoot("m1", "m1", "m1", "kept")
		s.past(4, "gone:7") // it was promoted before, and no longer has that replication id
		s.wantBoot("m2", "", "m1", "kept")
		promote()
		s.wantBoot("m2", "", "m2", "lost")
		s.wantBoot("m3", "", "m2", "lost")
		promote()
		s.wantBoot("m3", "", "m3", "lost")
	})
}

// A process that was promoted again, after the last time that boot.lua reported, is noticed by a
// strict check, and only by that. That a master has lost its replicas, and with them its previous
// replication id, is no reason.
func TestACloserLookSeesAPromotion(t *testing.T) {
	t.Parallel()
	eachOwnStore(t, func(t *testing.T, s *store) {
		if !s.real {
			t.Skip("miniredis has no replicas")
		}
		replicaOf := func(args ...any) { s.Do(t.Context(), append([]any{"REPLICAOF"}, args...)...) }
		promoted := func(name string) string {
			v := s.must(lua.Boot, []string{lua.Marker, lua.Past}, name, 60*second, name, 0, "").([]any)
			return v[8].(string)
		}
		run := s.process()
		want := func(how, name, promoted string, closer, forgot bool) {
			t.Helper()
			s.Del(t.Context(), key)
			err := s.acquireIn(lua.Epoch{Name: name, Run: run, Promoted: promoted}, closer)
			if (err != nil) != forgot || forgot && !strings.HasPrefix(err.Error(), "EPOCH ") {
				t.Errorf("%s: %v", how, err)
			}
			if there := s.value(key) == "o"; there == forgot {
				t.Errorf("%s: the key is there: %v", how, there)
			}
		}
		first := promoted("m1")
		if first != "-" {
			t.Errorf("promoted %q", first)
		}
		want("never a replica", "m1", first, true, false)
		want("it has lost its replicas", "m1", "abc:7", true, false)
		replicaOf("127.0.0.1", "1")
		_, err := s.run(lua.Boot, []string{lua.Marker, lua.Past}, "m2", 60*second, "", 0, "")
		if err == nil || !strings.HasPrefix(err.Error(), "READONLY ") {
			t.Errorf("boot of a replica: %v", err)
		}
		err = s.acquireIn(lua.Epoch{Name: "m1", Run: run, Promoted: first}, true)
		if err == nil || !strings.HasPrefix(err.Error(), "EPOCH ") {
			t.Errorf("a replica: %v", err)
		}
		replicaOf("NO", "ONE")
		want("promoted, usual look", "m1", first, false, false)
		want("promoted", "m1", first, true, true)
		s.wantBoot("m2", "", "m2", "new")
		second := promoted("m2")
		want("known to be promoted", "m2", second, true, false)
		replicaOf("127.0.0.1", "1")
		replicaOf("NO", "ONE")
		want("promoted again", "m2", second, true, true)
		s.wantBoot("m3", "", "m3", "lost")
		third := promoted("m3")
		want("known again", "m3", third, true, false)
		s.allow("-info")
		want("no more allowed to ask", "m3", third, true, true)
		if said := promoted("m3"); said != "" {
			t.Errorf("without INFO: promoted %q", said)
		}
		if len(map[string]bool{first: true, second: true, third: true}) != 3 {
			t.Errorf("%q, %q, %q", first, second, third)
		}
	})
}

// A clock that is set back restarts the quarantine, and does not make it longer than that.
func TestBootWhenTheClockWasSetBack(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.wantBoot("m1", "", "m1", "new")
		s.past(2, s.now()+3600*second)
		before := s.now()
		s.wantBoot("m2", "", "m1", "new")
		var since int64
		_, err := fmt.Sscan(strings.Fields(s.value(lua.Past))[2], &since)
		if err != nil || since < before || since > s.now() {
			t.Errorf("since %d, %v", since, err)
		}
	})
}

// A client that cannot read the process sees no difference, and leaves none for a client that can.
func TestBootWithoutINFO(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		if !s.real {
			t.Skip("miniredis has no ACL for scripts")
		}
		s.older()
		informed := strings.Fields(func() string { s.boot("m1", ""); return s.value(lua.Past) }())
		s.wantBoot("m1", "m1", "m1", "kept")
		s.Do(t.Context(), "ACL", "SETUSER", "default", "-info")
		v := s.must(lua.Boot, []string{lua.Marker, lua.Past}, "m2", 60*second, "", 0, "").([]any)
		if v[0] != "m1" || v[1] != "kept" || v[3] != "" ||
			!strings.Contains(v[5].(string), "ermission") && !strings.Contains(v[5].(string), "can't run") {
			t.Errorf("%q", v)
		}
		if now := strings.Fields(s.value(lua.Past)); !slices.Equal(now[2:], informed[2:]) {
			t.Errorf("%q, was %q", now, informed)
		}
		s.reset()
		s.wantBoot("m3", "", "m3", "new")
		s.wantBoot("m3", "m3", "m3", "kept")
		s.Do(t.Context(), "ACL", "SETUSER", "default", "+info")
		s.wantBoot("m4", "", "m3", "kept")
		s.past(3, "another")
		s.wantBoot("m4", "", "m4", "lost")
	})
}

// A client that can read only one part of INFO sees no difference that needs both, says so, and
// leaves it to be seen by a client that can read both.
func TestBootWithHalfOfINFO(t *testing.T) {
	t.Parallel()
	eachOwnStore(t, func(t *testing.T, s *store) {
		if !s.real {
			t.Skip("miniredis has no ACL for scripts")
		}
		for _, half := range []string{"-info +info|replication", "-info +info|server"} {
			s.reset()
			s.allow("")
			s.wantBoot("m1", "", "m1", "new")
			s.wantBoot("m1", "m1", "m1", "kept")
			s.Do(t.Context(), "REPLICAOF", "127.0.0.1", "1")
			s.Do(t.Context(), "REPLICAOF", "NO", "ONE")
			s.allow(half)
			v := s.must(lua.Boot, []string{lua.Marker, lua.Past}, "m2", 60*second, "", 0, "").([]any)
			if v[0] != "m1" || v[1] != "kept" || v[5] == "" || v[8] != "" {
				t.Errorf("%s: %q", half, v)
			}
			s.allow("")
			s.wantBoot("m3", "", "m3", "lost")
		}
	})
}

// reload makes the server read its marker from a dump, as if with all its data.
func (s *store) reload() {
	s.t.Helper()
	ctx := s.t.Context()
	if err := s.RestoreReplace(ctx, lua.Marker, 0, s.Dump(ctx, lua.Marker).Val()).Err(); err != nil {
		s.t.Fatal(err)
	}
}

// allow sets the rights of the client from here on, everything else being allowed.
func (s *store) allow(rights string) {
	s.t.Helper()
	args := []any{"ACL", "SETUSER", "default", "+@all"}
	for _, r := range strings.Fields(rights) {
		args = append(args, r)
	}
	if err := s.Do(s.t.Context(), args...).Err(); err != nil {
		s.t.Fatal(err)
	}
}

// bootRaw reports whether boot.lua lets acquire rely on the marker's raw encoding. The epoch must
// continue.
func (s *store) bootRaw(memory string) bool {
	s.t.Helper()
	v := s.must(lua.Boot, []string{lua.Marker, lua.Past}, memory+"x", 60*second, "", 0, "").([]any)
	if v[0] != memory {
		s.t.Errorf("memory %v is %v, want %s", v[0], v[1], memory)
	}
	return v[7] == int64(1)
}

// A marker that was read from a dump belongs to an epoch that lost data, also for a client that
// cannot read the process; the next marker is good again.
func TestBootOfAMarkerFromADump(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		if !s.real {
			t.Skip("miniredis has no encodings")
		}
		for _, rights := range []string{"", "-info"} {
			s.reset()
			s.allow(rights)
			s.wantBoot("m1", "", "m1", "new")
			s.reload()
			s.wantBoot("m2", "m1", "m2", "new") // it never had a vote
			s.wantBoot("m3", "m2", "m2", "kept")
			s.reload()
			s.wantBoot("m3", "m2", "m3", "lost")
			s.wantBoot("m4", "", "m3", "lost")
			s.past(2, s.now()-60*second)
			s.wantBoot("m4", "", "m3", "kept")
			if !s.bootRaw("m3") {
				t.Error("the marker is not raw")
			}

			acquire := func(raw bool) error {
				s.Del(t.Context(), key)
				return s.acquireIn(lua.Epoch{Name: "m3", Raw: raw}, true)
			}
			if err := acquire(true); err != nil {
				t.Error(err)
			}
			s.reload()
			if err := acquire(true); err == nil || !strings.HasPrefix(err.Error(), "EPOCH ") || s.value(key) == "o" {
				t.Errorf("granted with a marker from a dump: %v", err)
			}
			if err := acquire(false); err != nil {
				t.Errorf("a client that does not check: %v", err)
			}
			s.wantBoot("m5", "", "m5", "lost")
		}
	})
}

// A client that lacks a right sees less, and neither takes what it cannot see for a loss nor makes
// others do so, whichever of them writes the marker: the epoch continues, and a client with all
// rights recognizes it. A loss that it cannot see remains visible to others.
func TestBootOfClientsWithDifferentRights(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		if !s.real {
			t.Skip("miniredis has no ACL for scripts")
		}
		s.older()
		for _, less := range []string{
			"-object", "-append", "-object -append", "-object -info", "-append -info", "-object -append -info",
		} {
			s.reset()
			s.allow(less)
			s.wantBoot("m1", "", "m1", "new")
			s.wantBoot("m1", "m1", "m1", "kept")
			if s.bootRaw("m1") {
				t.Errorf("%s: it counts on what it could not find out", less)
			}
			blind := strings.Contains(less, "-object")
			for range 2 {
				s.allow("")
				if !s.bootRaw("m1") {
					t.Errorf("%s, then all: not raw", less)
				}
				s.allow(less)
				if s.bootRaw("m1") == blind {
					t.Errorf("all, then %s: raw %v", less, !blind)
				}
			}
			s.past(1, "new")
			s.wantBoot("m2", "m1", "m1", "kept") // by who sees less
			s.allow("")
			s.wantBoot("m3", "", "m1", "kept")

			s.reload()
			want := "m4"
			if s.allow(less); blind {
				s.wantBoot("m4", "", "m1", "kept")
				s.past(1, "new")
				s.wantBoot("m4", "m1", "m1", "kept")
				want = "m5"
			} else {
				s.wantBoot("m4", "", "m4", "lost")
			}
			s.allow("")
			s.wantBoot("m5", "", want, "lost")
			s.allow(less)
			s.wantBoot("m6", "", want, "lost")
			s.allow("")
			s.wantBoot("m7", "", want, "lost")
			if !s.bootRaw(want) {
				t.Error("not raw in the end")
			}
		}
	})
}

// A name so long that it is raw even from a dump proves nothing, and no client relies on it.
func TestBootOfALongName(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		const long = 45 // for any server
		for length, want := range map[int]bool{lua.MaxName: s.real, long: false} {
			s.reset()
			name := strings.Repeat("m", length)
			s.wantBoot(name, "", name, "new")
			s.wantBoot("m2", name, name, "kept")
			if got := s.bootRaw(name); got != want {
				t.Errorf("%d letters: raw %v", length, got)
			}
			if s.real {
				s.reload()
				if raw := s.ObjectEncoding(t.Context(), lua.Marker).Val() == "raw"; raw != (length == long) {
					t.Errorf("%d letters from a dump: raw %v", length, raw)
				}
			}
		}
	})
}
