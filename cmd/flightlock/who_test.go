//go:build unix

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
)

// who shows the holder of a key and who waits for it, watch shows it when that changes, and revoke ends the
// lock: the holder's CMD is killed, and the next one begins.
func TestWhoWatchAndRevoke(t *testing.T) {
	t.Parallel()
	holder, _ := waiting(t, "who", "", "-ttl", "5s")
	next := start(t, "run", "-redis", nodes(t), "-key", "who", "--", "true")
	watch := start(t, "watch", "who", "-redis", nodes(t), "-json", "-every", "10ms")
	by := func(r *running) string { return fmt.Sprintf(":%d#", r.PID()) }
	shows := func(text string) {
		t.Helper()
		redistest.Eventually(t, time.Minute, "watch shows "+text, func() bool {
			all, _ := os.ReadFile(watch.stdout)
			return strings.Contains(string(all), text)
		})
	}
	s := waits(t, "who")
	shows(by(holder))
	if !strings.Contains(s.Owner, by(holder)) || !strings.Contains(s.Waiting[0], by(next)) || s.Left <= 0 ||
		s.Fence <= 0 {
		t.Errorf("%+v", s)
	}
	for _, c := range []struct {
		args   []string
		code   int
		stderr string
	}{
		{[]string{"who"}, exitUsage, "owner"},
		{[]string{"-owner", "x"}, exitUsage, "KEY"},
		{[]string{"who", "-owner", "x", "y"}, exitUsage, `"y"`},
		{[]string{"who", "-owner", "nobody"}, exitFailed, "not held"},
		{[]string{"who", "-owner", "nobody", "-force"}, exitFailed, "not held"},
	} {
		got := outcome(t, append([]string{"revoke", "-redis", nodes(t)}, c.args...)...)
		if got.code != c.code || !strings.Contains(got.stderr, c.stderr) {
			t.Errorf("revoke %q: exit code %d, stderr %q", c.args, got.code, got.stderr)
		}
	}
	var got result
	late := false
	redistest.Eventually(t, time.Minute, "the holder answers, as it does from its first refresh on",
		func() bool {
			got = outcome(t, "revoke", "-redis", nodes(t), "who", "-owner", s.Owner)
			late = late || got.code == exitUnavailable
			return got.code != exitUnavailable
		})
	// it may answer an earlier request, too late for that
	if got.code != exitOK && (!late || got.code != exitFailed) {
		t.Errorf("revoke: exit code %d, stderr %q", got.code, got.stderr)
	}
	if a, b := holder.wait(t), next.wait(t); a.code != exitLost || b.code != exitOK {
		t.Errorf("the holder: exit code %d, %q; the next one: %d, %q", a.code, a.stderr, b.code, b.stderr)
	}
	shows(`"owner":"","known":true`)
	testkit.Must(t, watch.Signal(syscall.SIGINT))
	if got := watch.wait(t); got.code != exitOK {
		t.Errorf("watch: exit code %d, %q, %q", got.code, got.stdout, got.stderr)
	}
	if got := outcome(t, "who", "-redis", nodes(t), "who").stdout; !strings.HasPrefix(got,
		`"who": nobody has the lock`) {
		t.Errorf("%q", got)
	}
}

// Who has a lock is not known if the nodes that cannot be read may make a majority for somebody: who and
// watch say so, and end with 69. One of three makes none by itself.
func TestWhoIsNotKnown(t *testing.T) {
	t.Parallel()
	all := strings.Split(nodes(t), ",")
	for _, s := range servers[:2] {
		s.Get(t).Do(t, "SET", "lock:half", "somebody")
	}
	for _, c := range []struct {
		key   string
		read  int // nodes that can be read, from the last one on
		code  int
		shows string
	}{
		{"free", 3, exitOK, "nobody has"}, {"free", 2, exitOK, "nobody has"},
		{"free", 1, exitUnavailable, "not known"},
		{"free", 0, exitUnavailable, "not known"}, {"half", 3, exitOK, "somebody, for"},
		{"half", 2, exitUnavailable, "not known"},
	} {
		redis := slices.Clone(all)
		for i := range 3 - c.read {
			redis[i] = redistest.RefusedAddr(t)
		}
		got := outcome(t, "who", "-redis", strings.Join(redis, ","), c.key)
		// the machine is busy
		for tries := 0; tries < 20 && c.code == exitOK && got.code == exitUnavailable; tries++ {
			got = outcome(t, "who", "-redis", strings.Join(redis, ","), c.key)
		}
		if got.code != c.code || !strings.Contains(got.stdout, c.shows) {
			t.Errorf("%s, %d nodes: exit code %d, %q, %q; want %+v", c.key, c.read, got.code, got.stdout,
				got.stderr, c)
		}
	}
	watch := start(t, "watch", "-redis", redistest.RefusedAddr(t), "-json", "free")
	redistest.Eventually(t, time.Minute, "watch shows what it knows", func() bool {
		text, _ := os.ReadFile(watch.stdout)
		return strings.Contains(string(text), `"known":false`)
	})
	testkit.Must(t, watch.Signal(syscall.SIGINT))
	if got := watch.wait(t); got.code != exitUnavailable {
		t.Errorf("watch: exit code %d, %q, %q", got.code, got.stdout, got.stderr)
	}
}

// revoke -force frees the key of a holder that does not answer. That finds out when it goes on.
func TestRevokeForce(t *testing.T) {
	t.Parallel()
	holder, _ := waiting(t, "force", "", "-ttl", "15s")
	var s state
	testkit.Must(t, json.Unmarshal([]byte(outcome(t, "who", "-redis", nodes(t), "-json", "force").stdout), &s))
	testkit.Must(t, holder.Stop())
	if got := outcome(t, "revoke", "force", "-redis", nodes(t), "-owner", s.Owner); got.code != exitUnavailable {
		t.Errorf("without -force: exit code %d, %q", got.code, got.stderr)
	}
	if got := outcome(t, "revoke", "force", "-redis", nodes(t), "-owner", s.Owner,
		"-force"); got.code != exitOK {
		t.Errorf("exit code %d, %q", got.code, got.stderr)
	}
	if got := try(t, "force"); got.code != exitOK {
		t.Errorf("the next one: exit code %d, %q", got.code, got.stderr)
	}
	testkit.Must(t, holder.Cont())
	if got := holder.wait(t); got.code != exitLost {
		t.Errorf("the holder: exit code %d, %q", got.code, got.stderr)
	}
}
