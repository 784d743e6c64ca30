//go:build unix

package redistest

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// gone reports whether no process has that id.
func gone(pid int) bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }

// A missing redis-server skips the test, or fails it where that was asked for.
func TestRequireSkipsOrFailsWithoutABinary(t *testing.T) {
	t.Setenv(EnvBinary, "no-such-redis-server")
	t.Setenv(EnvRequire, "")
	spy := &spyTB{TB: t}
	if spy.run(Require); !strings.Contains(spy.skipped, "NOT TESTED") || spy.failed != "" {
		t.Errorf("skipped %q, failed %q", spy.skipped, spy.failed)
	}
	t.Setenv(EnvRequire, "1")
	spy = &spyTB{TB: t}
	if spy.run(Require); spy.failed == "" || spy.skipped != "" {
		t.Errorf("skipped %q, failed %q", spy.skipped, spy.failed)
	}
}

// Close leaves no process and no directory behind.
func TestClosedServerLeavesNothing(t *testing.T) {
	Require(t)
	s, err := Launch()
	if err != nil {
		t.Fatal(err)
	}
	pid := s.Pid()
	if got := s.Do(t, "SET", "b", "1"); got != "OK" {
		t.Errorf("SET: %v", got)
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	if !gone(pid) {
		t.Error("the process lives on")
	}
	if _, err := os.Stat(s.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory: %v", err)
	}
	if err := s.Restart(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Restart after Close: %v", err)
	}
}

// The admin methods see what clients did.
func TestServerReportsKeysAndCalls(t *testing.T) {
	s := StartServer(t)
	c := s.Client(t)
	ctx := t.Context()
	for _, k := range []string{"b", "a"} {
		if err := c.Set(ctx, k, 1, 0).Err(); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.ScriptLoad(ctx, "return 1").Err(); err != nil {
		t.Fatal(err)
	}
	if got := s.Keys(t); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("Keys: %v", got)
	}
	if got := s.Do(t, "GET", "nothing"); got != nil {
		t.Errorf("a null reply: %v", got)
	}
	calls := s.CommandCalls(t)
	if calls["set"] != 2 || calls["script|load"] != 1 {
		t.Errorf("CommandCalls: %v", calls)
	}
}

// A restarted server has the same address, another process and an empty memory.
func TestRestartForgetsKeysAndScripts(t *testing.T) {
	s := StartServer(t)
	addr, pid := s.Addr(), s.Pid()
	s.Do(t, "SET", "k", "v")
	sha := s.Do(t, "SCRIPT", "LOAD", "return 1")
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	if s.Addr() != addr || s.Pid() == pid || !gone(pid) {
		t.Errorf("was %s pid %d, is %s pid %d", addr, pid, s.Addr(), s.Pid())
	}
	if got := s.Keys(t); len(got) != 0 {
		t.Errorf("Keys: %v", got)
	}
	if got := s.Do(t, "SCRIPT", "EXISTS", sha).([]any); got[0] != int64(0) {
		t.Errorf("SCRIPT EXISTS: %v", got)
	}
}

// The caller's args win over the defaults, and survive a restart.
func TestRestartKeepsAnAppendOnlyFile(t *testing.T) {
	s := StartServer(t, "--appendonly", "yes", "--appendfsync", "always", "--requirepass", "secret")
	s.Do(t, "SET", "k", "v")
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Client(t).Get(t.Context(), "k").Result(); got != "v" {
		t.Errorf("GET: %q, %v", got, err)
	}
}

// A killed server refuses connects until it is restarted.
func TestKilledServerRefuses(t *testing.T) {
	s := StartServer(t)
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := net.Dial("tcp", s.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial: %v", err)
	}
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	s.WaitUp(t)
}

// A stopped server accepts requests and answers none. Once it continues it executes them, also
// those whose connection was closed meanwhile.
func TestStoppedServerExecutesLate(t *testing.T) {
	s := StartServer(t)
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	dead := dialRaw(t, s.Addr())
	if _, err := io.WriteString(dead, "SET late 1\r\n"); err != nil {
		t.Fatal(err)
	}
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	impatient := s.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	if err := impatient.Ping(ctx).Err(); !errors.Is(err, context.DeadlineExceeded) && !os.IsTimeout(err) {
		t.Errorf("PING of a stopped server: %v", err)
	}
	if err := s.Cont(); err != nil {
		t.Fatal(err)
	}
	s.WaitUp(t)
	Eventually(t, 10*time.Second, "the late SET is executed", func() bool {
		return slices.Contains(s.Keys(t), "late")
	})
}

// Close and Kill end a stopped server, too.
func TestStoppedServerCanBeKilled(t *testing.T) {
	s := StartServer(t)
	pid := s.Pid()
	if err := errors.Join(s.Stop(), s.Kill()); err != nil {
		t.Fatal(err)
	}
	if !gone(pid) {
		t.Error("the process lives on")
	}
}

// The error has redis-server's own message about its arguments.
func TestLaunchShowsWhyTheServerDidNotStart(t *testing.T) {
	Require(t)
	s, err := Launch("--no-such-option", "1")
	if err == nil {
		_ = s.Close()
		t.Fatal("no error")
	}
	if !strings.Contains(err.Error(), "no-such-option") {
		t.Error(err)
	}
}

// Servers that start at the same time get ports of their own, and a port that another process took
// in the last moment means another try.
func TestServersDoNotFightForPorts(t *testing.T) {
	Require(t)
	var mu sync.Mutex
	ports := map[int]bool{}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			s, err := Launch()
			if err != nil {
				t.Error(err)
				return
			}
			defer s.Close()
			mu.Lock()
			defer mu.Unlock()
			if ports[s.Port()] {
				t.Errorf("port %d twice", s.Port())
			}
			ports[s.Port()] = true
		})
	}
	wg.Wait()
}

