//go:build linux

package main

import (
	"context"
	"io"
	"log"
	"math"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	redis.SetLogger(quiet{log.New(io.Discard, "", 0)})
	if os.Getenv(childEnv) != "" {
		os.Exit(childMain(os.Stdin, os.Stdout))
	}
	redistest.SayWhatIsLeftOut(
		"most scenarios",
		"FLIGHTLOCK_LONG=1, or make test-long")
	// A pool of go-redis that could not dial retries every second, and checks only then whether it was
	// closed.
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial"))
}

// quick is for runs of about a second.
var quick = setup{TTL: 300 * time.Millisecond, Linger: 150 * time.Millisecond}

// On nodes that look like another product, nothing is broken either while a holder stops. make faults
// KIND=... runs all that can be run on that kind.
func TestKinds(t *testing.T) {
	redistest.Require(t)
	for _, kind := range []string{"dragonfly", "one-endpoint", "serverless"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			some, err := chosen("SIGSTOP of a holder", kind)
			if err != nil || len(some) != 1 {
				t.Fatalf("%v, %v", some, err)
			}
			set := quick
			// Each command passes two proxies: on a busy machine not within 100 ms, nor a lock's use within 300.
			set.Kind, set.TTL, set.Answer = kind, 3*time.Second, time.Second
			v, err := runScenario(t.Context(), some[0], set, 0)
			if err != nil {
				t.Fatal(err)
			}
			if broken := v.violations(); len(broken) > 0 {
				t.Errorf("%q", broken)
			}
		})
	}
	if _, err := chosen("", "no such"); err == nil {
		t.Error("a kind that does not exist")
	}
	set := quick
	set.Kind = "no-info"
	if _, err := runScenario(t.Context(), scenarios[0], set, 0); err == nil ||
		!strings.Contains(err.Error(), "+info") {
		t.Errorf("a kind on which no lock can be had: %v", err)
	}
}

// Under no fault do two valid holders meet, or tokens fall, or updates get lost; and when it is
// over, all keys are served again. These are short runs of the scenarios of `make faults`;
// FLIGHTLOCK_LONG=1 runs all of them.
func TestScenarios(t *testing.T) {
	redistest.Require(t)
	var reused atomic.Int64
	t.Cleanup(func() { // when all have ended
		if reused.Load() == 0 && !t.Failed() {
			t.Error("no lock was had by a lease that was retained")
		}
	})
	for _, s := range scenarios {
		if !s.sample && !redistest.Long() {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			t.Parallel() // it waits, most of the time
			v, err := runScenario(t.Context(), s, quick, 0)
			if err != nil {
				t.Fatal(err)
			}
			for _, what := range v.violations() {
				t.Error(what)
			}
			t.Logf("locks granted: %v, of them %d by a lease that was retained, failed: %v, lost: %v, refused: %d",
				v.granted, v.reused, counted(v.failed), counted(v.lost), v.refused)
			if v.accesses == 0 {
				t.Error("the register was not used")
			}
			reused.Add(int64(v.reused))
		})
	}
}

// A short paused-holder test: the plain list loses what was written meanwhile, or what the stopped
// holder wrote too late; the fenced one loses nothing. On a machine that is slow to stop it, the
// holder may have written by then: that is another try.
func TestPausedHolder(t *testing.T) {
	redistest.Require(t)
	for range 5 {
		r, err := runPaused(t.Context(), quick, 4*quick.TTL, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%+v", r)
		if r.fencedLost != 0 || r.fencedAcked == 0 {
			t.Errorf("fenced: %d of %d lost", r.fencedLost, r.fencedAcked)
		}
		if r.plainLost > 0 {
			return
		}
	}
	t.Error("nothing was lost without the token")
}

// The harness detects what goes beyond the promise: when a majority loses its locks and is not
// quarantined, two holders meet, and both checks report it. On a busy machine a lock may be released before
// the next one is had: that is another try.
func TestTheHarnessSeesTwoHolders(t *testing.T) {
	redistest.Require(t)
	forgetful := quick
	forgetful.Forget = true
	s := scenario{name: "FLUSHALL everywhere", fault: func(ctx context.Context, c *cell) error {
		for end := time.Now().Add(c.ttl); time.Now().Before(end); pause(ctx, c.ttl/4) {
			for _, n := range c.nodes {
				if err := n.FlushAll(ctx).Err(); err != nil {
					return err
				}
			}
		}
		return nil
	}}
	for range 5 {
		v, err := runScenario(t.Context(), s, forgetful, 0)
		if err != nil {
			t.Fatal(err)
		}
		if len(v.overlaps) > 0 && len(v.illegal) > 0 {
			return
		}
		t.Logf("seen: %q", v.violations())
	}
	t.Error("no two holders were seen by both checks")
}

// A holder whose machine slept believes in locks that others hold by then, if no clock shows the
// sleep: the harness detects what the sleep scenario is for. It takes two seconds:
// FLIGHTLOCK_LONG=1 runs it.
func TestTheHarnessSeesAnUntoldSleep(t *testing.T) {
	redistest.Require(t)
	redistest.OnlyLong(t)
	v, err := runScenario(t.Context(), scenario{name: "untold sleep", fault: asleep(true), sleeps: true},
		quick, 0)
	if err != nil {
		t.Fatal(err)
	}
	if len(v.overlaps) == 0 {
		t.Errorf("seen: %q", v.violations())
	}
}

// realHistory is one of real servers and processes, without a fault.
func realHistory(t *testing.T) *history {
	t.Helper()
	redistest.Require(t)
	c, err := newCell(t.Context(), quick, 3, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	err = c.await(t.Context(), "the hot key has been locked and written often", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.history.hotHolds()) >= 20 && len(c.history.hotWrites()) >= 20
	})
	if err != nil {
		t.Fatal(err)
	}
	h, err := c.finish()
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *history) clone() *history {
	return &history{holds: slices.Clone(h.holds), accesses: slices.Clone(h.accesses)}
}

