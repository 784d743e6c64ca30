//go:build unix

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
)

// The exit code is CMD's own, as a shell has it, or says why there is none; what was wrong is said on stderr.
func TestExitCodes(t *testing.T) {
	redis := nodes(t)
	for _, c := range []struct {
		args   []string // of run, behind -redis
		code   int
		stderr string
	}{
		{[]string{"-key", "codes", "--", "true"}, 0, ""},
		{[]string{"-key", "codes", "sh", "-c", "exit 42"}, 42, ""},
		{[]string{"-key", "codes", "--", "sh", "-c", "kill -TERM $$"}, 143, ""},
		{[]string{"-key", "codes", "--", "no-such-command"}, 127, "not found"},
		{[]string{"-key", "codes", "--", "/etc/passwd"}, 126, "permission denied"},
		{[]string{"-key", "codes"}, 64, "CMD is missing"},
		{[]string{"--", "true"}, 64, "-key"},
		{[]string{"-key", strings.Repeat("k", 5000), "--", "true"}, 64, "4096 is the limit"},
		{[]string{"-key", "codes", "-ttl", "999ms", "--", "true"}, 64,
			"-ttl 999ms: it must be from 1s to -max-ttl, 1m0s"},
		{[]string{"-key", "codes", "-ttl", "61s", "--", "true"}, 64, "-ttl 1m1s"},
		{[]string{"-key", "codes", "-wait", "-1s", "--", "true"}, 64, "-wait -1s"},
		{[]string{"-key", "codes", "-try", "-wait", "1s", "--", "true"}, 64, "-try and -wait"},
		{[]string{"-key", "codes", "-wat", "--", "true"}, 64, "-wat"},
		{[]string{"-demo", "-key", "codes", "--", "true"}, 64, "-demo"},
	} {
		t.Run(fmt.Sprintf("%.60q", c.args), func(t *testing.T) {
			t.Parallel()
			got := outcome(t, append([]string{"run", "-redis", redis}, c.args...)...)
			if got.code != c.code || c.stderr == "" && got.stderr != "" || !strings.Contains(got.stderr, c.stderr) {
				t.Errorf("exit code %d, want %d; stderr %q, want %q", got.code, c.code, got.stderr, c.stderr)
			}
		})
	}
	for _, c := range []struct {
		args   []string
		code   int
		stdout string
	}{
		{nil, 64, ""}, {[]string{"-h"}, 0, "run CMD while"}, {[]string{"fly"}, 64, ""},
		{[]string{"run", "-h"}, 0, ""},
		{[]string{"run", "-key", "k", "--", "true"}, 64, ""}, // no nodes
		{[]string{"run", "-demo", "-key", "k", "--", "echo", "demo"}, 0, "demo\n"},
		{[]string{"run", "-redis", redistest.RefusedAddr(t), "-try", "-key", "k", "--", "true"}, 69, ""},
		{[]string{"run", "-redis", redistest.RefusedAddr(t), "-wait", "200ms", "-key", "k", "--", "true"}, 69, ""},
		{[]string{"run", "-redis", "ftp://x", "-key", "k", "--", "true"}, 64, ""},
	} {
		if got := outcome(t, c.args...); got.code != c.code || !strings.Contains(got.stdout, c.stdout) {
			t.Errorf("%q: exit code %d, want %d; stdout %q, stderr %q", c.args, got.code, c.code, got.stdout,
				got.stderr)
		}
	}
}

// untilRemoved is the end of a script that says in a file, its $0, that it runs, and runs until somebody
// removes that.
const untilRemoved = `echo $$ >"$0"; while [ -e "$0" ]; do sleep 0.05; done`

// waiting starts run with a CMD that has the lock, and runs until its file is removed. Its script begins with
// first.
func waiting(t *testing.T, key, first string, flags ...string) (r *running, file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "pid")
	r = start(t, append(append([]string{"run", "-redis", nodes(t), "-key", key}, flags...), "--", "sh", "-c",
		first+"\n"+untilRemoved, file)...)
	pidIn(t, file)
	return r, file
}

// try is run with -try and the command true. Nodes have long to answer: the machine may be busy.
func try(t *testing.T, key string, flags ...string) result {
	t.Helper()
	return outcome(t, append(append([]string{"run", "-redis", nodes(t), "-ttl", "1m", "-try", "-key", key},
		flags...), "--", "true")...)
}

