package lua_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/flightlock/flightlock/lua"
)

const second = 1_000_000 // in microseconds

// boot runs the script with a minute of quarantine, and gives name, state and age.
func (s *store) boot(name, establish string) (got, state string, age int64) {
	s.t.Helper()
	v := s.must(lua.Boot, []string{lua.Marker, lua.Past}, name, 60*second, establish).([]any)
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

// past changes one word of what the node remembers: name, state, since, run, promoted.
func (s *store) past(word int, value any) {
	words := strings.Fields(s.value(lua.Past))
	words[word] = fmt.Sprint(value)
	s.set(lua.Past, strings.Join(words, " "), 0)
}

// now is the node's clock in microseconds.
func (s *store) now() int64 { return s.Time(s.t.Context()).Val().UnixMicro() }

// A memory without marker is new, and keeps its name until it is lost; it is established
// by name, or when the quarantine is over.
func TestBootOfANewMemory(t *testing.T) {
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

// A marker of another process, or of a time before the server was made a master, is that of
// a memory that lost something. If it never had a vote, there is nothing to be missed.
func TestBootOfALostMemory(t *testing.T) {
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
		s.wantBoot("m4", "m3", "m3", "lost") // nobody but time can establish it
		s.past(2, s.now()-60*second)
		s.wantBoot("m4", "", "m3", "kept")

	})
}

// A server that is promoted has another memory, each time; that it lost its replicas since, and
// with them the id of before, does not matter.
func TestBootAfterAPromotion(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		if !s.real {
			t.Skip("miniredis has no replicas")
		}
		promote := func() {
			s.Do(t.Context(), "REPLICAOF", "127.0.0.1", "1")
			s.Do(t.Context(), "REPLICAOF", "NO", "ONE")
		}
		s.wantBoot("m1", "", "m1", "new")
		s.wantBoot("m1", "m1", "m1", "kept")
		s.past(4, "gone:7") // it was promoted before, and has no id of then any more
		s.wantBoot("m2", "", "m1", "kept")
		promote()
		s.wantBoot("m2", "", "m2", "lost")
		s.wantBoot("m3", "", "m2", "lost")
		promote()
		s.wantBoot("m3", "", "m3", "lost")
	})
}

// A clock that is set back begins the quarantine anew, and does not make it longer than that.
func TestBootWhenTheClockWasSetBack(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		s.wantBoot("m1", "", "m1", "new")
		s.past(2, s.now()+3600*second)
		before := s.now()
		s.wantBoot("m2", "", "m1", "new")
		var since int64
		if _, err := fmt.Sscan(strings.Fields(s.value(lua.Past))[2], &since); err != nil || since < before || since > s.now() {
			t.Errorf("since %d, %v", since, err)
		}
	})
}

// Who is not told the process sees no difference, and leaves none for who is.
func TestBootWithoutINFO(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		if !s.real {
			t.Skip("miniredis has no ACL for scripts")
		}
		informed := strings.Fields(func() string { s.boot("m1", ""); return s.value(lua.Past) }())
		s.wantBoot("m1", "m1", "m1", "kept")
		s.Do(t.Context(), "ACL", "SETUSER", "default", "-info")
		v := s.must(lua.Boot, []string{lua.Marker, lua.Past}, "m2", 60*second, "").([]any)
		if v[0] != "m1" || v[1] != "kept" || v[3] != "" || !strings.Contains(v[5].(string), "ermission") && !strings.Contains(v[5].(string), "can't run") {
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

// The acquire script of a memory grants in that memory only, and writes nothing in another.
func TestAcquireInAMemory(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		s.boot("m1", "")
		run := "none"
		if _, rest, found := strings.Cut(s.Info(t.Context(), "server").Val(), "run_id:"); found {
			run = strings.Fields(rest)[0]
		}
		for _, tc := range []struct {
			memory, run string
			informed    bool
			forgot      bool
		}{
			{"m1", "", true, false},
			{"m1", "", false, false},
			{"m0", "", true, true},
			{"m0", "", false, true},
			{"m1", run, true, !s.real},
			{"m1", "another", true, true},
		} {
			s.Del(t.Context(), key)
			in := lua.AcquireIn(tc.memory, tc.run, tc.informed, 0)
			call := func() error {
				_, err := s.run(in, []string{key, bucket}, "o", minute, 1)
				return err
			}
			if s.batched { // after another acquire, which looks at the memory for both
				in = lua.BatchIn(tc.memory, tc.run, tc.informed, 0)
				call = func() error {
					keys := []string{"lock:first", bucket, key, bucket}
					both := s.answers(in, keys, "a23a20", "o", minute, 1, "o")
					if first, second := fmt.Sprintf("%T", both[0]), fmt.Sprintf("%T", both[1]); first != second {
						t.Errorf("%v and %v", both[0], both[1])
					}
					err, _ := both[1].(error)
					return err
				}
			}
			err := call()
			if forgot := err != nil; forgot != tc.forgot || forgot && s.real && !strings.HasPrefix(err.Error(), "FORGOT ") {
				t.Errorf("%v, %s", err, in.Source[:120])
			}
			if there := s.value(key) == "o"; there == tc.forgot {
				t.Errorf("the key is there: %v", there)
			}
		}
		if lua.AcquireIn("m1", "", true, 0) == lua.AcquireIn("m1", "", false, 0) || lua.BatchIn("m1", "", true, 0) == lua.BatchIn("m1", "", false, 0) {
			t.Error("a client that is not told the process proves the memory for one that is")
		}
	})
}

// A memory's tokens are above the microsecond in which it began, although old data has brought
// back a lower counter; one that is higher goes on as it was.
func TestTokensOfAMemoryAreAboveItsBeginning(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		since := s.must(lua.Boot, []string{lua.Marker, lua.Past}, "m1", 60*second, "").([]any)[6].(int64)
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
			s.Del(t.Context(), key, "lock:first")
			if s.batched { // after another acquire, which must leave it the floor
				s.set("first", c.was, 0)
				answers := s.answers(lua.BatchIn("m1", "", true, since), []string{"lock:first", "first", key, bucket}, "a23a20", "o", minute, c.block, "o")
				s.want(answers, []any{c.want, c.want})
			} else {
				got, err := s.run(lua.AcquireIn("m1", "", true, since), []string{key, bucket}, "o", minute, c.block)
				if err != nil {
					t.Fatal(err)
				}
				s.want(got, c.want)
			}
			s.wantCounter(c.want)
		}
	})
}
