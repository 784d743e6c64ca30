package lua_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/lua"
)

// The announcements of clients are one line for each set, the latest first, at most 16, and none is
// kept longer than it is valid.
func TestSets(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		leave := func(name, text string, good int) []string {
			all := s.must(lua.Sets, []string{"flightlock:{sets}"}, name, text, good).(string)
			var sets []string
			for line := range strings.Lines(all) {
				_, set, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
				sets = append(sets, set)
			}
			if got := s.Get(t.Context(), "flightlock:{sets}").Val(); got != all {
				t.Errorf("the key has %q, the reply is %q", got, all)
			}
			return sets
		}
		leave("a", `{"by":"one %d"}`, minute)
		got := leave("b", "two", minute)
		if want := []string{"b two", `a {"by":"one %d"}`}; !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
		if got = leave("a", "one again", minute); !slices.Equal(got, []string{"a one again", "b two"}) {
			t.Errorf("got %q", got)
		}
		leave("short", "x", 1)
		time.Sleep(10 * time.Millisecond) // longer than it is valid
		if got = leave("a", "one", minute); slices.Contains(got, "short x") {
			t.Errorf("stays after its time: %q", got)
		}
		for i := range 40 {
			got = leave(fmt.Sprint("n", i), "x", minute)
		}
		if len(got) != 16 || got[0] != "n39 x" || got[15] != "n24 x" {
			t.Errorf("%d sets: %q", len(got), got)
		}
		if ttl := s.PTTL(t.Context(), "flightlock:{sets}").Val(); ttl <= 0 || ttl > time.Minute {
			t.Errorf("ttl %v", ttl)
		}
	})
}
