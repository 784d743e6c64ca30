package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/redis/go-redis/v9/logging"
	"go.uber.org/goleak"
)

// TestMain lets the test binary be a child of -procs, as the program itself is, the other process of
// BenchmarkHandover, and those of BenchmarkColdKeys and of waiting_test.go.
func TestMain(m *testing.M) {
	logging.Disable()
	if os.Getenv(childEnv) != "" {
		os.Exit(childMain(os.Stdin, os.Stdout))
	}
	if urls := os.Getenv(waiterEnv); urls != "" {
		os.Exit(waiterMain(os.Stdin, os.Stdout, strings.Split(urls, ",")))
	}
	if list := os.Getenv(waitingEnv); list != "" {
		os.Exit(waitingMain(os.Stdin, os.Stdout, strings.Split(list, ",")))
	}
	if list := os.Getenv(coldEnv); list != "" {
		args := strings.Split(list, ",")
		os.Exit(coldMain(os.Stdin, os.Stdout, args[0], args[1:]))
	}
	// A pool of go-redis that could not dial retries every second, and checks only then whether it was
	// closed.
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial"))
}

// smallConfig is a run of about a second.
func smallConfig() config {
	return config{clients: 2, callers: 20, goroutines: 10, duration: 300 * time.Millisecond,
		misses: 2, warmup: 20 * time.Millisecond, open: openClient}
}

// runSmall runs cfg with JSON into a file, and returns what came of it.
func runSmall(t *testing.T, cfg config) (code int, rep report, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cfg.jsonPath = filepath.Join(t.TempDir(), "bench.json")
	var out, errOut bytes.Buffer
	code = execute(ctx, cfg, &out, &errOut)
	if data, err := os.ReadFile(cfg.jsonPath); err == nil && len(data) > 0 {
		if err := json.Unmarshal(data, &rep); err != nil {
			t.Errorf("the JSON is none: %v", err)
		}
	}
	return code, rep, out.String(), errOut.String()
}

func wantGoodRun(t *testing.T, cfg config) report {
	t.Helper()
	code, rep, stdout, stderr := runSmall(t, cfg)
	// on a busy machine
	for strings.Contains(stdout, "not one lock was granted") && cfg.duration < 10*time.Second {
		cfg.duration *= 4
		code, rep, stdout, stderr = runSmall(t, cfg)
	}
	if code != exitOK || !strings.Contains(stdout, "checked: never two holders") {
		t.Fatalf("exit code %d\n%s\n%s", code, stdout, stderr)
	}
	if len(rep.Stampede) != 4 || rep.Stampede[2].LoadsPerMiss != 1 || rep.Stampede[3].LoadsPerMiss != 1 ||
		rep.HotKey == nil || rep.HotKey.Locks == 0 || rep.HotKey.Jain <= 0 ||
		len(rep.HotKey.Clients) != cfg.clients || rep.NodeDies == nil {
		t.Fatalf("figures are missing: %+v", rep)
	}
	return rep
}

// wantShares checks that the table has a row for each sharer, and that the shares are of one whole.
func wantShares(t *testing.T, rep report, names ...string) {
	t.Helper()
	var got []string
	var locks, holding float64
	for _, s := range rep.HotKey.Shares {
		got = append(got, s.title())
		locks += s.ShareOfLocks
		holding += s.ShareOfHolding
	}
	if !slices.Equal(got, names) || math.Abs(locks-1) > 1e-6 || math.Abs(holding-1) > 1e-6 {
		t.Errorf("%q got %v of the locks and %v of the holding time; want %q and 1", got, locks, holding, names)
	}
}

func TestRunOnEmbeddedNodes(t *testing.T) {
	cfg := smallConfig()
	rep := wantGoodRun(t, cfg)
	wantShares(t, rep, "client 0", "client 1")
	granted := func() bool {
		parts := rep.NodeDies.Parts
		return len(parts) == 3 && parts[1].OwnLocksPerSecond > 0
	}
	for !granted() && cfg.duration < 10*time.Second {
		cfg.duration *= 4 // a busy machine may grant nothing in a fifth of a second
		rep = wantGoodRun(t, cfg)
	}
	if !granted() {
		t.Errorf("with one of three nodes gone no quorum was reached: %+v", rep.NodeDies)
	}
}

