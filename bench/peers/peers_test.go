package main

import (
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9/logging"
	"go.uber.org/goleak"
)

// TestMain lets the test binary be a worker, as the program itself is.
func TestMain(m *testing.M) {
	logging.Disable()
	if os.Getenv(workerEnv) != "" {
		os.Exit(workerMain(os.Stdin, os.Stdout))
	}
	goleak.VerifyTestMain(m)
}

// One quick round of single loads leaves raw figures of every rival, a table, and plots; a second
// run can add to it.
func TestALoadIsMeasuredAndReported(t *testing.T) {
	redistest.Require(t)
	dir := t.TempDir()
	readme := filepath.Join(dir, "README.md")
	if err := os.WriteFile(readme, []byte("before\n"+readmeBegin+"\nold\n"+readmeEnd+"\nafter\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for i, only := range []string{
		"hot key by goroutines, 10 goroutines, 1 node",
		"open, one key, 2000 arrivals/s, 20µs of work, 1 node",
	} {
		args := []string{"-quick", "-out", dir, "-readme", readme, "-only", only}
		if i > 0 {
			args = append(args, "-append")
		}
		if err := peersMain(ctx, args, io.Discard); err != nil {
			t.Fatal(err)
		}
	}

	_, records, err := readRaw(filepath.Join(dir, "raw.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	if want := 2 * len(withByHand); len(records) != want {
		t.Errorf("%d records, want %d", len(records), want)
	}
	for _, r := range records {
		if r.Figures["locks"] == 0 || r.Figures["violations"] != 0 || len(r.Waits) != len(quantiles) {
			t.Errorf("%s, %s: %+v", r.Bout, r.Rival, r)
		}
	}
	text := read(t, filepath.Join(dir, "RESULTS.md"))
	for _, name := range withByHand {
		if !strings.Contains(text, "| "+name+" | ") {
			t.Errorf("RESULTS.md has no row of %s", name)
		}
	}
	if !strings.Contains(text, "handover, 1 node | 0.8x rueidislock's median |  | not measured |") {
		t.Errorf("RESULTS.md does not say which goals were measured:\n%s", text)
	}
	got := read(t, readme)
	if !strings.HasPrefix(got, "before\n") || !strings.HasSuffix(got, "\nafter\n") ||
		strings.Contains(got, "\nold\n") {
		t.Errorf("the README is now %q", got)
	}
	svg := read(t, filepath.Join(dir, "goroutines.svg"))
	if err := xml.Unmarshal([]byte(svg), new(struct{ XMLName xml.Name })); err != nil {
		t.Errorf("goroutines.svg: %v", err)
	}
}

// Short slices beside a busy process fill every column of the table, and every lock is a command to lock and
// one to release.
func TestUncontendedSlicesAreTabled(t *testing.T) {
	redistest.Require(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, more := range [][]string{{"-slice", "20ms"}, {"-slice", "5ms", "-every", "1ms"}} {
		var out strings.Builder
		args := append([]string{"-uncontended", "-nodes", "1", "-slices", "3", "-busy", "1", "-node-timeout", "1s"},
			more...)
		if err := peersMain(ctx, args, &out); err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if len(lines) != 9 {
			t.Fatalf("want two lines, an empty one, and a table of six:\n%s", out.String())
		}
		head := strings.Split(lines[3], "|")
		for i, line := range lines[5:] {
			cells := strings.Split(line, "|")
			if len(cells) != len(head) || strings.TrimSpace(cells[1]) != alternating[i] {
				t.Fatalf("%q does not fit %q", line, lines[3])
			}
			for j, cell := range cells[2 : len(cells)-2] {
				if c := strings.TrimSpace(cell); c == "" || strings.HasPrefix(c, "0.00") || strings.Contains(c, "-") {
					t.Errorf("%s: %s is %q", alternating[i], head[2+j], cell)
				}
			}
			sent, err := strconv.ParseFloat(strings.TrimSpace(cells[6]), 64)
			if err != nil || sent < 2 || sent >= 4 {
				t.Errorf("%s sent %s commands for a lock and its release", alternating[i], cells[6])
			}
		}
	}
}

// Flags that make no sense are refused.
func TestUncontendedRefusesFlags(t *testing.T) {
	for _, args := range [][]string{{"-nodes", "1,x"}, {"-nodes", "0"}, {"-slices", "-1"}, {"-slice", "-1s"},
		{"-busy", "-1"}, {"-node-timeout", "0s"}} {
		if _, err := parseFlags(append(args, "-uncontended")); err == nil {
			t.Errorf("%q was accepted", args)
		}
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// Loads have names of their own, for the raw figures go by them, and every one of the goals' and
// plots' exists.
func TestLoadsAreNamed(t *testing.T) {
	names := map[string]bool{}
	for _, b := range allBouts(fullPace) {
		if names[b.id()] {
			t.Errorf("two loads are called %q", b.id())
		}
		names[b.id()] = true
		for _, r := range b.Rivals {
			if _, err := rivalNamed(r); err != nil {
				t.Error(err)
			}
		}
	}
	for _, b := range allBouts(quickPace) {
		if !names[b.id()] {
			t.Errorf("%q is another load when it is quick", b.id())
		}
	}
	for _, g := range goals {
		if !names[g.load] {
			t.Errorf("a goal is about %q", g.load)
		}
	}
	for _, h := range headline {
		if !names[h.bout] {
			t.Errorf("the README's table is about %q", h.bout)
		}
	}
	if !names[openHot] {
		t.Errorf("the latency plot is about %q", openHot)
	}
	if _, err := chosen(allBouts(fullPace), "uncontended;no such load"); err == nil {
		t.Error("a load that does not exist was chosen")
	}
}

// A goal is reached or not by what was measured, in both directions of better.
func TestGoalsGoByTheMedians(t *testing.T) {
	s := summarize([]record{
		{Bout: "a", Rival: nameOurs, Figures: map[string]float64{"locks_s": 299, "p50_us": 10}},
		{Bout: "a", Rival: nameOurs, Figures: map[string]float64{"locks_s": 301, "p50_us": 9}},
		{Bout: "a", Rival: nameOurs, Figures: map[string]float64{"locks_s": 300, "p50_us": 11}},
		{Bout: "a", Rival: nameRedsync, Figures: map[string]float64{"locks_s": 90, "p50_us": 11}},
		{Bout: "a", Rival: nameRueidis, Figures: map[string]float64{"locks_s": 100, "p50_us": 12}},
	})
	for _, tt := range []struct {
		got            func(summary) (string, bool, bool)
		want           string
		reached, known bool
	}{
		{times("a", 3, nameRedsync, nameRueidis), "3.00x: 300 against 100 of rueidislock", true, true},
		{times("a", 3.1, nameRedsync, nameRueidis), "3.00x: 300 against 100 of rueidislock", false, true},
		{part("p50_us", "a", 0.9, nameRedsync, nameRueidis),
			"0.91x: 10 µs against 11 µs of redsync", false, true},
		{part("p50_us", "a", 0.95, nameRedsync, nameRueidis),
			"0.91x: 10 µs against 11 µs of redsync", true, true},
		{below("locks_s", "a", 300), "300", false, true},
		{atLeast("locks_s", "a", 300), "300.000", true, true},
		{times("b", 3, nameRedsync), "", false, false},
	} {
		text, reached, known := tt.got(s)
		if known != tt.known || known && (text != tt.want || reached != tt.reached) {
			t.Errorf("got %q, %t, %t, want %q, %t, %t", text, reached, known, tt.want, tt.reached, tt.known)
		}
	}
}

// What processes did adds up; waits become one histogram.
func TestResultsAddUp(t *testing.T) {
	var all []*result
	for _, waits := range [][]time.Duration{{time.Millisecond, 2 * time.Millisecond}, {time.Second}} {
		h := newHistogram()
		for _, d := range waits {
			recordWait(h, d)
		}
		data, err := encodeWaits(h)
		if err != nil {
			t.Fatal(err)
		}
		n := float64(len(waits))
		all = append(all, &result{Locks: uint64(n), Elapsed: time.Second, Waits: data, Sharers: 1, Sum: n,
			Squares: n * n})
	}
	sum, waits, err := mergeResults(all)
	if err != nil {
		t.Fatal(err)
	}
	if sum.Locks != 3 || waits.TotalCount() != 3 || math.Abs(float64(waits.Max())-1e9) > 1e6 {
		t.Errorf("%+v, longest %d of %d", sum, waits.Max(), waits.TotalCount())
	}
	if got := jain(sum.Sharers, sum.Sum, sum.Squares); math.Abs(got-0.9) > 1e-9 {
		t.Errorf("Jain's index of 2 and 1 is %v", got)
	}
}

// A client that falls behind does not make the load lighter: arrivals are due when they are due.
func TestArrivalsDoNotWait(t *testing.T) {
	due := task{Prefix: "p", Load: load{Kind: open, Keys: 1, Rate: 1000, Window: 50 * time.Millisecond}}
	res, err := runOpen(stuckLock{}, due, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	_, waits, err := mergeResults([]*result{res})
	if err != nil {
		t.Fatal(err)
	}
	if res.Locks != 0 || waits.TotalCount() == 0 || waits.Min() < int64(drainTime)*9/10 {
		t.Errorf("%d locks, %d waits, the shortest %v", res.Locks, waits.TotalCount(), time.Duration(waits.Min()))
	}
}

// stuckLock is never had.
type stuckLock struct{}

func (stuckLock) lock(ctx context.Context, _ string) (held, error) {
	<-ctx.Done()
	return nil, errors.New("stuck")
}

func (stuckLock) close() {}

// fakeCache is a cache in memory that invalidates, or does not.
type fakeCache struct {
	l        *loader
	forgets  bool
	mu       sync.Mutex // guards values
	values   map[string]string
	absences atomic.Int64
}

func (f *fakeCache) get(_ context.Context, key string) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if v, ok := f.values[key]; ok {
		return v, nil
	}
	v, err := f.l.value(key)
	f.values[key] = v
	return v, err
}

func (f *fakeCache) getMany(_ context.Context, keys []string) (int, error) {
	_, err := f.l.many(keys)
	return len(keys) - int(f.absences.Load()), err
}

func (f *fakeCache) invalidate(_ context.Context, key string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.forgets {
		delete(f.values, key)
	}
	return nil
}

func (f *fakeCache) close() {}

// Stale values are counted where there are some, and only there; loads are counted, and values that did not
// come.
func TestLoadsOfCachesCount(t *testing.T) {
	s := redistest.StartServer(t)
	j := &cacheJob{rdb: goredis(s.Addr(), nil)}
	defer j.rdb.Close()
	j.v = versionsOf{j.rdb, "versions:"}
	j.l = &loader{value: j.v.current, takes: func() time.Duration { return 0 }}
	for _, forgets := range []bool{true, false} {
		fake := &fakeCache{l: j.l, forgets: forgets, values: map[string]string{}}
		j.c = fake
		due := task{Load: load{Kind: invalidation, Goroutines: 4, Keys: 2, Window: 300 * time.Millisecond}}
		res, err := j.runInvalidation(due, fmt.Sprint("forgets ", forgets), time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if res.Failures != 0 || res.Extra["reads"] == 0 || res.Extra["changes"] == 0 ||
			(res.Extra["stale"] == 0) != forgets {
			t.Errorf("forgets: %t: %+v", forgets, res)
		}
		due.Load.Kind, due.Load.Keys = coldKeys, chosenPerCall
		fake.absences.Store(int64(map[bool]int{true: 0, false: 1}[forgets]))
		res, err = j.runCold(due, "cold", time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if res.Extra["loads_key"] != 4 || res.Extra["bulk_proc"] != 1 || (res.Failures == 0) != forgets {
			t.Errorf("%+v", res)
		}
	}
}

// Bytes are those of a cache, and none of what is measured: a cache in memory has none.
func TestBytesOfCaches(t *testing.T) {
	redistest.Require(t)
	s, err := openSite(1)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	b := bout{Nodes: 1, Procs: 1, Fresh: time.Minute,
		Load: load{Kind: invalidation, Goroutines: 4, Keys: 2, Window: 300 * time.Millisecond}}
	for rival, some := range map[string]bool{nameOurs: true, nameSturdyc: false} {
		rec, err := s.measure(t.Context(), b, rival)
		if err != nil {
			t.Fatal(err)
		}
		// Of the versions alone, each Get would have more.
		if sent := rec.Figures["sent"]; (sent > 20) != some || rec.Figures["received"] == 0 {
			t.Errorf("%s: %+v", rival, rec.Figures)
		}
	}
}

// Each cache serves a value, several at once, and another one after an invalidation in the same process.
func TestCachesServe(t *testing.T) {
	s := redistest.StartServer(t)
	for _, r := range rivals {
		if r.cache == nil {
			continue
		}
		t.Run(r.name, func(t *testing.T) {
			value := atomic.Int64{}
			l := &loader{
				value: func(string) (string, error) { return fmt.Sprint(value.Load()), nil },
				takes: func() time.Duration { return 0 },
			}
			c, err := r.cache(settings{Addrs: []string{s.Addr()}, TTL: ttl, Delay: time.Millisecond,
				Fresh: time.Minute}, l)
			if err != nil {
				t.Fatal(err)
			}
			defer c.close()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			key := r.name + ":a"
			if v, err := c.get(ctx, key); err != nil || v != "0" {
				t.Errorf("%q, %v", v, err)
			}
			if n, err := c.getMany(ctx, []string{r.name + ":b", r.name + ":c"}); err != nil || n != 2 ||
				l.keys.Load() != 3 {
				t.Errorf("%d values, %v, %d loads", n, err, l.keys.Load())
			}
			value.Store(1)
			if err := c.invalidate(ctx, key); err != nil {
				t.Fatal(err)
			}
			for ctx.Err() == nil { // some serve the old one for a while
				if v, err := c.get(ctx, key); err != nil || v == "1" {
					return
				}
				time.Sleep(time.Millisecond)
			}
			t.Error("the old value is served on and on")
		})
	}
}

// Both semaphores of -permits are used, and package semaphore admits no more than it has permits.
func TestPermitsAreCounted(t *testing.T) {
	redistest.Require(t)
	var addrs []string
	for range 3 {
		addrs = append(addrs, redistest.StartServer(t).Addr())
	}
	for _, rival := range permitRivals {
		r, err := contendFor(t.Context(), 200*time.Millisecond, addrs, 2, rival.open)
		if err != nil || rival.name == nameOurs && r.over > 0 {
			t.Errorf("%s: %+v, %v", rival.name, r, err)
		}
	}
}
