package redistest

import (
	"os"
	"os/exec"
	"runtime"
)

// A process is one run of a server binary, from start to reaped.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed once the process is gone and reaped
}

// startProcess runs the binary with its output going to log.
func startProcess(binary string, args []string, dir string, log *os.File) (*process, error) {
	p := &process{cmd: exec.Command(binary, args...), done: make(chan struct{})}
	p.cmd.Dir = dir
	p.cmd.Stdout, p.cmd.Stderr = log, log
	dieWithParent(p.cmd)
	started := make(chan error, 1)
	go p.run(started)
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// run starts the process and stays until it is gone. The goroutine keeps its thread for
// that long because the kernel sends the parent-death signal when the *thread* that
// forked ends, and Go ends idle threads that it does not need to keep.
func (p *process) run(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := p.cmd.Start(); err != nil {
		started <- err
		return
	}
	started <- nil
	_ = p.cmd.Wait() // how it ended is no news: we kill it
	close(p.done)
}

// kill ends the process, stopped or not, and waits until it is reaped. No SIGCONT goes
// ahead of the SIGKILL: it would let a stopped server execute what is queued on its sockets.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

func (p *process) alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}