// waits waits until somebody waits for the lock on key.
func waits(t *testing.T, key string) (s state) {
	t.Helper()
	redistest.Eventually(t, time.Minute, "somebody waits for "+key, func() bool {
		s = state{}
		got := outcome(t, "who", "-redis", nodes(t), "-json", key)
		testkit.Must(t, json.Unmarshal([]byte(got.stdout), &s))
		return len(s.Waiting) > 0
	})
	return s
}

// -try and -wait end with 75 while another has the lock, and ls shows who that is. The one that waits is
// given the lock, with a larger token.
func TestOneAtATime(t *testing.T) {
	t.Parallel()
	holder, file := waiting(t, "one", `echo $FLIGHTLOCK_FENCE`, "-ttl", "1m")
	next := start(t, "run", "-redis", nodes(t), "-key", "one", "--", "sh", "-c", "echo $FLIGHTLOCK_FENCE")
	owner := fmt.Sprintf(":%d#", holder.PID())
	if got := try(t, "one"); got.code != exitHeld || !strings.Contains(got.stderr, owner) {
		t.Errorf("-try: exit code %d, stderr %q", got.code, got.stderr)
	}
	for wait := 100 * time.Millisecond; ; wait *= 2 { // until it suffices for the nodes to answer
		got := outcome(t, "run", "-redis", nodes(t), "-wait", wait.String(), "-key", "one", "--", "true")
		if got.code == exitHeld && strings.Contains(got.stderr, owner) {
			break
		}
		if got.code != exitUnavailable || wait > time.Minute {
			t.Fatalf("-wait %v: exit code %d, stderr %q", wait, got.code, got.stderr)
		}
	}
	testkit.Must(t, os.Remove(file))
	a, b := holder.wait(t), next.wait(t)
	before, err := strconv.ParseInt(strings.TrimSpace(a.stdout), 10, 64)
	testkit.Must(t, err)
	after, err := strconv.ParseInt(strings.TrimSpace(b.stdout), 10, 64)
	testkit.Must(t, err)
	if a.code != exitOK || b.code != exitOK || after <= before {
		t.Errorf("exit codes %d and %d, tokens %d and %d", a.code, b.code, before, after)
	}
}

// A signal goes to CMD, which decides: the lock is held until CMD has ended. One that waits for the lock
// ends.
func TestSignals(t *testing.T) {
	t.Parallel()
	holder, _ := waiting(t, "signals", `trap "echo term; exit 7" TERM`, "-ttl", "1m")
	waiter := start(t, "run", "-redis", nodes(t), "-key", "signals", "--", "true")
	waits(t, "signals")
	testkit.Must(t, waiter.Signal(syscall.SIGINT))
	if got := waiter.wait(t); got.code != exitSignal+int(syscall.SIGINT) {
		t.Errorf("the waiter: exit code %d, stderr %q", got.code, got.stderr)
	}
	testkit.Must(t, holder.Signal(syscall.SIGTERM))
	if got := holder.wait(t); got.code != 7 || got.stdout != "term\n" {
		t.Errorf("the holder: exit code %d, stdout %q, stderr %q", got.code, got.stdout, got.stderr)
	}
	if got := try(t, "signals"); got.code != exitOK {
		t.Errorf("afterwards: exit code %d, stderr %q", got.code, got.stderr)
	}
}

// A signal that comes while CMD is being started goes to it, and does not end the refreshing of its lock. One
// that came before keeps it from being started. After CMD nothing is waited for, unless it was HUP, which
// need not end CMD.
func TestASignalWhileCMDIsStarted(t *testing.T) {
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP} {
		j, signals := newJob("run"), make(chan os.Signal)
		defer close(signals)
		go j.receive(signals)
		cmd := exec.Command("sleep", "600")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		g, err := j.start(func() (*group, error) {
			testkit.Must(t, cmd.Start())
			signals <- s
			time.Sleep(10 * time.Millisecond) // for an error to show
			return &group{number: cmd.Process.Pid}, nil
		})
		defer func() { _ = cmd.Process.Kill() }()
		if err != nil || g == nil || j.ctx.Err() != nil {
			t.Fatalf("%v: %v; the refreshing: %v", s, err, j.ctx.Err())
		}
		var exit *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != s {
			t.Errorf("%v: CMD has ended with %v", s, err)
		}
		if j.ended(); (j.ctx.Err() != nil) != (s == syscall.SIGTERM) {
			t.Errorf("%v: after CMD: %v, %d", s, j.ctx.Err(), j.stoppedBy())
		}
		signals <- s
		<-j.ctx.Done()
		if _, err := j.start(nil); err != exited(exitSignal+s) {
			t.Errorf("%v before the start: %v", s, err)
		}
	}
}

