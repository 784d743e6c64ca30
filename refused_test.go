package flightlock_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A refusal is a state in which the first server of a trio refuses commands that boot.lua needs,
// but not all commands (SCRIPT LOAD, for one, is not a write), or in which its replies are cut off.
type refusal struct {
	name           string
	refuse, accept func(tr *trio)
}

// setting is a refusal by a setting of the server.
func setting(name, setting, refuse, accept string) refusal {
	set := func(value string) func(*trio) {
		return func(tr *trio) { tr.servers[0].Do(tr.t, "CONFIG", "SET", setting, value) }
	}
	return refusal{name, set(refuse), set(accept)}
}

// rights is a refusal by the user's rights.
func rights(name string, refuse ...any) refusal {
	set := func(rights ...any) func(*trio) {
		return func(tr *trio) { tr.servers[0].Do(tr.t, append([]any{"ACL", "SETUSER", "default"}, rights...)...) }
	}
	return refusal{name, set(refuse...), set("+@all", "allkeys")}
}

// cutAfter is a reset of the connection after so many bytes of replies.
func cutAfter(n int) refusal {
	return refusal{
		fmt.Sprintf("cut after %d bytes", n),
		func(tr *trio) { tr.proxy.CutReplies(n) },
		func(tr *trio) { tr.proxy.CutReplies(-1); tr.proxy.ResetAll() },
	}
}

var refusals = []refusal{
	setting("NOREPLICAS", "min-replicas-to-write", "1", "0"),
	setting("OOM", "maxmemory", "1", "0"),
	{
		"READONLY",
		func(tr *trio) { tr.servers[0].Do(tr.t, "REPLICAOF", "127.0.0.1", "1") },
		func(tr *trio) { tr.servers[0].Do(tr.t, "REPLICAOF", "NO", "ONE") },
	},
	{
		"MISCONF",
		failSnapshots,
		func(tr *trio) { tr.servers[0].Do(tr.t, "CONFIG", "SET", "stop-writes-on-bgsave-error", "no") },
	},
	rights("NOPERM for SET", "-set"),
	rights("NOPERM for GET", "-get"),
	rights("NOPERM for TIME", "-time"),
	rights("NOPERM for APPEND", "-append"), // it is not refused then, but sees less
	rights("NOPERM for OBJECT", "-object"),
	rights("NOPERM for the marker", "resetkeys", "~lock:*", "~flightlock:{???}:*"),
	rights("NOPERM for what is kept beside the marker",
		"resetkeys", "~lock:*", "~flightlock:{???}:*", "~flightlock:{boot}"),
	cutAfter(0), cutAfter(200), cutAfter(300), cutAfter(350), cutAfter(400), cutAfter(450), cutAfter(500), cutAfter(600),
}

// failSnapshots makes the server unable to save, so that it refuses writes.
func failSnapshots(tr *trio) {
	gone := filepath.Join(tr.t.TempDir(), "gone")
	must(tr.t, os.Mkdir(gone, 0o700))
	s := tr.servers[0]
	s.Do(tr.t, "CONFIG", "SET", "dir", gone, "stop-writes-on-bgsave-error", "yes", "save", "3600 1")
	must(tr.t, os.Remove(gone))
	s.Do(tr.t, "BGSAVE")
	redistest.Eventually(tr.t, 20*time.Second, "the snapshot has failed", func() bool {
		return infoHas(tr.t, s, "persistence", "rdb_last_bgsave_status:err")
	})
}

// infoHas reports whether a section of INFO has a line.
func infoHas(t *testing.T, s *redistest.Server, section, line string) bool {
	t.Helper()
	info, _ := s.Do(t, "INFO", section).(string)
	return slices.Contains(strings.Fields(info), line)
}

// A server that lost its data refuses commands when a client first meets it, or its replies are
// lost, and later everything works. Its votes do not count then either: a client must not have
// loaded scripts into it that make it vote in an epoch that boot.lua did not confirm.
func TestNoSecondGrantWhenBootIsRefusedFirst(t *testing.T) {
	t.Parallel()
	for _, a := range amnesias {
		switch {
		case a.name == "restarted empty", a.name == "flushed": // they have no marker, which every acquire detects
			continue
		case a.name != "stale append-only file" && inAHurry():
			continue
		}
		for _, r := range refusals {
			t.Run(a.name+"/"+r.name, func(t *testing.T) {
				t.Parallel()
				for range 1 + tries(t)/10 {
					f := newForgettable(t, a)
					f.tr.proxy.BlackHole(true)
					f.forget()
					r.refuse(f.tr)
					f.tr.proxy.BlackHole(false)
					f.tr.proxy.ResetAll()
					f.rivals = append(f.rivals, f.tr.client(flightlock.Options{}))
					for i, c := range f.rivals {
						redistest.Eventually(t, 20*time.Second, "the server has refused", func() bool {
							return f.try(c, fmt.Sprintf("rival %d, refused", i))
						})
					}
					r.accept(f.tr)
					f.neverVotes("accepted again")
				}
			})
		}
	}
}

