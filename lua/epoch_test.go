package lua_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
)

// acquireIn requests a vote in that epoch.
func (s *store) acquireIn(m lua.Epoch, closer bool) error {
	_, err := s.run(lua.Acquire.In(m.Run), alone, in(m, closer, "o", minute, 1)...)
	return err
}

// releaseIn releases the key of "a" in that epoch, for which z-1 waits with an offer, and reports whether
// that was granted, or got a turn.
func (s *store) releaseIn(script lua.Script, m lua.Epoch, closer bool) (granted bool) {
	s.t.Helper()
	name := m.Name
	if name == "" {
		name = "-"
	}
	marker := s.value(lua.Marker)
	s.offersIn(name, "z-1")
	s.set(lua.Marker, marker, 0)
	s.want(s.must(script, all, in(m, closer, "a", "PUBLISH", turn, "a-1")...), int64(1))
	if s.value(key) == "oz" {
		return true
	}
	s.wantTurn("z-1")
	return false
}

// What a node's epoch is to acquire and release.
func TestArgumentsOfAnEpoch(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		lua.Epoch
		usual, strict string
	}{
		{lua.Epoch{}, "", ""},
		{lua.Epoch{Name: "m"}, "", ""},
		{lua.Epoch{Name: "m", Raw: true}, "", "raw - - -"}, // it cannot see the process
		{lua.Epoch{Name: "m", Run: "r"}, "", "- r - -"},
		{lua.Epoch{Name: "m", Run: "r", Raw: true}, "", "raw r - -"},
		{lua.Epoch{Name: "m", Run: "r", AlwaysRun: true}, "- r - -", "- r - -"},
		{lua.Epoch{Name: "m", AlwaysRun: true}, "", ""},
		{lua.Epoch{Name: "m", Run: "r", Promoted: "-"}, "", "- r never never"},
		{lua.Epoch{Name: "m", Run: "r", Promoted: "id:7", Raw: true}, "", "raw r id 7"},
		{lua.Epoch{Run: "r", AlwaysRun: true, Raw: true, Promoted: "id:7"}, "", "- r id 7"}, // of any name
		{lua.Epoch{Raw: true}, "", ""},
	} {
		for strict, want := range map[bool]string{false: tc.usual, true: tc.strict} {
			tc.Since = 1234567890123456
			if got := tc.Args(strict); got != [3]string{tc.Name, "1234567890123456", want} {
				t.Errorf("%+v, strict %v: %q, want %q", tc.Epoch, strict, got, want)
			}
		}
	}
}

// A process does not know the texts of another, nor those for any, and so answers NOSCRIPT, also after a
// restart with all its data.
func TestAnotherProcessDoesNotKnowTheText(t *testing.T) {
	t.Parallel()
	texts := map[string]bool{}
	for _, process := range []string{"", "a", "b"} {
		texts[lua.Acquire.In(process).SHA], texts[lua.Release.In(process).SHA] = true, true
	}
	if len(texts) != 6 || lua.Acquire.In("") != lua.Acquire || lua.Release.In("") != lua.Release {
		t.Errorf("%d texts", len(texts))
	}
	server := redistest.StartServer(t, "--appendonly", "yes", "--appendfsync", "always")
	first, other := &store{t: t, Client: server.Client(t), real: true}, onServer(t)
	first.boot("m1", "")
	m := lua.Epoch{Name: "m1", Run: first.process()}
	scripts := []lua.Script{lua.Acquire.In(m.Run), lua.Release.In(m.Run)}
	args := [][]any{in(m, false, "o", minute, 1), in(m, false, "o", "PUBLISH", turn, "")}
	other.set(lua.Marker, "m1", 0)
	knows := func(s *store, i int) bool {
		t.Helper()
		err := s.EvalSha(t.Context(), scripts[i].SHA, all, args[i]...).Err()
		if err != nil && !strings.HasPrefix(err.Error(), "NOSCRIPT ") {
			t.Error(err)
		}
		return err == nil
	}
	for i, script := range scripts {
		if err := first.ScriptLoad(t.Context(), script.Source).Err(); err != nil {
			t.Fatal(err)
		}
		if !knows(first, i) || knows(other, i) {
			t.Errorf("script %d: its process knows it: %v, another: %v", i, knows(first, i), knows(other, i))
		}
	}
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := server.Restart(); err != nil {
		t.Fatal(err)
	}
	server.WaitUp(t)
	again := &store{t: t, Client: server.Client(t), real: true}
	again.want(again.value(lua.Marker), "m1")
	for i := range scripts {
		if knows(again, i) {
			t.Errorf("script %d: known after a restart", i)
		}
	}
	if run := again.process(); lua.Acquire.In(run) == scripts[0] {
		t.Errorf("process %s as before", run)
	}
}