// The failure after which Launch tries another port is recognized.
func TestStolenPortIsRecognised(t *testing.T) {
	s := StartServer(t)
	thief := &Server{dir: t.TempDir(), port: s.port, fail: func(error) {}}
	if err := thief.startLocked(); !errors.Is(err, errPortTaken) {
		t.Error(err)
	}
}

// A server that starts from an old append-only file has lost the later writes.
func TestRestartFromAnOldAppendOnlyFile(t *testing.T) {
	s := StartServer(t, "--appendonly", "yes", "--appendfsync", "everysec")
	s.Do(t, "SET", "before", "v")
	old, err := s.SaveAppendOnly()
	if err != nil {
		t.Fatal(err)
	}
	s.Do(t, "SET", "after", "v")
	if err := errors.Join(s.awaitAppendOnly(), s.Restart()); err != nil {
		t.Fatal(err)
	}
	if got := s.Keys(t); !slices.Equal(got, []string{"after", "before"}) {
		t.Fatalf("after a kill: %v", got)
	}
	if err := s.RestartFrom(old); err != nil {
		t.Fatal(err)
	}
	if got := s.Keys(t); !slices.Equal(got, []string{"before"}) {
		t.Errorf("after a restart from the old file: %v", got)
	}
}

// A process that is being started has all sockets of its parent for a moment, also those that the
// parent has closed. That keeps no proxy from listening, or from being known as one that refuses
// connections.
func TestAProxyListensWhileProcessesStart(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				_ = exec.Command("true").Run()
			}
		})
	}
	for range 200 {
		p, err := NewProxy("127.0.0.1:1")
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Refuse(true); err != nil {
			t.Error(err)
		}
		if c, err := net.Dial("tcp", p.Addr()); err == nil {
			t.Error("a connection to a closed port")
			_ = c.Close()
		}
		if err := p.Refuse(false); err != nil {
			t.Error(err)
		}
		_ = p.Close()
	}
}

// A restarted server waits for its port, which another process may have for a moment.
func TestRestartWaitsForItsPort(t *testing.T) {
	s := StartServer(t)
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	l, err := s.port.listen()
	if err != nil {
		t.Fatal(err)
	}
	restarted := make(chan error)
	go func() { restarted <- s.Restart() }()
	Eventually(t, startTimeout, "it has found the port in use", func() bool {
		return strings.Contains(s.Log(), "Address already in use")
	})
	_ = l.Close()
	if err := <-restarted; err != nil {
		t.Error(err)
	}
}

// The part of a failed test's server log that is shown has the relevant lines, and not what every
// server logs.
func TestALogIsShownWithoutTheStart(t *testing.T) {
	s := StartServer(t, "--dbfilename", "dump.rdb")
	if got := withoutStart(s.Log()); strings.Contains(got, "just started") ||
		strings.Contains(got, "Ready to accept") {
		t.Errorf("after the start:\n%s", got)
	}
	s.Do(t, "SAVE")
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	got := withoutStart(s.Log())
	if !strings.Contains(got, "DB saved on disk") || strings.Count(got, "Ready to accept connections") != 1 ||
		strings.Contains(got, "just started") {
		t.Errorf("after a restart:\n%s", got)
	}
}