func TestRunWithProcesses(t *testing.T) {
	cfg := smallConfig()
	cfg.procs, cfg.clients = 2, 3
	cfg.duration = 2 * time.Second // on a busy machine, an attempt takes a tenth of a second
	wantShares(t, wantGoodRun(t, cfg), "process 0", "process 1")
}

func TestRunWithClientsThatPoll(t *testing.T) {
	cfg := smallConfig()
	cfg.procs, cfg.clients, cfg.polling = 2, 3, 2
	cfg.duration = 2 * time.Second // a busy machine grants such clients nothing in a third of a second
	rep := wantGoodRun(t, cfg)
	wantShares(t, rep, "process 0", "process 1, polling")
	if rep.Polling != 2 {
		t.Errorf("the JSON says that %d poll, want 2", rep.Polling)
	}
}

// -polling and -linger reach the library: the last clients receive no notices.
func TestLastClientsPoll(t *testing.T) {
	cfg := smallConfig()
	cfg.clients, cfg.polling, cfg.linger, cfg.only = 3, 1, time.Second, "b"
	var mu sync.Mutex
	var silent []bool
	w := &fakeWorld{}
	cfg.open = func(_ []string, o flightlock.Options) (locker, error) {
		mu.Lock()
		defer mu.Unlock()
		silent = append(silent, o.DisableNotify)
		if o.Linger != time.Second {
			t.Errorf("Linger is %v", o.Linger)
		}
		return w, nil
	}
	code, rep, stdout, stderr := runSmall(t, cfg)
	if code != exitOK || !strings.Contains(stdout, "client 2, polling") ||
		!strings.Contains(stdout, "tries every 10ms") {
		t.Errorf("exit code %d\n%s\n%s", code, stdout, stderr)
	}
	if !slices.Equal(silent, []bool{false, false, true}) {
		t.Errorf("DisableNotify is %v", silent)
	}
	wantShares(t, rep, "client 0", "client 1", "client 2, polling")
}

// What -only leaves out is neither run nor shown nor in the JSON.
func TestOnlySomePhasesAreRun(t *testing.T) {
	heads := map[string]string{"a": "(a) stampede", "b": "(b) hot key", "c": "(c) one of"}
	for _, only := range []string{"a", "b", "c", "ac"} {
		cfg := smallConfig()
		cfg.only, cfg.open = only, (&fakeWorld{}).open
		code, rep, stdout, stderr := runSmall(t, cfg)
		if code != exitOK {
			t.Errorf("-only %s: exit code %d: %s", only, code, stderr)
		}
		for phase, head := range heads {
			if strings.Contains(stdout, head) != cfg.runs(phase) {
				t.Errorf("-only %s: (%s) in the table?\n%s", only, phase, stdout)
			}
		}
		if (rep.Stampede != nil) != cfg.runs("a") || (rep.HotKey != nil) != cfg.runs("b") ||
			(rep.NodeDies != nil) != cfg.runs("c") {
			t.Errorf("-only %s: in the JSON is %+v", only, rep)
		}
	}
}

// The work is done under the lock, so it is part of the holding time, whether it is short and busy
// or long and idle.
func TestWorkIsHoldingTime(t *testing.T) {
	for _, d := range []time.Duration{50 * time.Microsecond, 5 * time.Millisecond} {
		cfg := smallConfig()
		cfg.only, cfg.work, cfg.open = "b", d, (&fakeWorld{}).open
		code, rep, stdout, stderr := runSmall(t, cfg)
		if code != exitOK || !strings.Contains(stdout, "of work under it") || rep.Work != d {
			t.Fatalf("-work %v: exit code %d\n%s\n%s", d, code, stdout, stderr)
		}
		var held time.Duration
		for _, s := range rep.HotKey.Shares {
			held += s.Held
		}
		// The last hold may be cut short by the end of the run.
		if least := time.Duration(rep.HotKey.Locks-1) * d; held < least {
			t.Errorf("-work %v: %d locks were held for %v, want %v or more", d, rep.HotKey.Locks, held, least)
		}
	}
}

