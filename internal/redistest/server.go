package redistest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/flightlock/flightlock/internal/procs"
)

// Environment variables that say which redis-server to use.
const (
	// EnvRequire set to 1 makes a missing redis-server a failure instead of a skip, so
	// that a build machine cannot pass by testing nothing.
	EnvRequire = "FLIGHTLOCK_REQUIRE_REDIS"

	// EnvBinary names the server binary, "redis-server" if unset. A Valkey server works.
	EnvBinary = "FLIGHTLOCK_REDIS_SERVER"

	// EnvKind names one of [Kinds], which each client of a server sees instead of the server itself:
	// "declared-keys" or "no-script", for example. Tests that count connections or commands, or that load
	// scripts, fail then.
	EnvKind = "FLIGHTLOCK_KIND"
)

// errPortTaken is the one failure to start that is worth another try, on another port.
var errPortTaken = errors.New("redistest: somebody else took the port")

// Require skips the test, loudly, where there is no redis-server to run; with
// FLIGHTLOCK_REQUIRE_REDIS=1 in the environment it fails the test instead.
func Require(tb testing.TB) {
	tb.Helper()
	_, err := exec.LookPath(binary())
	switch {
	case err == nil:
	case os.Getenv(EnvRequire) == "1":
		tb.Fatalf("%s=1 but there is no redis-server: %v", EnvRequire, err)
	default:
		tb.Skipf("NOT TESTED against a real Redis: %v (install redis-server; set %s=1 to make this a failure)", err,
			EnvRequire)
	}
}

func binary() string {
	if name := os.Getenv(EnvBinary); name != "" {
		return name
	}
	return "redis-server"
}

// A Server is a redis-server on a port of 127.0.0.1 that stays the same for the Server's
// whole life, over any number of processes: Kill ends one, Restart begins another.
//
// It writes nothing to disk (--save "" --appendonly no) unless its args say otherwise; its
// working directory lives as long as the Server, so an append-only file survives a Restart.
type Server struct {
	conf string   // a configuration file, or ""
	args []string // the caller's, after ours; Redis lets the last mention of an option win
	dir  string
	port *port
	fail func(error) // reports the error of a method that a test may call without looking at its result

	mu     sync.Mutex     // guards proc and closed, and keeps Kill, Restart, Stop, Cont and Close apart
	proc   *procs.Process // the latest run, alive or not
	closed bool
}

// Launch starts a redis-server with extra command line arguments such as "--maxmemory",
// "64mb", and returns when it answers. The caller must Close it. Tests use [StartServer].
func Launch(args ...string) (*Server, error) { return launch("", args) }

// launch is Launch with a configuration file, unless conf is empty.
func launch(conf string, args []string) (*Server, error) {
	var err error
	for range 5 {
		var s *Server
		if s, err = launchOnce(conf, args); err == nil {
			return s, nil
		}
		if !errors.Is(err, errPortTaken) {
			break
		}
	}
	return nil, err
}

func launchOnce(conf string, args []string) (*Server, error) {
	p, err := reservePort()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "redistest-")
	if err != nil {
		p.release()
		return nil, err
	}
	s := &Server{conf: conf, args: args, dir: dir, port: p, fail: func(error) {}}
	if err := s.startLocked(); err != nil { // nobody else has s yet
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// StartServer starts a redis-server with extra command line arguments and ends it in the
// test's cleanup. It calls [Require]. When the test has failed, the server's log is shown.
// An error of Kill, Restart, Stop or Cont also fails the test.
func StartServer(tb testing.TB, args ...string) *Server {
	tb.Helper()
	return startServer(tb, "", args...)
}

func startServer(tb testing.TB, conf string, args ...string) *Server {
	tb.Helper()
	Require(tb)
	s, err := launch(conf, args)
	if err != nil {
		tb.Fatal(err)
	}
	s.attach(tb)
	return s
}

// attach ties the server's life, its errors and its log to the test.
func (s *Server) attach(tb testing.TB) {
	s.fail = func(err error) { tb.Error(err) }
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("log of redis-server %s:\n%s", s.Addr(), withoutStart(s.Log()))
		}
		if err := s.Close(); err != nil {
			tb.Error(err)
		}
	})
}

// startAgainLocked is startLocked on a port that is to stay the same: a child of the process before, one that
// saves its data for example, may have the port's socket for a moment.
func (s *Server) startAgainLocked() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), portPatience)
	defer cancel()
	poll(ctx, func() bool {
		err = s.startLocked()
		return !errors.Is(err, errPortTaken)
	})
	return err
}

