// Package procs runs the child processes of tests, benchmarks and demos: servers, and this program
// itself, started again to be a second process.
package procs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"time"
)

// A Process is one run of a program, from its start until it has been reaped. Its methods are safe
// for concurrent use.
//
// On Linux it dies with this process, however this one ends: a test binary that panics or that runs
// into its timeout runs no cleanup.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed once the process is gone and reaped
	err  error         // how it ended; written before done is closed
}

// Start starts cmd, which nobody else may start or wait for.
func Start(cmd *exec.Cmd) (*Process, error) {
	p := &Process{cmd: cmd, done: make(chan struct{})}
	dieWithParent(cmd)
	started := make(chan error, 1)
	go p.run(started)
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// run starts the process and stays until it is gone. The goroutine keeps its thread for that long:
// the kernel sends the parent-death signal when the *thread* that forked ends, and Go ends threads
// that it does not need.
func (p *Process) run(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := p.cmd.Start()
	started <- err
	if err == nil {
		p.err = p.cmd.Wait()
		close(p.done)
	}
}

// PID is the process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when the process is gone and reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Alive reports whether the process is yet to be reaped.
func (p *Process) Alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Wait waits until the process is gone. It returns nil for exit code 0.
func (p *Process) Wait() error {
	<-p.done
	return p.err
}

// WaitOrKill is Wait for at most d. Then it kills the process and returns an error that says so.
func (p *Process) WaitOrKill(d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-p.done:
		return p.err
	case <-timer.C:
		p.Kill()
		return fmt.Errorf("process %d was killed: it was running after %v", p.PID(), d)
	}
}

// Signal sends a signal. A process that is gone is an error that matches [os.ErrProcessDone].
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Kill ends the process by SIGKILL, stopped or not, and waits until it has been reaped. It sends
// no SIGCONT, by which a stopped server would execute what is queued on its sockets.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// stopTimeout bounds how long a SIGSTOP may take to have an effect.
const stopTimeout = 5 * time.Second

// Stop stops the process by SIGSTOP and returns when it has stopped: kill(2) returns before that.
func (p *Process) Stop() error {
	if err := stop(p.cmd.Process); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !isStopped(p.PID()) {
		select {
		case <-tick.C:
		case <-p.done:
			return os.ErrProcessDone
		case <-ctx.Done():
			return errors.New("the process has not stopped")
		}
	}
	return nil
}

// Cont resumes a stopped process by SIGCONT.
func (p *Process) Cont() error { return cont(p.cmd.Process) }