// A lock that somebody deletes is lost: CMD is killed, and the exit code says so; also if that is noticed
// only by the release.
func TestAKeyThatIsDeleted(t *testing.T) {
	t.Parallel()
	deleted := func(key string) {
		for _, s := range servers {
			s.Get(t).Do(t, "DEL", "lock:"+key)
		}
	}
	long, _ := waiting(t, "deleted", `trap "" TERM`, "-ttl", "3s")
	deleted("deleted")
	short, file := waiting(t, "deleted-unseen", "", "-ttl", "1m")
	deleted("deleted-unseen")
	testkit.Must(t, os.Remove(file))
	for name, r := range map[string]*running{"a refresh": long, "the release": short} {
		if got := r.wait(t); got.code != exitLost || !strings.Contains(got.stderr, "lost") {
			t.Errorf("noticed by %s: exit code %d, stderr %q", name, got.code, got.stderr)
		}
	}
}

// ls shows each key with its owner, by pattern; as JSON for machines. Its pattern is below the prefix, which
// is none.
func TestLs(t *testing.T) {
	t.Parallel()
	holder, _ := waiting(t, "ls*:a", `trap "exit 0" TERM`, "-prefix", "[p]:")
	got := outcome(t, "ls", "-redis", nodes(t), "-prefix", "[p]:", "-json", `ls\**`)
	var row locked
	if err := json.Unmarshal([]byte(got.stdout), &row); err != nil {
		t.Fatalf("%v: %q, stderr %q", err, got.stdout, got.stderr)
	}
	if owner := fmt.Sprintf(":%d#", holder.PID()); row.Key != "ls*:a" || !strings.Contains(row.Owner, owner) ||
		!row.Held || row.Nodes != 3 || row.Votes < 2 || row.Left <= 0 || row.Left > 10_000 {
		t.Errorf("%+v", row)
	}
	for _, args := range [][]string{{"-prefix", "[p]:", "other"}, {"-prefix", "p:"}} {
		got := outcome(t, append([]string{"ls", "-redis", nodes(t)}, args...)...)
		if rows := strings.Count(got.stdout, "\n"); got.code != exitOK || rows != 1 {
			t.Errorf("%q: exit code %d, %q", args, got.code, got.stdout)
		}
	}
	testkit.Must(t, holder.Signal(syscall.SIGTERM))
	if got := holder.wait(t); got.code != exitOK {
		t.Errorf("exit code %d, stderr %q", got.code, got.stderr)
	}
	if got := outcome(t, "ls", "-redis", redistest.RefusedAddr(t)); got.code != exitUnavailable {
		t.Errorf("no node: exit code %d, stderr %q", got.code, got.stderr)
	}
}

// A key that SCAN returns twice, as it may while a table of the server is moved, is listed once for that
// node. Whether it is held is not known if the nodes that cannot be read may make a majority.
func TestLsOfAKeyThatIsScannedTwice(t *testing.T) {
	t.Parallel()
	var addrs []string
	for _, s := range servers {
		e := redistest.StartKind(t, redistest.Plain, s.Get(t).Addr())
		e.SetAnswers(func(cmd []string) string {
			if !strings.EqualFold(cmd[0], "SCAN") {
				return ""
			}
			return "*2\r\n$1\r\n0\r\n*2\r\n$10\r\nlock:twice\r\n$10\r\nlock:twice\r\n"
		})
		addrs = append(addrs, e.Addr())
	}
	servers[0].Get(t).Do(t, "SET", "lock:twice", "somebody", "PX", "600000")
	got := outcome(t, "ls", "-redis", strings.Join(addrs, ","), "-json")
	var row locked
	if err := json.Unmarshal([]byte(got.stdout), &row); err != nil || row.Votes != 1 || row.Held || !row.Known {
		t.Errorf("%v: %q, stderr %q", err, got.stdout, got.stderr)
	}
	addrs[1] = redistest.RefusedAddr(t) // it may have the key for the same owner
	if got := outcome(t, "ls", "-redis", strings.Join(addrs, ",")); !strings.Contains(got.stdout, "1 of 3") ||
		!strings.Contains(got.stdout, "not known") || got.code != exitOK {
		t.Errorf("a node that cannot be read: exit code %d, %q", got.code, got.stdout)
	}
}

