package main

import (
	"os"
	"strings"
	"testing"

	"github.com/flightlock/flightlock/examples/service/internal/demo"
	"github.com/flightlock/flightlock/internal/redistest"
)

// serviceEnv, set to anything, makes the test binary the service: the demo starts processes of it.
const serviceEnv = "FLIGHTLOCK_TEST_SERVICE"

func TestMain(m *testing.M) {
	if os.Getenv(serviceEnv) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// short is the demo with little load, in phases of so many seconds.
func short(t *testing.T, with, only string, seconds float64) *demo.Report {
	t.Helper()
	redistest.Require(t)
	report, err := demo.Run(t.Context(), demo.Config{
		With: with, Only: only, Procs: 3, Rate: 150, Keys: 500, Seconds: seconds, Spin: 1,
		Env: []string{serviceEnv + "=1"}, Logf: t.Logf,
	})
	if err != nil {
		t.Fatal(err)
	}
	return report
}

// A service under load, on real servers, in all that happens to services: one load per miss and each under a
// lock while Redis is well, no error unless something fails that is needed, no update lost, each tick started
// once, one leader. Times are not looked at.
func TestServiceInShort(t *testing.T) {
	t.Parallel()
	seconds := 1.0
	if redistest.Long() {
		seconds = 3
	}
	report := short(t, "flightlock", "", seconds)
	for _, fault := range report.Faults("flightlock") {
		t.Error(fault)
	}
	if slow := report.Slow("flightlock"); len(slow) > 0 {
		t.Logf("the machine was so busy that servers were slower than NodeTimeout; loads and errors say nothing "+
			"in %v", slow)
	}
	for _, row := range report.Rows {
		if row.Calls == 0 || row.Loads.Loads == 0 || row.Leaders != 1 {
			t.Errorf("%s: %d calls, %d loads, %d leaders: it says nothing", row.Phase, row.Calls, row.Loads.Loads,
				row.Leaders)
		}
		switch row.Phase {
		case "origin failing":
			if len(row.Errors) == 0 || row.Loads.Failed == 0 {
				t.Errorf("%s: %d loads failed, errors %v", row.Phase, row.Loads.Failed, row.Errors)
			}
		case "one process broken":
			if len(row.OfBroken) == 0 || row.Loads.Refused == 0 {
				t.Errorf("%s: %d loads refused, errors %v", row.Phase, row.Loads.Refused, row.OfBroken)
			}
		case "all nodes stopped":
			for kind := range row.Errors { // a transfer must not go on without its locks; all else must
				if !strings.HasPrefix(kind, "transfer 50") {
					t.Errorf("%s: errors %v", row.Phase, row.Errors)
				}
			}
		}
	}
}

// What TestServiceInShort looks at can fail: processes that protect their loads each for itself load a miss
// twice, and all of them lead.
func TestShortNoticesWhatGoesWrong(t *testing.T) {
	t.Parallel()
	report := short(t, "singleflight", "cold,steady", 1)
	for i := range report.Rows { // a phase in which the servers are slow is not looked at
		report.Rows[i].RoundTrip99, report.Rows[i].NodesMax = 0, 0
	}
	faults := strings.Join(report.Faults("singleflight"), "\n")
	for _, want := range []string{"loads of", "loads without a lock", "leaders at once"} {
		if !strings.Contains(faults, want) {
			t.Errorf("not noticed: %q; only\n%s", want, faults)
		}
	}
}