// A process has one text of acquire and one of release, whatever becomes of its data, and however many
// clients it has.
func TestAProcessHasOneTextInAllItsEpochs(t *testing.T) {
	t.Parallel()
	s := onServer(t)
	run := s.process()
	cached := func() int {
		t.Helper()
		_, rest, _ := strings.Cut(s.Info(t.Context(), "memory").Val(), "number_of_cached_scripts:")
		var n int
		if _, err := fmt.Sscan(rest, &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	var before int
	for i := range 30 {
		s.reset()
		name := fmt.Sprint("m", i)
		s.wantBoot(name, "", name, "new")
		s.wantBoot(name, name, name, "kept")
		for _, strict := range []bool{false, true} {
			m := lua.Epoch{Name: name, Run: run, Raw: true, Promoted: "-", Since: int64(i)}
			if i == 0 {
				for _, script := range []lua.Script{lua.Acquire.In(run), lua.Release.In(run)} {
					if err := s.ScriptLoad(t.Context(), script.Source).Err(); err != nil {
						t.Fatal(err)
					}
				}
			}
			for script, args := range map[string][]any{
				lua.Acquire.In(run).SHA: {"o", minute, 1}, lua.Release.In(run).SHA: {"o", "PUBLISH", turn, ""},
			} {
				if err := s.EvalSha(t.Context(), script, all, in(m, strict, args...)...).Err(); err != nil {
					t.Fatal(err)
				}
			}
		}
		if now := cached(); before == 0 {
			before = now
		} else if now != before {
			t.Fatalf("%d scripts after epoch %d, %d before", now, i, before)
		}
	}
}

// oneSection goes before a script, which finds an INFO of one section at a time, as before Redis 7.
const oneSection = `
local redis = (function(server)
  return {call = server.call, pcall = function(name, ...)
    if name == 'INFO' and select('#', ...) > 1 then return {err = 'ERR syntax error'} end
    return server.pcall(name, ...)
  end}
end)(redis)
`

// Each word of the check refuses what it is for: an acquire writes nothing then, and a release makes a turn.
func TestEachWordOfTheCheck(t *testing.T) {
	t.Parallel()
	s := onServer(t)
	s.listen()
	s.stood = true
	const began = stoodAt - 100
	start := func(pid string, at int64) string { return fmt.Sprintf("%s@%d", pid, at) }
	zeros := strings.Repeat("0", 40)
	type fields = map[string]string
	as := func(id, offset string) fields {
		return fields{"run_id": "process-r", "role": "master", "master_replid2": id, "second_repl_offset": offset}
	}
	noRunID := func(pid string, up any) fields {
		return fields{"run_id": "", "process_id": pid, "uptime_in_seconds": fmt.Sprint(up)}
	}
	replica := as("id", "7")
	replica["role"] = "slave"
	for _, tc := range []struct {
		what          string
		info          fields
		m             lua.Epoch
		usual, strict bool // it is refused
	}{
		{"never promoted", as(zeros, "-1"), lua.Epoch{Run: "process-r", Promoted: "-"}, false, false},
		{"promoted since", as("id", "7"), lua.Epoch{Run: "process-r", Promoted: "-"}, false, true},
		{"promoted, as is known", as("id", "7"), lua.Epoch{Run: "process-r", Promoted: "id:7"}, false, false},
		{"promoted again", as("id2", "7"), lua.Epoch{Run: "process-r", Promoted: "id:7"}, false, true},
		{"promoted again: a longer id", as("2id", "7"), lua.Epoch{Run: "process-r", Promoted: "id:7"}, false, true},
		{"promoted again: a longer offset", as("id", "71"), lua.Epoch{Run: "process-r", Promoted: "id:7"}, false,
			true},
		{"without replicas for long", as(zeros, "-1"), lua.Epoch{Run: "process-r", Promoted: "id:7"}, false, false},
		{"a replica", replica, lua.Epoch{Run: "process-r", Promoted: "id:7"}, false, true},
		{"it is not known when", as("id", "7"), lua.Epoch{Run: "process-r"}, false, false},
		{"another process", as("id", "7"), lua.Epoch{Run: "process-s", Promoted: "id:7"}, false, true},
		{"another process, always", as("id", "7"), lua.Epoch{Run: "process-s", AlwaysRun: true}, true, true},
		{"the process, always", as("id", "7"), lua.Epoch{Run: "process-r", AlwaysRun: true}, false, false},
		{"by its start", noRunID("7", 100), lua.Epoch{Run: start("7", began), AlwaysRun: true}, false, false},
		{"by its start: the clock was read twice", noRunID("7", 101), lua.Epoch{Run: start("7", began)}, false,
			false}, {"by its start: later", noRunID("7", 90), lua.Epoch{Run: start("7", began)}, false, true},
		{"by its start: earlier", noRunID("7", 110), lua.Epoch{Run: start("7", began)}, false, true},
		{"by its start: another id", noRunID("8", 100), lua.Epoch{Run: start("7", began), AlwaysRun: true}, true,
			true}, {"by its start: a longer id", noRunID("71", 100), lua.Epoch{Run: start("7", began)}, false, true},
		{"by its start, which is hidden", noRunID("7", ""), lua.Epoch{Run: start("7", began)}, false, true},
		{"not raw", as("id", "7"), lua.Epoch{Run: "process-r", Raw: true}, false, true}, // OBJECT is unknown
	} {
		tc.m.Name = "m1"
		for _, before7 := range []string{"", oneSection} {
			script := func(script lua.Script) lua.Script {
				return lua.Script{Source: before7 + saying(script, tc.info).Source}
			}
			for closer, refused := range map[bool]bool{false: tc.usual, true: tc.strict} {
				s.reset()
				s.set(lua.Marker, "m1", 0)
				_, err := s.run(script(lua.Acquire.In(tc.m.Run)), alone, in(tc.m, closer, "o", minute, 1)...)
				if there := s.value(key) == "o"; (err != nil) != refused || there == refused ||
					refused && !strings.HasPrefix(err.Error(), "EPOCH ") {
					t.Errorf("%s, strict %v: an acquire: %v, the key is there: %v", tc.what, closer, err, there)
				}
				if granted := s.releaseIn(script(lua.Release.In(tc.m.Run)), tc.m, closer); granted == refused {
					t.Errorf("%s, strict %v: a release grants: %v", tc.what, closer, granted)
				}
			}
		}
	}
}

// An acquire in an epoch grants in that epoch only, and writes nothing in another.
func TestAcquireInAnEpoch(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.boot("m1", "")
		run := s.process()
		for _, tc := range []struct {
			lua.Epoch
			strict, forgot bool
		}{
			{lua.Epoch{Name: "m1", Run: run}, false, false},
			{lua.Epoch{Name: "m1"}, false, false},
			{lua.Epoch{Name: "m0", Run: run}, false, true},
			{lua.Epoch{Name: "m0"}, false, true},
			{lua.Epoch{Name: "m0", Run: run}, true, true},
			{lua.Epoch{Run: run}, false, false}, // of any name
			{lua.Epoch{Run: run}, true, false},
			{lua.Epoch{Run: "another"}, true, true},
			{lua.Epoch{Run: "another", AlwaysRun: true}, false, false}, // nobody looks
			{lua.Epoch{Run: run, Raw: true}, true, false},
			{lua.Epoch{Name: "m1", Run: "another"}, false, false}, // nobody looks
			{lua.Epoch{Name: "m1", Run: run, AlwaysRun: true}, false, false},
			{lua.Epoch{Name: "m1", Run: run}, true, false},
			{lua.Epoch{Name: "m1", Run: run, Raw: true, Promoted: "-"}, true, !s.real},
			{lua.Epoch{Name: "m1", Run: "another", AlwaysRun: true}, false, true},
			{lua.Epoch{Name: "m1", Run: "another"}, true, true},
			{lua.Epoch{Name: "m1", Run: "another", Promoted: "-"}, true, true},
		} {
			s.Del(t.Context(), key)
			err := s.acquireIn(tc.Epoch, tc.strict)
			if forgot := err != nil; forgot != tc.forgot ||
				forgot && s.real && !strings.HasPrefix(err.Error(), "EPOCH ") {
				t.Errorf("%v, %+v", err, tc)
			}
			if there := s.value(key) == "o"; there == tc.forgot {
				t.Errorf("%+v: the key is there: %v", tc, there)
			}
		}
	})
}

