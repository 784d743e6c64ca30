package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/procs"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"go.uber.org/goleak"
)

// asCommand makes this program the command.
const asCommand = "FLIGHTLOCK_TEST_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main() // it exits
	}
	redistest.SilenceRedis()
	// or children ignore it if this process does, as by nohup
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	code := m.Run()
	var err error
	for _, s := range servers {
		err = errors.Join(err, s.Close())
	}
	err = errors.Join(err, goleak.Find())
	if err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

var servers = []*redistest.Shared[*redistest.Server]{
	redistest.SharedServer(), redistest.SharedServer(), redistest.SharedServer()}

// nodes are the three servers that tests share.
func nodes(t *testing.T) string {
	t.Helper()
	var addrs []string
	for _, s := range servers {
		addrs = append(addrs, s.Get(t).Addr())
	}
	return strings.Join(addrs, ",")
}

// A result is how a run of the command ended.
type result struct {
	code           int
	stdout, stderr string
}

// outcome runs the command until it ends.
func outcome(t *testing.T, args ...string) result {
	t.Helper()
	return start(t, args...).wait(t)
}

// A running is the command, while it runs. Its output goes to files: a pipe would be open as long as a
// process is left.
type running struct {
	*procs.Process
	stdout, stderr string
}

func start(t *testing.T, args ...string) *running {
	t.Helper()
	dir := t.TempDir()
	r, cmd := &running{stdout: filepath.Join(dir, "stdout"), stderr: filepath.Join(dir, "stderr")},
		commandOf(t, args...)
	stdout, err := os.Create(r.stdout)
	testkit.Must(t, err)
	defer stdout.Close()
	stderr, err := os.Create(r.stderr)
	testkit.Must(t, err)
	defer stderr.Close()
	cmd.Stdout, cmd.Stderr = stdout, stderr
	if r.Process, err = procs.Start(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Kill)
	return r
}

func commandOf(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd, err := procs.Self(asCommand + "=1")
	testkit.Must(t, err)
	cmd.Args = append(cmd.Args, args...)
	return cmd
}

// wait returns when it has ended.
func (r *running) wait(t *testing.T) (res result) {
	t.Helper()
	err := r.WaitOrKill(2 * time.Minute)
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		res.code = exit.ExitCode()
	} else if err != nil {
		t.Error(err)
	}
	for file, text := range map[string]*string{r.stdout: &res.stdout, r.stderr: &res.stderr} {
		b, err := os.ReadFile(file)
		testkit.Must(t, err)
		*text = string(b)
	}
	return res
}

// pidIn waits until a process has written its id to a file.
func pidIn(t *testing.T, file string) (pid int) {
	t.Helper()
	redistest.Eventually(t, time.Minute, file+" has the id of a process", func() bool {
		pid = idIn(file)
		return pid != 0
	})
	return pid
}

// idIn is the id of a process in the file; 0: there is none.
func idIn(file string) (pid int) {
	text, _ := os.ReadFile(file)
	pid, _ = strconv.Atoi(strings.TrimSpace(string(text)))
	return pid
}
