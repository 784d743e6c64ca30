//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package main

import (
	"errors"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
)

// A group is the processes of CMD: the first one and all that it starts, unless they leave its process group.
type group struct {
	// of the group, and of its first process. It is not reused while the group has a process
	number int
	tty    *terminal     // nil: there is none
	done   chan struct{} // closed when the first process has ended
	code   int           // its exit code, once done is closed
}

// startGroup starts path as the first process of a group of its own, with the terminal if this process has
// it.
func startGroup(path string, args, env []string) (*group, error) {
	g := &group{done: make(chan struct{}), tty: openTerminal()}
	attr := &os.ProcAttr{Env: env, Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
		Sys: g.tty.attributes(&syscall.SysProcAttr{Setpgid: true})}
	dieWithParent(attr.Sys)
	started := make(chan error)
	go g.run(path, args, attr, started)
	if err := <-started; err != nil {
		g.tty.close()
		return nil, err
	}
	return g, nil
}

// leaders are the first processes that were not reaped yet, by their ids. The mutex is held while one is
// started, so that it is there when it is reaped.
var leaders = struct {
	sync.Mutex
	of map[int]*group
}{of: map[int]*group{}}

// run starts the first process, and reaps all children until there are none: also those that CMD orphaned,
// where they become children of this process. They may outlive CMD, as daemons do, so this may reap the first
// process of a later group, too. The goroutine keeps its thread: the kernel tells a child of the end of its
// parent when the thread ends that started it.
func (g *group) run(path string, args []string, attr *os.ProcAttr, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	leaders.Lock()
	p, err := os.StartProcess(path, args, attr)
	if err == nil {
		g.number = p.Pid
		leaders.of[p.Pid] = g
		_ = p.Release() // this loop reaps it
	}
	leaders.Unlock()
	started <- err
	for err == nil || errors.Is(err, syscall.EINTR) {
		var status syscall.WaitStatus
		var pid int
		if pid, err = syscall.Wait4(-1, &status, syscall.WUNTRACED, nil); err != nil { // ECHILD: there are none
			continue
		}
		leaders.Lock()
		of := leaders.of[pid]
		if !status.Stopped() {
			delete(leaders.of, pid)
		}
		leaders.Unlock()
		if of != nil {
			of.changed(status)
		}
	}
}

// changed is called when the first process has ended, or was stopped.
func (g *group) changed(status syscall.WaitStatus) {
	switch {
	case status.Stopped():
		g.stopped(status.StopSignal())
	case status.Signaled():
		g.code = exitSignal + int(status.Signal())
		close(g.done)
	default:
		g.code = status.ExitStatus()
		close(g.done)
	}
}

// stopped is called when the first process was stopped. A lock is refreshed on, so Ctrl-Z would keep it from
// others for nothing, and nobody could tell the shell of it: CMD goes on. One that was stopped because it
// does not have the terminal goes on with it, if this process has it, or is brought to the foreground.
func (g *group) stopped(by syscall.Signal) {
	switch by {
	case syscall.SIGTSTP:
		g.signal(syscall.SIGCONT)
	case syscall.SIGTTIN, syscall.SIGTTOU:
		if g.tty.give(g.number) {
			g.signal(syscall.SIGCONT)
		}
	}
}

func (g *group) exited() <-chan struct{} { return g.done }

// signal sends a signal to all processes of the group.
func (g *group) signal(s os.Signal) {
	if s == syscall.SIGCONT { // the shell may have brought this process to the foreground
		g.tty.give(g.number)
	}
	_ = syscall.Kill(-g.number, s.(syscall.Signal))
}

// empty reports whether no process of the group is left. It is called after the first one was reaped.
func (g *group) empty() bool { return errors.Is(syscall.Kill(-g.number, 0), syscall.ESRCH) }

// exitCode is that of the first process, and takes the terminal back. No process is left.
func (g *group) exitCode() int {
	g.tty.takeBack()
	g.tty.close()
	return g.code
}

// passedOn are the signals that are passed on to CMD. The first four end this process while there is no CMD.
var passedOn = []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM,
	syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH, syscall.SIGCONT, syscall.SIGTSTP}

// receiveSignals begins to receive those that are passed on, except those that this process was started to
// ignore, as nohup does. From then on no signal ends this process but KILL, also not that of a pipe that
// nobody reads: CMD would outlive it.
func receiveSignals() <-chan os.Signal {
	signals := make(chan os.Signal, 16)
	for _, s := range passedOn {
		if !signal.Ignored(s) {
			signal.Notify(signals, s)
		}
	}
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // CMD would inherit Ignore
	return signals
}

// ends is the exit code of a signal that ends this process while there is no CMD; 0 if it does not.
func ends(s os.Signal) int {
	switch s {
	case syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM:
		return exitSignal + int(s.(syscall.Signal))
	}
	return 0
}

// supported reports whether CMD can be run here.
func supported() error { return nil }
