package scale

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/procs"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// This file runs processes of their own: this test binary, started again. They communicate over the
// child's stdin and stdout, a line of JSON each way, and share real servers that have the locks;
// the first has the cache, and what the test wants to know, too.

// processEnv, set to the servers' addresses with commas between them, makes the test binary
// such a process.
const processEnv = "FLIGHTLOCK_TEST_PROCESS"

// errand is a task for a process: so many callers fetch the key at once, or Do.
type errand struct {
	Do      string // "": fetch; or one of those of locker
	Key     string
	Callers int
	Takes   time.Duration // a load
	TTL     time.Duration

	Refreshed bool // lock: by AutoRefresh

	Linger time.Duration // of keys, from now on
}

// told is the result of that.
type told struct {
	Values   []string // distinct ones
	Errors   []string
	Slowest  time.Duration
	P99      time.Duration
	Commands uint64 // of the lock protocol
	Looks    uint64 // at the cache, besides one for each caller

	Fence int64    // lock
	Owner string   // lock
	Ended []string // inspect: what says that the lock is lost
}

// process is a child.
type process struct{ *procs.Child }

func startProcess(t *testing.T, addrs ...string) *process {
	t.Helper()
	return &process{startChild(t, processEnv+"="+strings.Join(addrs, ","))}
}

// startChild starts this test binary with env. It ends with the test.
func startChild(t *testing.T, env string) *procs.Child {
	t.Helper()
	cmd, err := procs.Self(env)
	if err != nil {
		t.Fatal(err)
	}
	c, err := procs.StartChild(cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.End(time.Minute) })
	return c
}

func (p *process) run(e errand) (r told, err error) {
	err = p.Call(context.Background(), e, &r)
	return r, err
}

// together runs the errand in all processes at once.
func together(ps []*process, e errand) ([]told, []error) {
	tolds, errs := make([]told, len(ps)), make([]error, len(ps))
	var wg sync.WaitGroup
	for i, p := range ps {
		wg.Go(func() { tolds[i], errs[i] = p.run(e) })
	}
	wg.Wait()
	return tolds, errs
}

// processNodeTimeout is long, for a machine that is busy.
const processNodeTimeout = 10 * time.Second

func processMain(in io.Reader, out io.Writer) int {
	var nodes []redis.UniversalClient
	for _, addr := range strings.Split(os.Getenv(processEnv), ",") {
		rdb := redis.NewClient(&redis.Options{Addr: addr, PoolTimeout: time.Minute})
		defer rdb.Close()
		nodes = append(nodes, rdb)
	}
	var linger atomic.Int64
	c, err := flightlock.New(flightlock.Options{
		NodeTimeout: processNodeTimeout,
		LingerFor:   func(string) time.Duration { return time.Duration(linger.Load()) },
	}, nodes...)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = c.Close(ctx) // a lock may be held
	}()
	m := &locker{c: c}
	err = procs.Serve(in, out, 10*time.Second, func(_ context.Context, e errand) told {
		linger.Store(int64(e.Linger))
		if e.Do == "" {
			return e.run(c, nodes[0])
		}
		return m.run(e)
	})
	if err != nil {
		return 1
	}
	return 0
}

func (e errand) run(c *flightlock.Client, rdb redis.UniversalClient) (r told) {
	var looks atomic.Int64
	f, err := fetch.New(c, fetch.Plain(
		func(ctx context.Context, key string) (v string, ok bool, err error) {
			looks.Add(1)
			if v, err = rdb.Get(ctx, "value:"+key).Result(); errors.Is(err, redis.Nil) {
				return "", false, nil
			}
			return v, err == nil, err
		},
		func(ctx context.Context, key, v string) error {
			return rdb.Set(ctx, "value:"+key, v, time.Minute).Err()
		},
	), fetch.Each(func(ctx context.Context, key string) (string, error) {
		n, err := rdb.Incr(ctx, "loads:"+key).Result()
		if err == nil {
			err = rdb.RPush(ctx, "loaders:"+key, os.Getpid()).Err()
		}
		time.Sleep(e.Takes)
		return fmt.Sprint("load ", n), err
	}), fetch.Options{TTL: e.TTL, FailClosed: true})
	if err != nil {
		return told{Errors: []string{err.Error()}}
	}
	defer f.Close(context.Background())
	before := c.Stats().Commands
	type got struct {
		v    string
		err  error
		took time.Duration
	}
	all := make([]got, e.Callers)
	var wg sync.WaitGroup
	began := time.Now()
	for i := range all {
		wg.Go(func() {
			v, err := f.Get(context.Background(), e.Key)
			all[i] = got{v, err, time.Since(began)}
		})
	}
	wg.Wait()
	_ = f.Close(context.Background()) // the release is one of the commands
	var waits []time.Duration
	for _, g := range all {
		waits = append(waits, g.took)
		if g.err != nil {
			r.Errors = append(r.Errors, g.err.Error())
		} else if !slices.Contains(r.Values, g.v) {
			r.Values = append(r.Values, g.v)
		}
	}
	slices.Sort(waits)
	r.Slowest, r.P99 = waits[len(waits)-1], waits[len(waits)*99/100]
	r.Commands = c.Stats().Commands - before
	r.Looks = uint64(looks.Load()) - uint64(e.Callers)
	return r
}

