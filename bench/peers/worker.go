package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"

	"github.com/flightlock/flightlock/internal/procs"
)

// This file is the far end of a bout: a process that does one task for its parent. They talk over
// its stdin and stdout, a line of JSON for each request and one for each reply. It ends when its
// stdin does, so it cannot outlive its parent.

// workerEnv, set to anything, makes the program a worker.
const workerEnv = "FLIGHTLOCK_PEERS_WORKER"

// The requests.
const (
	opSetup = "setup" // with a Task: opens the client and warms it up
	opRun   = "run"   // with a time: does the load once
	opTake  = "take"  // of a hand-over: lock
	opPass  = "pass"  // of a hand-over: release
	opIdle  = "idle"  // with a Task: opens clients, and measures their heap
	opSpin  = "spin"  // keeps a processor busy from now on
)

type request struct {
	Op      string
	Task    *task     `json:",omitempty"`
	At      time.Time `json:",omitzero"` // when a run begins
	Episode int       // of a stampede
}

type reply struct {
	Error  string    `json:",omitempty"`
	Result *result   `json:",omitempty"`
	At     time.Time `json:",omitzero"` // of take: since when it is held; of pass: when the release began
}

// workerMain serves until in ends, and returns the exit code.
func workerMain(in io.Reader, out io.Writer) int {
	signal.Ignore(os.Interrupt) // the parent receives it too, and closes our stdin
	var j job
	err := procs.Serve(in, out, 2*time.Second, func(_ context.Context, r request) reply {
		rep, err := j.serve(r)
		if err != nil {
			rep.Error = err.Error()
		}
		return rep
	})
	if err != nil {
		return 1
	}
	j.close()
	return 0
}

// job is a worker's state, once a setup has come.
type job struct {
	t     task
	l     locker // nil for a stampede without a lock
	src   *source
	f     fetcher // of a stampede
	baton *baton
	cache *cacheJob // of the loads of caches
}

func (j *job) serve(r request) (rep reply, err error) {
	switch {
	case r.Op == opSetup && r.Task != nil && j.t.Rival == "":
		j.t = *r.Task
		return rep, j.setup()
	case r.Op == opRun:
		rep.Result, err = j.profiled(r)
	case r.Op == opTake && j.baton != nil:
		rep.At, err = j.baton.take()
	case r.Op == opPass && j.baton != nil:
		rep.At, err = j.baton.pass()
	case r.Op == opIdle && r.Task != nil:
		rep.Result, err = runIdle(*r.Task)
	case r.Op == opSpin:
		go spin()
	default:
		err = fmt.Errorf("unexpected request %q", r.Op)
	}
	return rep, err
}

// spin keeps a processor busy until the process ends.
func spin() {
	for {
		work(time.Millisecond / 2) // a longer one would sleep
	}
}

func (j *job) setup() error {
	r, err := rivalNamed(j.t.Rival)
	if err != nil {
		return err
	}
	if k := j.t.Load.Kind; k == coldKeys || k == invalidation {
		if j.cache, err = openCacheJob(r, j.t); err != nil {
			return err
		}
		return j.cache.warmUp(j.t)
	}
	if j.t.Load.Kind != stampede || r.name != nameByHand {
		if j.l, err = r.open(j.t.Settings); err != nil {
			return err
		}
	}
	switch j.t.Load.Kind {
	case handover:
		j.baton = &baton{l: j.l, key: j.t.Prefix + ":hot"}
	case stampede:
		j.src = &source{cache: cache{goredis(j.t.Settings.Addrs[0], nil)}, takes: j.t.Load.Work}
		if j.f, err = newFetcher(j.l, j.src); err != nil {
			return err
		}
	}
	return j.warmUp()
}

// warmTime is long enough for connects, scripts and the first growth of the heap of a few processes, which
// begin together. With more processes it takes longer, in proportion.
const warmTime = 200 * time.Millisecond

// warmUp does some of the load on keys that are not those of the load, unless those are its own.
func (j *job) warmUp() error {
	t := j.t
	t.Prefix += ":warm" // a lock that is left behind by the end of the warm-up is in nobody's way
	t.Load.Window, t.Load.Drain = time.Duration(1+t.Procs/8)*warmTime, false
	switch t.Load.Kind {
	case closed:
	case open:
		t.Load.Goroutines = 50
	case stampede:
		t.Load.Goroutines = min(t.Load.Goroutines, 50)
		j.src.takes = time.Millisecond
		_, err := runStampede(j.f, j.src, t, fmt.Sprintf("%s:%d", t.Prefix, pid()), time.Now())
		j.src.takes = j.t.Load.Work
		return err
	default:
		t.Load = load{Kind: closed, Goroutines: 8, Window: t.Load.Window}
	}
	_, err := runClosed(j.l, t, time.Now())
	return err
}

// profiled is run, with profiles of it if they are wanted.
func (j *job) profiled(r request) (*result, error) {
	if j.t.Profile == "" {
		return j.run(r)
	}
	p, err := startProfiles(j.t.Profile, j.t.Rival)
	if err != nil {
		return nil, err
	}
	res, err := j.run(r)
	return res, errors.Join(err, p.stop())
}

func (j *job) run(r request) (*result, error) {
	switch j.t.Load.Kind {
	case closed:
		return runClosed(j.l, j.t, r.At)
	case open:
		return runOpen(j.l, j.t, r.At)
	case stampede:
		return runStampede(j.f, j.src, j.t, fmt.Sprintf("%s:%d", j.t.Prefix, r.Episode), r.At)
	case coldKeys:
		return j.cache.runCold(j.t, fmt.Sprintf("%s:%d", j.t.Prefix, r.Episode), r.At)
	case invalidation:
		return j.cache.runInvalidation(j.t, j.t.Prefix, r.At)
	case waiters:
		return runWaiters(j.l, j.t)
	case holding:
		return runHolding(j.l, j.t)
	}
	return nil, fmt.Errorf("a %s has no run", j.t.Load.Kind)
}

func (j *job) close() {
	if j.f != nil {
		j.f.close()
		_ = j.src.rdb.Close()
	}
	if j.cache != nil {
		j.cache.close()
	}
	if j.l != nil {
		j.l.close()
	}
}
