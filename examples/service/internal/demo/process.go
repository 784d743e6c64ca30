package demo

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/flightlock/flightlock/internal/procs"
)

// process is one process of the service, over any number of runs on the same port.
type process struct {
	name string
	addr string
	exe  string
	env  []string // besides this process's own
	args []string
	log  *os.File

	release func()                        // gives addr back
	run     atomic.Pointer[procs.Process] // nil: it does not run
}

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
	run, err := procs.Start(cmd)
	if err != nil {
		return fmt.Errorf("starting process %s: %w", p.name, err)
	}
	p.run.Store(run)
	return nil
}

// ready waits until the process says that it is healthy.
func (p *process) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	run := p.run.Load()
	for {
		if healthy(ctx, p.url()) {
			return nil
		}
		select {
		case <-run.Done():
			return fmt.Errorf("process %s ended before it was ready: %w", p.name, run.Wait())
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

// end tells the process to end, and waits until it has. Its error says that it had to be killed,
// or how it ended if that was not well.
func (p *process) end() error {
	run := p.run.Load()
	if run == nil {
		return nil
	}
	if err := run.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	err := run.WaitOrKill(stopPatience)
	p.run.Store(nil)
	if err != nil {
		return fmt.Errorf("process %s, after SIGTERM: %w", p.name, err)
	}
	return nil
}

// pid is the process id, 0 while it does not run.
func (p *process) pid() int {
	if run := p.run.Load(); run != nil {
		return run.PID()
	}
	return 0
}

// close gives back what belongs to the process, which has ended.
func (p *process) close() error {
	p.release()
	return p.log.Close()
}