// Four processes with 250 callers each, a real Redis: exactly one load per miss, one value
// for all, no error, whatever a load takes, also three times the ttl. FLIGHTLOCK_LONG=1 runs
// as many misses as a claim needs.
func TestFetchAcrossProcesses(t *testing.T) {
	t.Parallel()
	server := redistest.StartServer(t)
	rdb := server.Client(t)
	var ps []*process
	for range 4 {
		ps = append(ps, startProcess(t, server.Addr()))
	}
	together(ps, errand{Key: "warm", Callers: 1, TTL: time.Second})
	for _, tc := range []struct {
		takes, ttl   time.Duration
		misses, long int
	}{
		{5 * time.Millisecond, 10 * time.Second, 40, 1000},
		{50 * time.Millisecond, 10 * time.Second, 10, 200},
		{500 * time.Millisecond, 10 * time.Second, 2, 20},
		{6 * time.Second, 2 * time.Second, 1, 5},
	} {
		misses := tc.misses
		if redistest.Long() {
			misses = tc.long
		}
		var commands, looks, most uint64
		var p99 []time.Duration
		for miss := range misses {
			key := fmt.Sprintf("%v:%v:%d", tc.takes, tc.ttl, miss)
			tolds, errs := together(ps, errand{Key: key, Callers: 250, Takes: tc.takes, TTL: tc.ttl})
			for i, r := range tolds {
				if errs[i] != nil || len(r.Errors) > 0 || !slices.Equal(r.Values, []string{"load 1"}) {
					t.Errorf("%s, process %d: %v, %+v", key, i, errs[i], r)
				}
				commands += r.Commands
				looks += r.Looks
				most = max(most, r.Commands)
				p99 = append(p99, r.P99)
			}
			if n := rdb.Get(t.Context(), "loads:"+key).Val(); n != "1" {
				t.Errorf("%s: %s loads", key, n)
			}
		}
		slices.Sort(p99)
		n := float64(4 * misses)
		t.Logf("loads of %v, ttl %v, %d misses: 1 load each; per miss and process %.1f lock commands (at most %d) "+
			"and %.1f lookups beyond the callers' own; p99 of callers: median %v, worst %v",
			tc.takes, tc.ttl, misses, float64(commands)/n, most, float64(looks)/n, p99[len(p99)/2], p99[len(p99)-1])
		// On average: where a process has to wait for its subscription, it polls. And now and then all
		// look up, and one refreshes.
		if most := 10 + 2*tc.takes.Seconds(); float64(commands)/n > most {
			t.Errorf("%.1f commands per miss and process; at most %.1f are allowed", float64(commands)/n, most)
		}
	}
}

// The loading process is killed in the middle of a load: another one loads when the lease has run
// out, and no caller elsewhere gets an error.
func TestFetchWhenTheLoadingProcessIsKilled(t *testing.T) {
	t.Parallel()
	server := redistest.StartServer(t)
	rdb := server.Client(t)
	var ps []*process
	for range 4 {
		ps = append(ps, startProcess(t, server.Addr()))
	}
	together(ps, errand{Key: "warm", Callers: 1, TTL: time.Second})
	const ttl = 3 * time.Second // a process that has to wait for a processor keeps the key
	type end struct {
		tolds []told
		errs  []error
	}
	ended := make(chan end, 1)
	go func() {
		tolds, errs := together(ps, errand{Key: "k", Callers: 100, Takes: 4 * time.Second, TTL: ttl})
		ended <- end{tolds, errs}
	}()
	var loader *process
	redistest.Eventually(t, 20*time.Second, "a process loads", func() bool {
		pid, _ := strconv.Atoi(rdb.LIndex(t.Context(), "loaders:k", 0).Val())
		for _, p := range ps {
			if p.PID() == pid {
				loader = p
			}
		}
		return loader != nil
	})
	loader.Kill()
	killed, left := time.Now(), rdb.PTTL(t.Context(), "lock:k").Val()
	redistest.Eventually(t, 20*time.Second, "another process loads", func() bool {
		return rdb.LLen(t.Context(), "loaders:k").Val() == 2
	})
	t.Logf("the next load began %v after the kill; the lease had %v left, of %v", time.Since(killed), left, ttl)
	e := <-ended
	for i, p := range ps {
		r, err := e.tolds[i], e.errs[i]
		if p == loader {
			if err == nil {
				t.Error("the killed process has answered")
			}
			continue
		}
		if err != nil || len(r.Errors) > 0 || !slices.Equal(r.Values, []string{"load 2"}) {
			t.Errorf("process %d: %v, %+v", i, err, r)
		}
	}
	if n := rdb.Get(t.Context(), "loads:k").Val(); n != "2" {
		t.Errorf("%s loads", n)
	}
}