// forgettable is a trio with a held lock that its third server does not have. If the first one
// loses it as well, the others are a majority.
type forgettable struct {
	t      *testing.T
	tr     *trio
	forget func()
	held   *flightlock.Lock
	rivals []*flightlock.Client
}

func newForgettable(t *testing.T, a amnesia) *forgettable {
	tr := newTrio(t, a.args...)
	holder := tr.client(flightlock.Options{})
	f := &forgettable{t: t, tr: tr}
	for range 2 {
		f.rivals = append(f.rivals, tr.client(flightlock.Options{}))
	}
	for _, c := range f.rivals {
		useOnAll(t, c, "k", tr.servers...)
	}
	f.forget = a.prepare(tr)
	f.held = tr.hold(holder, "k", time.Minute)
	t.Cleanup(func() { _ = f.held.Release(context.Background()) }) // it may be on too few nodes by now
	return f
}

// try tries to get the held lock. It reports whether the first server gave no vote.
func (f *forgettable) try(c *flightlock.Client, when string) (refused bool) {
	f.t.Helper()
	second, err := c.Lock(f.t.Context(), "k", time.Second, flightlock.LimitedRetry(5*time.Millisecond, 5))
	if lost := f.held.Err(); lost != nil {
		f.t.Fatalf("the lock was over, so the try says nothing: %v", lost)
	}
	if err == nil {
		f.t.Fatalf("%s: granted twice, with tokens %d and %d", when, f.held.Fence(), second.Fence())
	}
	var q *flightlock.QuorumError
	return errors.As(err, &q) && q.Nodes[0].Err != nil
}

// neverVotes has the rivals try, until each has seen that the server is in quarantine.
func (f *forgettable) neverVotes(when string) {
	f.t.Helper()
	for i, c := range f.rivals {
		f.try(c, fmt.Sprintf("rival %d, %s", i, when))
	}
	for i, c := range f.rivals {
		lockUntilQuarantined(f.t, c, fmt.Sprint("other", i), 1)
		f.try(c, fmt.Sprintf("rival %d, in quarantine", i))
	}
}

// A server ends, and another process comes back with old data, at each step by which a client
// verifies the server's epoch and loads the scripts that it votes by: when a command is about to be
// written, and when its reply has just arrived. What the earlier process replied is not loaded into
// the later one.
func TestNoSecondGrantWhenItRestartsDuringBoot(t *testing.T) {
	t.Parallel()
	for _, a := range amnesias {
		steps := 100
		switch {
		case !strings.HasPrefix(a.name, "stale"):
			continue
		case a.name != "stale append-only file" && inAHurry():
			continue
		case inAHurry():
			steps = 12 // by then the scripts are loaded
		}
		for step := 1; step <= steps; step++ {
			t.Run(fmt.Sprint(a.name, "/step ", step), func(t *testing.T) {
				f := newForgettable(t, a)
				nodes := f.tr.nodes()
				b := atStep{left: step, do: f.forget}
				nodes[0] = f.tr.servers[0].Client(t, func(o *redis.Options) {
					o.Addr, o.DialerRetries, o.Dialer = f.tr.proxy.Addr(), 1, b.dial
				})
				late := newClient(t, flightlock.Options{NodeTimeout: 2 * time.Second}, nodes...)
				f.tr.servers[0].Do(t, "SCRIPT", "FLUSH") // boot.lua is still to be loaded
				for range 3 {
					f.try(late, "during boot")
				}
				if !b.done() {
					if step <= 12 {
						t.Errorf("there were %d steps only", step-1)
					}
					steps = 0
					return
				}
				f.rivals = append(f.rivals, late)
				f.neverVotes("after boot")
			})
		}
	}
}

// atStep does something at the left-th step.
type atStep struct {
	do func()

	mu   sync.Mutex // guards left
	left int
}

func (b *atStep) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	return &steppedConn{Conn: c, b: b}, err
}

func (b *atStep) done() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.left <= 0
}

func (b *atStep) step() {
	b.mu.Lock()
	b.left--
	now := b.left == 0
	b.mu.Unlock()
	if now {
		b.do()
	}
}

// steppedConn counts commands that have to do with scripts, and their replies.
type steppedConn struct {
	net.Conn
	b       *atStep
	scripts atomic.Bool
}

func (c *steppedConn) Write(p []byte) (int, error) {
	text := bytes.ToLower(p)
	if bytes.Contains(text, []byte("evalsha")) || bytes.Contains(text, []byte("script")) {
		c.scripts.Store(true)
		c.b.step()
	}
	return c.Conn.Write(p)
}

func (c *steppedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.scripts.Load() {
		c.b.step()
	}
	return n, err
}

// SyscallConn lets go-redis see that the connection is dead before it uses it again.
func (c *steppedConn) SyscallConn() (syscall.RawConn, error) {
	return c.Conn.(*net.TCPConn).SyscallConn()
}
