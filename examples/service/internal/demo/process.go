package demo

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"
)

// process is one process of the service, over any number of runs on the same port.
type process struct {
	name string
	addr string
	exe  string
	env  []string // besides this process's own
	args []string
	log  *os.File

	pid  atomic.Int64 // 0: it does not run
	cmd  *exec.Cmd
	gone chan exit // gets how the run ended, once
}

// exit is how a run ended.
type exit struct{ err error }

// How long a process may take to be ready, and to end when it is told to.
const (
	startPatience = 20 * time.Second
	stopPatience  = 20 * time.Second
)

func (p *process) url() string { return "http://" + p.addr }

// start runs the executable. It does not wait until the service is ready.
func (p *process) start() error {
	cmd := exec.Command(p.exe, p.args...)
	cmd.Env = append(os.Environ(), p.env...)
	cmd.Stdout, cmd.Stderr = p.log, p.log
	dieWithParent(cmd)
	started, gone := make(chan error, 1), make(chan exit, 1)
	go func() {
		// The kernel counts as the parent the thread that has forked: this goroutine keeps it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			gone <- exit{cmd.Wait()}
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("starting process %s: %w", p.name, err)
	}
	p.cmd, p.gone = cmd, gone
	p.pid.Store(int64(cmd.Process.Pid))
	return nil
}

// ready waits until the process says that it is healthy.
func (p *process) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	for {
		if healthy(ctx, p.url()) {
			return nil
		}
		select {
		case e := <-p.gone:
			p.gone <- e
			return fmt.Errorf("process %s ended before it was ready: %w", p.name, e.err)
		case <-ctx.Done():
			return fmt.Errorf("process %s is not ready: %w", p.name, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func healthy(ctx context.Context, url string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/healthz", nil)
	if err != nil {
		return false
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// end tells the process to end, and waits until it has. Its error says that it had to be killed, or how it ended if
// that was not well.
func (p *process) end() error {
	if p.cmd == nil {
		return nil
	}
	err := p.cmd.Process.Signal(syscall.SIGTERM)
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case e := <-p.gone:
		err = e.err
		p.pid.Store(0)
	case <-time.After(stopPatience):
		p.kill()
		return fmt.Errorf("process %s did not end within %v of SIGTERM", p.name, stopPatience)
	}
	p.cmd = nil
	if err != nil {
		return fmt.Errorf("process %s: %w", p.name, err)
	}
	return nil
}

// kill ends the process by SIGKILL.
func (p *process) kill() {
	if p.cmd != nil {
		_ = p.cmd.Process.Kill()
		<-p.gone // how it ended is no news
		p.pid.Store(0)
		p.cmd = nil
	}
}

// freePort returns a port below those that the kernel gives to outgoing connections, so that the port is still free
// when a process comes back to it.
func freePort() (string, error) {
	for range 200 {
		l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(30000+rand.IntN(2700)))
		if err == nil {
			return l.Addr().String(), l.Close()
		}
	}
	return "", errors.New("no free port")
}
