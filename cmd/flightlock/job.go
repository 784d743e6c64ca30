package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/flightlock/flightlock"
)

// A job is CMD, and the lock that it is run under: what run and elect have in common.
type job struct {
	*common
	key  string
	ttl  time.Duration
	path string // of CMD
	cmd  []string

	// of the wait for the lock. It does not end while CMD runs: Client.Do would refresh no more
	ctx    context.Context
	cancel context.CancelFunc
	ran    bool

	// mu guards the two below. It is held while CMD is being started, so that a signal goes to it, or keeps it
	// from being started.
	mu      sync.Mutex
	running *group // nil while CMD does not run
	stopped int    // the exit code for the signal that has ended the wait, or was passed on to end CMD; 0: none
}

// fenceVariable has the token of the lock, in the environment of CMD.
const fenceVariable = "FLIGHTLOCK_FENCE"

func newJob(name string) *job {
	j := &job{common: flags(name)}
	j.DurationVar(&j.ttl, "ttl", 10*time.Second, "how long others wait if this machine dies: 1s to -max-ttl.\n"+
		"The last fifth is for ending CMD if the nodes cannot be reached")
	j.ctx, j.cancel = context.WithCancel(context.Background())
	return j
}

// check reports what is wrong with what both have.
func (j *job) check(cmd []string) error {
	j.cmd = cmd
	switch {
	case supported() != nil:
		return supported()
	case len(cmd) == 0:
		return errors.New("CMD is missing")
	case j.ttl < time.Second || j.ttl > j.maxTTL:
		return fmt.Errorf("-ttl %v: it must be from 1s to -max-ttl, %v", j.ttl, j.maxTTL)
	}
	return nil
}

// do has lock take the lock, call hold under it, and release it. It returns the exit code.
func (j *job) do(lock func(c *flightlock.Client) error) int {
	var err error
	if j.path, err = exec.LookPath(j.cmd[0]); err != nil { // before the lock is taken for nothing
		complain(err)
		return notStarted(err)
	}
	c, closeClient, err := j.open(j.ttl)
	if err != nil {
		return refuse(err)
	}
	defer closeClient()
	go j.receive(receiveSignals())
	return j.exitCode(lock(c))
}

// receive passes signals on to CMD. While there is none, some end the wait for the lock. It ends with the
// process.
func (j *job) receive(signals <-chan os.Signal) {
	for s := range signals {
		by := ends(s)
		j.mu.Lock()
		switch {
		case j.running == nil && by != 0:
			j.stopped = by
			j.cancel()
		case j.running != nil:
			j.running.signal(s)
			if by != 0 && s != syscall.SIGHUP { // by which daemons are told to read their settings again
				j.stopped = by
			}
		}
		j.mu.Unlock()
	}
}

// stoppedBy is the exit code for the signal that ends this process; 0: none has come.
func (j *job) stoppedBy() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.stopped
}

// start starts CMD by startGroup, unless a signal came before.
func (j *job) start(startGroup func() (*group, error)) (g *group, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.stopped != 0 {
		return nil, exited(j.stopped)
	}
	if g, err = startGroup(); err != nil {
		complain(err)
		return nil, exited(notStarted(err))
	}
	j.ran, j.running = true, g
	return g, nil
}

// ended is called when no process of CMD is left.
func (j *job) ended() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.running = nil
	if j.stopped != 0 { // it was passed on
		j.cancel() // elect does not wait to lead again
	}
}

// exited is the exit code of CMD, as an error; never 0.
type exited int

func (e exited) Error() string { return fmt.Sprintf("CMD has ended with exit code %d", int(e)) }

// outlived is logged if this process, or the end of CMD's, took longer than the tenth of the ttl that is for
// that.
const outlived = "flightlock: CMD has outlived its lock, and the next holder may have begun beside it: " +
	"this machine was too busy to end it in time; a longer -ttl leaves more time"

// errLost is the error of hold for a lock that is not lost yet, but would have been: CMD was ended.
var errLost = fmt.Errorf("%w: it could not be refreshed", flightlock.ErrLockLost)

// hold runs CMD under l, which others refresh and release. ctx is the lock's. It returns when no process is
// left.
func (j *job) hold(ctx context.Context, l *flightlock.Lock) error {
	if err := refreshed(ctx, l, j.ttl); err != nil {
		return err
	}
	fence := strconv.FormatInt(l.Fence(), 10)
	slog.Info("flightlock: locked", "key", j.key, "fence", l.Fence())
	g, err := j.start(func() (*group, error) {
		return startGroup(j.path, j.cmd, append(os.Environ(), fenceVariable+"="+fence))
	})
	if err != nil {
		return err
	}
	lost := (&guard{lock: l, over: ctx.Done(), ttl: j.ttl, cmd: g}).watch()
	if late := time.Since(l.Until()); late > 0 {
		slog.Error(outlived, "key", j.key, "fence", fence, "for", late)
	}
	j.ended()
	code := g.exitCode()
	slog.Info("flightlock: CMD has ended", "key", j.key, "fence", l.Fence(), "code", code)
	switch {
	case lost:
		return cmp.Or(l.Err(), errLost)
	case code != 0:
		return exited(code)
	}
	return nil
}

// refreshed returns when l has half of its ttl, as the guard needs: the release of another process grants a
// lock for less at first. A refresh that has failed is no reason to give up before the lock is lost.
func refreshed(ctx context.Context, l refresher, ttl time.Duration) error {
	for time.Until(l.Until()) < ttl/2 {
		err := l.Refresh(ctx)
		switch {
		case err == nil:
		case l.Err() != nil:
			return l.Err()
		case ctx.Err() != nil:
			return err
		default:
			time.Sleep(pollEvery)
		}
	}
	return nil
}

type refresher interface { // a *flightlock.Lock
	Until() time.Time
	Refresh(ctx context.Context) error
	Err() error
}

// under is what Client.Do does with a lock, for a permit.
func (j *job) under(l *flightlock.Lock) error {
	err := l.AutoRefresh(context.Background(), flightlock.RefreshPolicy{})
	if err == nil {
		err = j.hold(l.Context(context.Background()), l)
	}
	if lost := l.Release(context.Background()); errors.Is(lost, flightlock.ErrNotHeld) {
		return fmt.Errorf("%w: %w", flightlock.ErrLockLost, lost)
	}
	return err
}

// exitCode is that for the error of a lock, or of hold.
func (j *job) exitCode(err error) int {
	var cmd exited
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, flightlock.ErrLockLost) && j.ran:
		slog.Error("flightlock: the lock was lost", "key", j.key, "error", err)
		return exitLost
	case errors.As(err, &cmd):
		return int(cmd)
	case j.stoppedBy() != 0:
		return j.stoppedBy()
	case errors.Is(err, flightlock.ErrInvalid):
		return refuse(err)
	}
	slog.Error("flightlock: no lock: CMD was not run", "key", j.key, "error", err)
	if errors.Is(err, flightlock.ErrNotAcquired) {
		return exitHeld
	}
	return exitUnavailable
}

// notStarted is the exit code for a CMD that could not be started, as a shell has it.
func notStarted(err error) int {
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		return exitNotFound
	}
	return exitNotRun
}