// hotHolds are the places of those holds of the hot key that were released in order.
func (h *history) hotHolds() (places []int) {
	for i, x := range h.holds {
		if x.Key == hotKey && x.granted() && x.Released {
			places = append(places, i)
		}
	}
	return places
}

// hotWrites are the places of the writes of the hot key that were not refused.
func (h *history) hotWrites() (places []int) {
	for i, x := range h.accesses {
		if x.Key == hotKey && x.Set && !x.Stale {
			places = append(places, i)
		}
	}
	return places
}

// A history that was tampered with is refused, each kind of error by the check for it; the genuine
// one is not.
func TestDoctoredHistoriesAreRefused(t *testing.T) {
	honest := realHistory(t)
	slices.SortFunc(honest.holds, func(a, b hold) int { return int(a.start() - b.start()) })
	slices.SortFunc(honest.accesses, func(a, b access) int { return int(a.Call - b.Call) })
	// two hot holds in a row, and two writes in a row
	holds, writes := honest.hotHolds(), honest.hotWrites()
	a, b := holds[len(holds)/2], holds[len(holds)/2+1]
	w := writes[len(writes)/2]
	for name, tc := range map[string]struct {
		doctor func(h *history)
		want   string // in what is found
	}{
		"honest": {func(*history) {}, ""},
		"the first holder still believed in the lock when the second had it": {func(h *history) {
			first, second := &h.holds[a], &h.holds[b]
			first.Valid, first.Until = second.end(), second.end()+1
			first.Done = first.Until
		}, "both held it"},
		"two holders, told by the model alone": {func(h *history) {
			first, second := &h.holds[a], &h.holds[b]
			first.Valid, first.Until = second.end(), second.end()+1
			first.Done = first.Until
		}, "the lock of"},
		"a token again": {func(h *history) {
			h.holds[b].Fence = h.holds[a].Fence
		}, "got token"},
		"a token again, told by the model alone": {func(h *history) {
			h.holds[b].Fence = h.holds[a].Fence
		}, "the lock of"},
		"an acknowledged write is lost": {func(h *history) {
			h.accesses = slices.Delete(h.accesses, w, w+1)
		}, "the register of"},
		"a stale write is acknowledged": {func(h *history) {
			late := h.accesses[w]
			late.Fence--
			late.Call, late.Return = late.Return+1, late.Return+2
			h.accesses = append(h.accesses, late)
		}, "the register of"},
		"a good write is refused": {func(h *history) { h.accesses[w].Stale = true }, "the register of"},
	} {
		t.Run(name, func(t *testing.T) {
			h := honest.clone()
			tc.doctor(h)
			overlaps, falls := h.meetings()
			found := slices.Concat(overlaps, falls, h.notLinearizable())
			seen := slices.ContainsFunc(found, func(s string) bool { return strings.Contains(s, tc.want) })
			if tc.want == "" && len(found) > 0 || tc.want != "" && !seen {
				t.Errorf("found %q", found)
			}
		})
	}
}

// Releases and writes whose outcome is not known may or may not have happened, and may be late.
func TestUnknownOutcomesAccuseNobody(t *testing.T) {
	h := &history{
		holds: []hold{
			{Key: "k", Asked: 1, Given: 2, Until: 100, Valid: 10, Fence: 1, Done: 12}, // not confirmed
			{Key: "k", Asked: 3, Given: 20, Until: 100, Valid: 30, Fence: 2, Done: 31, Released: true},
			{Key: "k", Asked: 4, Given: 40, Until: 50, Fence: 3, Lost: "paused", Expired: true, Done: 90},
			{Key: "k", Asked: 45, Given: 60, Until: 160, Valid: 70, Fence: 4, Done: 71, Released: true},
			{Key: "k", Asked: 5, Given: 95, Err: "ErrUnavailable"},
		},
		accesses: []access{
			{Key: "k", Fence: 1, Call: 3, Return: 4},
			{Key: "k", Fence: 1, Set: true, Value: 1, Unknown: true, Call: 5, Return: 6},
			{Key: "k", Fence: 2, Value: 0, Call: 21, Return: 22},
			{Key: "k", Fence: 2, Set: true, Value: 1, Call: 23, Return: 24},
			{Key: "k", Fence: 3, Value: 1, Call: 41, Return: 42},
			{Key: "k", Fence: 4, Value: 1, Call: 61, Return: 62},
			{Key: "k", Fence: 3, Set: true, Value: 2, Stale: true, Call: 80, Return: 81},
		},
	}
	overlaps, falls := h.meetings()
	if found := slices.Concat(overlaps, falls, h.notLinearizable()); len(found) > 0 {
		t.Errorf("found %q", found)
	}
	h.holds[3].Given = 49 // one ms before the stopped holder's deadline
	h.holds[3].Asked = math.MinInt64
	if overlaps, _ := h.meetings(); len(overlaps) != 1 {
		t.Errorf("a paused holder's promise is not seen: %q", overlaps)
	}
}

// A cell of the table adds up what happened, without the details of each.
func TestCellOfTheTable(t *testing.T) {
	for want, m := range map[string]map[string]int{
		"0": {},
		"3 ErrUnavailable, 1 ErrNotAcquired (3 OOM, 1 no answer)": {
			"ErrUnavailable, deadline (OOM)": 2, "ErrUnavailable, deadline (OOM, no answer)": 1,
			"ErrNotAcquired, deadline": 1,
		},
		"2 ErrLockLost": {"ErrLockLost": 1, "ErrLockLost, ErrNotHeld": 1},
	} {
		if got := cellOf(m); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
