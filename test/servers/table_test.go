package servers

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

// A row says what a kind of server does, for each of the tries. A cell that is not there is "works". The name
// of a try with "/3" behind it is for three nodes, where that differs from one. Of a mode and of an error a
// part suffices.
type row struct {
	kind  string
	cells map[string]string
}

// table has a row for each kind of server.
var table = []row{
	{"redis", nil},
	{"redis-6.0", nil},
	{"cluster", slots(map[string]string{"mode": "turns, no quarantine"})},
	{"serverless", slots(map[string]string{"mode": "turns, no quarantine"})},
	{"declared-keys", nil},
	{"dragonfly", nil},
	{"kvrocks", nil},
	{"no-script", map[string]string{"mode": "EVAL, grants, no quarantine",
		"mode/3": "EVAL, grants, quarantine"}}, {"eval-only", map[string]string{
		"mode": "EVAL, grants, no quarantine", "mode/3": "EVAL, grants, quarantine",
	}},
	{"resp2", map[string]string{
		"one key": "works without grants", "check": "warns: pubsub rights", "mode": "EVALSHA, polls, no quarantine",
		"mode/3": "EVALSHA, polls, quarantine",
	}},
	{"restricted", nil},
	{"no-info", three(map[string]string{"check": "warns: quarantine"},
		refusedFor("INFO is refused: give the user +info", map[string]string{
			"cache": "works without locks", "check": "fails: quarantine, fails: locks",
		}))},
	{"one-endpoint", slots(map[string]string{
		"check/3": "warns: quarantine", "mode": severalServers,
	})},
	{"one-endpoint-loads-on-one", slots(map[string]string{
		"check/3": "warns: quarantine", "mode": severalServers,
	})},
	{"proxy-of-a-cluster", slots(map[string]string{
		"check/3": "warns: quarantine", "mode": severalServers,
	})},
	{"envoy", slots(map[string]string{
		"check": "warns: quarantine, warns: pubsub rights", "mode": severalServers,
	})},
	{"literal-keys", refusedFor("ERR bad lua script for redis cluster", map[string]string{
		"cache": "works without locks", "check": "fails: script rights, fails: kind, fails: locks", "mode": "EVAL",
	})},
	{"keydb-active", refusedFor("READONLY the role of the node is active-replica", map[string]string{
		"cache": "works without locks", "check": "fails: role, fails: quarantine, fails: kind, fails: locks",
	})},
	{"garnet-without-lua", refusedFor("Lua scripting is disabled", map[string]string{
		"cache": "works without stored values, locks, Invalidate",
		"check": "fails: quarantine, fails: script rights, fails: kind, fails: locks",
	})},
	{"twemproxy", refusedFor("EOF", map[string]string{
		"cache": "works without stored values, locks, Invalidate", "check": "fails: reachable, fails: locks",
	})},
}

// severalServers is the mode of what Clusters are behind.
const severalServers = "no quarantine: several servers behind one address, use ClusterClient"

// slots are the cells of a Cluster, in whatever form.
func slots(others map[string]string) map[string]string {
	cells := map[string]string{"one key": "works without grants", "loss/3": "works without quarantine"}
	maps.Copy(cells, others)
	return cells
}

// refusedFor are the cells of a kind on which no lock can be had, for that reason.
func refusedFor(why string, others map[string]string) map[string]string {
	cells := map[string]string{}
	for _, try := range []string{"ready", "uncontended", "200 keys", "one key", "refresh", "loss/3"} {
		cells[try] = refused + why
	}
	cells["mode"] = refused
	maps.Copy(cells, others)
	return cells
}

// three are the cells of a kind that does something else with three nodes.
func three(one, three map[string]string) map[string]string {
	cells := maps.Clone(one)
	for try, cell := range three {
		cells[strings.TrimSuffix(try, "/3")+"/3"] = cell
	}
	return cells
}

// expected is what the table says of a try.
func (s *subject) expected(try string) string {
	for _, r := range table {
		if r.kind != s.kind {
			continue
		}
		if want := r.cells[fmt.Sprintf("%s/%d", try, len(s.urls))]; want != "" {
			return want
		}
		if want := r.cells[try]; want != "" {
			return want
		}
	}
	return works
}

// Each kind of server does what the table says, with one node and with three.
func TestEachKindDoesWhatTheTableSays(t *testing.T) {
	t.Parallel()
	for _, r := range table {
		for _, n := range []int{1, 3} {
			t.Run(fmt.Sprintf("%s/%d", r.kind, n), func(t *testing.T) {
				t.Parallel()
				s := start(t, r.kind, n)
				for _, try := range tries {
					if try.name == "loss" && n == 1 { // no other node could vote instead
						continue
					}
					want := s.expected(try.name)
					ctx, cancel := context.WithTimeout(t.Context(), timeFor(try.name, want))
					got := try.try(t, ctx, s)
					cancel()
					if why, isRefused := strings.CutPrefix(want, refused); isRefused && strings.HasPrefix(got, refused) &&
						strings.Contains(got, why) {
						continue
					}
					if got != want && (try.name != "mode" || !strings.Contains(got, want)) {
						t.Errorf("%s: %s\nwant %s", try.name, got, want)
					}
				}
			})
		}
	}
}

// timeFor is how long a try may take. Ready, and the Invalidate of a cache, try for as long as they may where
// they do not succeed.
func timeFor(try, want string) time.Duration {
	if want != works && (try == "ready" || try == "cache") {
		return 2 * time.Second
	}
	return time.Minute
}

// The table has all kinds that there are.
func TestTheTableHasAllKinds(t *testing.T) {
	for _, kind := range redistest.Kinds {
		if !slices.ContainsFunc(table, func(r row) bool { return r.kind == kind.Name }) {
			t.Errorf("no row for %s", kind.Name)
		}
	}
}
