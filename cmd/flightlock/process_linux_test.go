package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/procs"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
)

// dead waits until there is no process of that id. One that was not reaped is dead, too.
func dead(t *testing.T, what string, pid int) {
	t.Helper()
	redistest.Eventually(t, time.Minute, what+" is dead", func() bool {
		s := procs.State(pid)
		return s == 0 || s == 'Z'
	})
}

// kill -9 of the command takes the first process of CMD with it. What that has started lives on.
func TestKillOfTheCommand(t *testing.T) {
	t.Parallel()
	r, file := waiting(t, "kill", `sleep 600 & echo $! >"$0.2"`)
	first, second := pidIn(t, file), pidIn(t, file+".2")
	r.Kill()
	dead(t, "CMD's first process", first)
	if s := procs.State(second); s == 0 || s == 'Z' {
		t.Errorf("the other process is dead, too: docs/command.md says that it lives on")
	}
	testkit.Must(t, syscall.Kill(second, syscall.SIGKILL))
}

// What CMD's first process leaves behind is ended before the lock is released: by TERM, or else by KILL, a
// tenth of the ttl later. A process that has left the group is not.
func TestWhatIsLeftBehind(t *testing.T) {
	t.Parallel()
	left := func(ttl, starts string) (file string) {
		t.Helper()
		file = filepath.Join(t.TempDir(), "pid")
		got := outcome(t, "run", "-redis", nodes(t), "-key", "behind "+ttl, "-ttl", ttl, "--", "sh", "-c",
			starts+` while ! [ -s "$0" ]; do sleep 0.01; done; exit 5`, file)
		if got.code != 5 {
			t.Errorf("exit code %d, stderr %q", got.code, got.stderr)
		}
		return file
	}
	obeys := left("1m",
		`(trap 'echo term >"$0.term"; exit' TERM; echo $$ >"$0"; while :; do sleep 0.01; done) &`)
	if _, err := os.Stat(obeys + ".term"); err != nil {
		t.Errorf("there was no TERM: %v", err)
	}
	ignores := left("3s", `sh -c 'trap "" TERM; echo $$ >"$0"; exec sleep 600' "$0" &`)
	if s := procs.State(pidIn(t, ignores)); s != 0 {
		t.Errorf("a process that ignores TERM is left in state %c", s)
	}
	daemon := pidIn(t, left("5s", `setsid sh -c 'echo $$ >"$0"; exec sleep 600' "$0" &`))
	if s := procs.State(daemon); s == 0 || s == 'Z' {
		t.Error("the daemon is dead: docs/command.md says that it lives on")
	}
	testkit.Must(t, syscall.Kill(daemon, syscall.SIGKILL))
}

// A reader of its output that goes away does not end the command: CMD would outlive it.
func TestNobodyReadsWhatItSays(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "pid")
	cmd := commandOf(t, "run", "-json", "-redis", nodes(t), "-key", "pipe", "--", "sh", "-c",
		`echo $$ >"$0"; while [ -e "$0" ]; do sleep 0.01; done; exit 3`, file)
	r, w, err := os.Pipe()
	testkit.Must(t, err)
	cmd.Stderr, cmd.Stdout = w, w
	p, err := procs.Start(cmd)
	testkit.Must(t, err)
	t.Cleanup(p.Kill)
	_ = w.Close()
	pidIn(t, file)
	_ = r.Close()
	testkit.Must(t, os.Remove(file))
	if err := p.WaitOrKill(time.Minute); err == nil || err.Error() != "exit status 3" { // after a line about it
		t.Errorf("%v", err)
	}
}

// onTerminal starts a shell on a new terminal. keys are what is typed there, and out what it shows.
func onTerminal(t *testing.T, script string, args ...string) (
	shell *procs.Process, keys io.Writer, out *testkit.LogBuffer) {
	t.Helper()
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	testkit.Must(t, err)
	t.Cleanup(func() { _ = terminal.Close() })
	var unlock, number int32
	testkit.Must(t, control(terminal.Fd(), syscall.TIOCSPTLCK, &unlock))
	testkit.Must(t, control(terminal.Fd(), syscall.TIOCGPTN, &number))
	other, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	testkit.Must(t, err)
	cmd := commandOf(t)
	cmd.Args = append([]string{"sh", "-c", script, cmd.Path}, args...)
	cmd.Path, err = exec.LookPath("sh")
	testkit.Must(t, err)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = other, other, other
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	shell, err = procs.Start(cmd)
	testkit.Must(t, err)
	_ = other.Close()
	out = &testkit.LogBuffer{}
	done := make(chan struct{})
	go func() { // ends with the last process on the terminal
		defer close(done)
		_, _ = io.Copy(out, terminal)
	}()
	t.Cleanup(func() {
		shell.Kill()
		<-done
		if t.Failed() {
			t.Logf("the terminal: %q", out.String())
		}
	})
	return shell, terminal, out
}

// CMD reads from the terminal and gets its Ctrl-C; Ctrl-Z does not stop it. Afterwards the shell has the
// terminal. That is so too where another process of the shell's job has it at first, as in a pipe.
func TestTheTerminalIsPassedOn(t *testing.T) {
	t.Parallel()
	for name, behind := range map[string]string{"alone": "", "in a pipe": " | cat"} {
		t.Run(name, func(t *testing.T) {
			script := `{ "$0" run -redis "$1" -key "$2" -- sh -c 'echo ready; read a; echo "got $a"
				read b; echo "got $b"; read c; echo never'; echo "code $?"; }` + behind + `; read d; echo "back $d"`
			shell, keys, out := onTerminal(t, script, nodes(t), "terminal "+name)
			for _, step := range []struct{ shows, then string }{
				{"ready", "one\n"}, {"got one", "\x1a"}, {"got one", "two\n"}, {"got two", "\x03"},
				{"code 130", "three\n"}, {"back three", ""},
			} {
				redistest.Eventually(t, time.Minute, "the terminal shows "+step.shows, func() bool {
					return strings.Contains(out.String(), step.shows)
				})
				_, err := io.WriteString(keys, step.then)
				testkit.Must(t, err)
			}
			if err := shell.WaitOrKill(time.Minute); err != nil || strings.Contains(out.String(), "never") {
				t.Errorf("%v", err)
			}
		})
	}
}