// A node whose marker cannot be read grants nothing.
func TestAMarkerThatCannotBeReadGrantsNothing(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.boot("m1", "")
		s.Del(t.Context(), lua.Marker)
		s.RPush(t.Context(), lua.Marker, "m1")
		if err := s.acquireIn(lua.Epoch{Name: "m1"}, false); err == nil ||
			!strings.HasPrefix(err.Error(), "WRONGTYPE ") {
			t.Error(err)
		}
		s.want(s.value(key), "<none>")
		s.want(s.value(bucket), "<none>")
	})
}

// An epoch's tokens are above the microsecond in which it began, although old data has restored a
// lower counter; a higher one continues.
func TestTokensOfAMemoryAreAboveItsBeginning(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		since := s.must(lua.Boot, []string{lua.Marker, lua.Past}, "m1", 60*second, "", 0, "").([]any)[6].(int64)
		if words := strings.Fields(s.value(lua.Past)); words[2] != fmt.Sprint(since) {
			t.Errorf("began at %d, remembers %q", since, words)
		}
		for _, c := range []struct{ was, block, want int64 }{
			{1000, 5, since + 5},
			{since - 3, 5, since + 5},
			{since, 5, since + 5},
			{since + 1, 5, since + 6},
			{since + 9, 0, since + 9},
			{1000, 0, since},
		} {
			s.set(bucket, c.was, 0)
			s.Del(t.Context(), key)
			epoch := lua.Epoch{Name: "m1", Run: "process-r", Since: since}
			s.want(s.must(lua.Acquire.In("r"), alone, in(epoch, false, "o", minute, c.block)...), c.want)
			s.wantCounter(c.want)
		}
	})
}