// startLocked begins a new process and waits until it answers. Caller holds s.mu.
func (s *Server) startLocked() error {
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close() // the process has its own copy
	before := len(s.Log())
	cmd := exec.Command(binary(), s.commandLine()...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.dir, log, log
	proc, err := procs.Start(cmd)
	if err != nil {
		return err
	}
	s.proc = proc
	if err := s.awaitAnswer(proc, before); err != nil {
		proc.Kill()
		return err
	}
	return nil
}

func (s *Server) commandLine() []string {
	ours := []string{
		"--port", strconv.Itoa(s.port.number), "--bind", "127.0.0.1", "--protected-mode", "no",
		"--save", "", "--appendonly", "no", "--dir", s.dir, "--daemonize", "no", "--loglevel", "notice",
	}
	if s.conf != "" { // it must be the first
		ours = append([]string{s.conf}, ours...)
	}
	return append(ours, s.args...)
}

// awaitAnswer waits until this very process answers: on the port, somebody else might. Its log begins behind
// so many bytes.
func (s *Server) awaitAnswer(proc *procs.Process, before int) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	up := false
	poll(ctx, func() bool {
		if !proc.Alive() {
			return true
		}
		pid, err := s.answeringPid(ctx)
		up = err == nil && pid == proc.PID()
		return up
	})
	switch log := s.Log()[before:]; {
	case up:
		return nil
	case strings.Contains(log, "Address already in use"):
		return fmt.Errorf("%w %d", errPortTaken, s.port.number)
	case !proc.Alive():
		return fmt.Errorf("redistest: redis-server ended at once; its log:\n%s", log)
	default:
		return fmt.Errorf("redistest: redis-server does not answer after %v; its log:\n%s", startTimeout, log)
	}
}

// Addr is the server's "127.0.0.1:port".
func (s *Server) Addr() string { return s.port.addr() }

// Port is the server's TCP port.
func (s *Server) Port() int { return s.port.number }

// Pid is the process id of the latest process.
func (s *Server) Pid() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc.PID()
}

// Log returns what the server has logged, over all its processes.
func (s *Server) Log() string {
	log, err := os.ReadFile(s.logFile())
	if err != nil {
		return err.Error()
	}
	return string(log)
}

// startLines are in the lines that a server logs whenever it starts, Redis and Valkey alike.
var startLines = []string{
	" is starting oO0OoO0OoO0Oo", ", just started", "Configuration loaded", "monotonic clock: ", "Running mode=",
	"Server initialized", "WARNING Memory overcommit must be enabled!", "WARNING overcommit_memory is set to 0!",
	"WARNING: The TCP backlog setting", "WARNING Your kernel has a bug",
	"WARNING Your system is configured to use",
}

// withoutStart is a log without what a server says whenever it starts, but for one line for each start after
// the first.
func withoutStart(log string) string {
	const ready = "Ready to accept connections"
	var b strings.Builder
	starts := 0
	for line := range strings.Lines(log) {
		if strings.Contains(line, ready) {
			starts++
		}
		if starts == 1 && strings.Contains(line, ready) ||
			slices.ContainsFunc(startLines, func(s string) bool { return strings.Contains(line, s) }) {
			continue
		}
		b.WriteString(line)
	}
	if b.Len() == 0 {
		return "nothing since its start"
	}
	return b.String()
}

func (s *Server) logFile() string { return filepath.Join(s.dir, "redis.log") }

// Kill ends the process with SIGKILL, also while it is stopped, and waits until it is
// gone. What its clients get is a reset or an end of file, and refused connects from then on.
func (s *Server) Kill() error {
	return s.change("kill", func() error {
		s.proc.Kill()
		return nil
	})
}

// Restart kills the process if it still runs and starts another one on the same port with
// the same arguments. It returns when that one answers. Its memory is empty, keys and
// scripts alike, unless the arguments say otherwise.
func (s *Server) Restart() error {
	return s.change("restart", func() error {
		s.proc.Kill()
		return s.startAgainLocked()
	})
}

// Stop freezes the process with SIGSTOP and returns when it has stopped. The kernel continues
// accepting connections and requests in its name; nothing is answered until Cont, and then what
// came in meanwhile is executed, also for clients that have given up.
func (s *Server) Stop() error {
	return s.change("stop", func() error { return s.proc.Stop() })
}

// Cont lets a stopped process continue (SIGCONT).
func (s *Server) Cont() error {
	return s.change("continue", func() error { return s.proc.Cont() })
}

// change runs one change of the process, unless the server is closed.
func (s *Server) change(verb string, do func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := os.ErrClosed
	if !s.closed {
		err = do()
	}
	if err != nil {
		err = fmt.Errorf("redistest: %s redis-server %s: %w", verb, s.Addr(), err)
		s.fail(err)
	}
	return err
}

// Close kills the process, waits until it is gone, and removes the server's directory.
// Calls after the first do nothing.
func (s *Server) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	if s.proc != nil {
		s.proc.Kill()
	}
	s.port.release()
	return os.RemoveAll(s.dir)
}