// On servers of somebody else no key of ours stays, but for fence buckets of the library; and with
// one node (c) cannot be shown, which is said.
func TestRunOnServersLeavesNoLockAndNoValueBehind(t *testing.T) {
	m := miniredis.RunT(t)
	m.ClockTTL(true)
	cfg := smallConfig()
	cfg.redis, cfg.procs = []string{"redis://" + m.Addr()}, 1
	rep := wantGoodRun(t, cfg)
	if rep.NodeDies.Skipped == "" {
		t.Error("(c) was run on one node")
	}
	for _, k := range m.Keys() {
		if strings.HasPrefix(k, "flightlock-bench:") {
			t.Errorf("key %q was left behind", k)
		}
	}
}

func TestUnreachableServerIsNamedBeforeTheRun(t *testing.T) {
	m := miniredis.RunT(t)
	addr := m.Addr()
	m.Close()
	cfg := smallConfig()
	cfg.redis = []string{"redis://" + addr}
	code, _, _, stderr := runSmall(t, cfg)
	if code != exitFailed || !strings.Contains(stderr, addr) {
		t.Errorf("exit code %d, stderr %q; want 1 and %s", code, stderr, addr)
	}
}

func TestJSONPathThatCannotBeWrittenFailsBeforeTheRun(t *testing.T) {
	cfg := smallConfig()
	cfg.jsonPath = filepath.Join(t.TempDir(), "no such directory", "x")
	cfg.open = func([]string, flightlock.Options) (locker, error) {
		t.Error("the run has begun")
		return nil, errors.New("no")
	}
	var stderr bytes.Buffer
	code := execute(context.Background(), cfg, io.Discard, &stderr)
	if code != exitFailed || !strings.Contains(stderr.String(), "-json") {
		t.Errorf("exit code %d, stderr %q", code, stderr.String())
	}
}

func TestJSONOnStdoutMovesTheTableToStderr(t *testing.T) {
	cfg := smallConfig()
	cfg.open, cfg.jsonPath = (&fakeWorld{}).open, "-"
	var stdout, stderr bytes.Buffer
	if code := execute(context.Background(), cfg, &stdout, &stderr); code != exitOK {
		t.Fatalf("exit code %d: %s", code, stderr.String())
	}
	if !json.Valid(stdout.Bytes()) || !strings.Contains(stderr.String(), "(b) hot key") {
		t.Errorf("stdout %q\nstderr %q", stdout.String(), stderr.String())
	}
}

func TestInterruptEndsTheRun(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(200*time.Millisecond, cancel)
	cfg := smallConfig()
	cfg.duration, cfg.open = 24*time.Hour, (&fakeWorld{}).open // longer than any test may take
	var stderr bytes.Buffer
	code := execute(ctx, cfg, io.Discard, &stderr)
	if code != exitFailed || !strings.Contains(stderr.String(), "interrupted") {
		t.Errorf("exit code %d, stderr %q", code, stderr.String())
	}
}