// check is Client.Check, by a Client with the NodeTimeout of those that lock: -node-timeout, or the default.
func TestCheck(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args   []string
		code   int
		stderr string
	}{
		{[]string{"-h"}, exitOK, "use these locks (default 50ms)"},
		{[]string{"-redis", nodes(t), "-node-timeout", "2m"}, exitUsage, "NodeTimeout is 2m0s"},
	} {
		if got := outcome(t, append([]string{"check"}, c.args...)...); got.code != c.code ||
			!strings.Contains(got.stderr, c.stderr) {
			t.Errorf("%q: exit code %d, stderr %q", c.args, got.code, got.stderr)
		}
	}
	if got := outcome(t, "check", "-redis", nodes(t)); got.code != exitOK ||
		!strings.Contains(got.stdout, "0 fail") {
		t.Errorf("exit code %d, stdout %q, stderr %q", got.code, got.stdout, got.stderr)
	}
	got := outcome(t, "check", "-redis", redistest.RefusedAddr(t), "-json")
	var rep struct{ Status string }
	if err := json.Unmarshal([]byte(got.stdout), &rep); err != nil || got.code != exitFailed ||
		rep.Status != "fail" {
		t.Errorf("exit code %d, %v, %q", got.code, err, got.stdout)
	}
}

// Of two that are elected one runs CMD. When its CMD ends, the other one's begins; and begins again after a
// loss, also if the first one has left a daemon, and was sent a HUP before, which it survives.
func TestElect(t *testing.T) {
	t.Parallel()
	const script = `trap "exit 4" TERM; trap 'echo 1 >"$0.hup"' HUP; setsid sleep 20 &
		` + untilRemoved
	dir := t.TempDir()
	elect := func(i int) (*running, string) {
		file := filepath.Join(dir, strconv.Itoa(i))
		return start(t, "elect", "-redis", nodes(t), "-ttl", "3s", "elect", "--", "sh", "-c", script, file), file
	}
	first, file := elect(1)
	pidIn(t, file)
	second, file := elect(2)
	testkit.Must(t, first.Signal(syscall.SIGTERM))
	if got := first.wait(t); got.code != 4 {
		t.Errorf("the first: exit code %d, stderr %q", got.code, got.stderr)
	}
	was := pidIn(t, file)
	testkit.Must(t, second.Signal(syscall.SIGHUP))
	pidIn(t, file+".hup")
	for _, s := range servers {
		s.Get(t).Do(t, "DEL", "lock:elect")
	}
	redistest.Eventually(t, time.Minute, "CMD runs again", func() bool { return pidIn(t, file) != was })
	testkit.Must(t, second.Signal(syscall.SIGTERM))
	if got := second.wait(t); got.code != 4 {
		t.Errorf("the second: exit code %d, stderr %q", got.code, got.stderr)
	}
	for _, args := range [][]string{{}, {"name"}, {"name", "--"}} {
		if got := outcome(t, append([]string{"elect", "-demo"}, args...)...); got.code != exitUsage {
			t.Errorf("%q: exit code %d", args, got.code)
		}
	}
}

// With -n so many run at once, and those that disagree about the number do not. With -try each permit is
// tried.
func TestPermits(t *testing.T) {
	t.Parallel()
	first, _ := waiting(t, "permits", "", "-n", "2")
	second, _ := waiting(t, "permits", "", "-n", "2")
	for n, code := range map[string]int{"2": exitHeld, "3": exitUsage, "-1": exitUsage} {
		if got := try(t, "permits", "-n", n); got.code != code {
			t.Errorf("-n %s: exit code %d, want %d; stderr %q", n, got.code, code, got.stderr)
		}
	}
	for _, s := range servers { // one of 20 permits is free, and somebody waits
		s.Get(t).Do(t, "SET", "lock:tried:gate", "others")
		for i := range 19 {
			s.Get(t).Do(t, "SET", fmt.Sprint("lock:tried:", i), "others")
		}
	}
	if got := try(t, "tried", "-n", "20"); got.code != exitOK {
		t.Errorf("-try: exit code %d, stderr %q", got.code, got.stderr)
	}
	testkit.Must(t, first.Signal(syscall.SIGTERM))
	if got := first.wait(t); got.code != exitSignal+int(syscall.SIGTERM) {
		t.Errorf("exit code %d, stderr %q", got.code, got.stderr)
	}
	if got := outcome(t, "run", "-redis", nodes(t), "-n", "2", "-key", "permits", "--",
		"true"); got.code != exitOK {
		t.Errorf("afterwards: exit code %d, stderr %q", got.code, got.stderr)
	}
	testkit.Must(t, second.Signal(syscall.SIGTERM))
	if got := second.wait(t); got.code != exitSignal+int(syscall.SIGTERM) {
		t.Errorf("exit code %d, stderr %q", got.code, got.stderr)
	}
}