// A child that loses its parent loses its stdin, and must end by that alone.
func TestChildEndsWithItsParent(t *testing.T) {
	c, err := startChild(0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.call(t.Context(), request{Op: "nonsense"}); err == nil {
		t.Error("nonsense was done")
	}
	if err := c.close(); err != nil {
		t.Errorf("the child ended with %v", err)
	}
}

// fakeWorld is a lock in memory that all its clients share: right as long as neither fault is set.
type fakeWorld struct {
	everybody  bool // grants everyone at once
	fenceStays bool

	keys  sync.Map // key -> chan struct{}, full while held
	fence atomic.Int64
}

func (w *fakeWorld) open([]string, flightlock.Options) (locker, error) { return w, nil }
func (w *fakeWorld) stats() flightlock.Stats                           { return flightlock.Stats{} }
func (w *fakeWorld) close(context.Context) error                       { return nil }

func (w *fakeWorld) lock(ctx context.Context, key string, ttl time.Duration) (heldLock, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	v, _ := w.keys.LoadOrStore(key, make(chan struct{}, 1))
	place := v.(chan struct{})
	if !w.everybody {
		select {
		case place <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	l := &fakeLock{fence: 1, until: time.Now().Add(ttl)}
	if !w.fenceStays {
		l.fence = w.fence.Add(1)
	}
	l.release = func() error {
		if !w.everybody {
			<-place
		}
		return nil
	}
	return l, nil
}

// fakeFetcher is the plain form over the fake lock, behind Fetch.
type fakeFetcher struct {
	w     locker
	store fetch.Store[bool]
	load  fetch.Loader[bool]
	ttl   time.Duration
}

func (w *fakeWorld) fetcher(s fetch.Store[bool], load fetch.Loader[bool],
	ttl time.Duration) (fetcher, error) {
	return fakeFetcher{w, s, load, ttl}, nil
}

func (r refusing) fetcher(s fetch.Store[bool], load fetch.Loader[bool], ttl time.Duration) (fetcher, error) {
	return fakeFetcher{r, s, load, ttl}, nil
}

func (f fakeFetcher) Close(context.Context) error { return nil }

func (f fakeFetcher) Get(ctx context.Context, key string) (bool, error) {
	l, err := f.w.lock(ctx, key, f.ttl)
	if err != nil {
		return false, err
	}
	defer l.Release(ctx)
	if e, err := f.store.Get(ctx, key); e.Fresh == fetch.Fresh || err != nil {
		return e.Value, err
	}
	values, err := f.load(ctx, []string{key})
	if err != nil {
		return false, err
	}
	_, err = f.store.Put(ctx, map[string]fetch.Entry[bool]{key: {Value: values[key], Fresh: fetch.Fresh}})
	return values[key], err
}

func TestRunWithACorrectFakeSucceeds(t *testing.T) {
	cfg := smallConfig()
	cfg.open = (&fakeWorld{}).open
	wantGoodRun(t, cfg)
}

// What the bench shows it also checks: a lock that grants two at once, or loads a miss twice, makes
// the run fail.
func TestRunFailsWhenEverybodyIsGranted(t *testing.T) {
	cfg := smallConfig()
	cfg.open = (&fakeWorld{everybody: true}).open
	code, rep, stdout, _ := runSmall(t, cfg)
	if code != exitFailed || rep.ViolationCount == 0 {
		t.Errorf("exit code %d, %d violations", code, rep.ViolationCount)
	}
	for _, want := range []string{"FAILED", "two holders at once", "was loaded 40 times under the lock"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("the table does not say %q:\n%s", want, stdout)
		}
	}
}

func TestRunFailsWhenTheFenceStays(t *testing.T) {
	cfg := smallConfig()
	cfg.open = (&fakeWorld{fenceStays: true}).open
	code, _, stdout, _ := runSmall(t, cfg)
	if code != exitFailed || !strings.Contains(stdout, "the fence did not rise") {
		t.Errorf("exit code %d\n%s", code, stdout)
	}
}

// A lock that never grants is no success either, though it never has two holders.
func TestRunFailsWhenNobodyIsGranted(t *testing.T) {
	cfg := smallConfig()
	w := &fakeWorld{}
	var opened atomic.Int32
	cfg.open = func(urls []string, o flightlock.Options) (locker, error) {
		return refusing{w, opened.Add(1)}, nil
	}
	code, _, stdout, _ := runSmall(t, cfg)
	if code != exitFailed || !strings.Contains(stdout, "not one lock was granted") ||
		!strings.Contains(stdout, "lock: unavailable") {
		t.Errorf("exit code %d\n%s", code, stdout)
	}
}

// refusing grants the bench's first lock of each client, and nothing more.
type refusing struct {
	*fakeWorld
	n int32
}

func (r refusing) lock(ctx context.Context, key string, ttl time.Duration) (heldLock, error) {
	if strings.HasPrefix(key, "first:") {
		return r.fakeWorld.lock(ctx, key, ttl)
	}
	return nil, flightlock.ErrUnavailable
}

// A release of a first lock that is not answered in time, as on a busy machine, does not end the run.
func TestRunGoesOnIfAFirstReleaseIsLate(t *testing.T) {
	cfg := smallConfig()
	w := &fakeWorld{}
	cfg.open = func([]string, flightlock.Options) (locker, error) { return lateAtFirst{w}, nil }
	wantGoodRun(t, cfg)
}

// lateAtFirst executes the release of a first lock, and does not answer it in time.
type lateAtFirst struct{ *fakeWorld }

func (w lateAtFirst) lock(ctx context.Context, key string, ttl time.Duration) (heldLock, error) {
	l, err := w.fakeWorld.lock(ctx, key, ttl)
	if fake, is := l.(*fakeLock); is && strings.HasPrefix(key, "first:") {
		released := fake.release
		fake.release = func() error { return errors.Join(released(), flightlock.ErrUnavailable) }
	}
	return l, err
}
