package node

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"net"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// changes are what a node's Changed was called with, in order.
type changes struct {
	mu  sync.Mutex // guards all
	all []error
}

func (c *changes) add(_ string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = append(c.all, err)
}

// want waits for the recovery to be reported, and expects one report before it: of the suspension,
// with the reason.
func (c *changes) want(t *testing.T, why string) {
	t.Helper()
	get := func() []error {
		c.mu.Lock()
		defer c.mu.Unlock()
		return append([]error(nil), c.all...)
	}
	redistest.Eventually(t, patience, "it is back", func() bool {
		all := get()
		return len(all) > 0 && all[len(all)-1] == nil
	})
	if all := get(); len(all) != 2 || all[0] == nil || !strings.Contains(all[0].Error(), why) {
		t.Errorf("%v was reported, want %s and the recovery", all, why)
	}
}

// hammer sends so many requests from each of several goroutines, one after the other.
func hammer(t *testing.T, n *Node, goroutines, requests int) {
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for range requests {
				a := newAttempt(t, n, fmt.Sprint("hammer", g))
				select {
				case <-a.acquire().heard:
				case <-time.After(patience):
					t.Error("no answer")
					return
				}
				a.release()
			}
		})
	}
	wg.Wait()
}

// settle waits until the link to a server is so old that its end is no suspension.
func settle() { time.Sleep(2 * redialEvery) }

// eventuallySuspended waits for the node to be suspended, or not to be any more.
func eventuallySuspended(t *testing.T, n *Node, want bool) {
	t.Helper()
	redistest.Eventually(t, patience, fmt.Sprintf("suspended is %v", want),
		func() bool { return n.Suspended() == want })
}

// eventuallyGranted locks and releases until that works.
func eventuallyGranted(t *testing.T, n *Node, key string) {
	t.Helper()
	redistest.Eventually(t, patience, "the key is granted", func() bool {
		a := newAttempt(t, n, key)
		rep := <-a.acquire().heard
		<-a.release().heard
		return rep.Kind == Granted
	})
}

// since is when the epochs of a forgetful server began.
const since int64 = 1_700_000_000_000_000

// forgetful is a fake server that has another epoch whenever it has lost its data.
type forgetful struct {
	mu           sync.Mutex
	name         string
	run, version string
	promoted     string
	why          string // INFO is refused
	refuses      string // boot.lua
	restless     bool   // it loses its data whenever a vote is requested
	loaded       map[string]bool
	booted       bool     // boot.lua has replied since the process began
	proven       int      // scripts of this process that were loaded after such a reply
	unproven     []string // and the first lines of those that were loaded otherwise
}

// forgets has another process, with that epoch, in its place from now on, which knows no scripts. If the name
// is that of before, it is the same process.
func (f *forgetful) forgets(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.name != "" && f.name != name && f.run != "" {
		f.run += "+"
	}
	f.name, f.booted = name, false
	clear(f.loaded)
}

// flushed makes it have another epoch from now on, as FLUSHALL does.
func (f *forgetful) flushed(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.name = name
}

// epoch is what clients have to know of its epoch.
func (f *forgetful) epoch() lua.Epoch {
	f.mu.Lock()
	defer f.mu.Unlock()
	return lua.Epoch{Name: f.name, Run: f.run, Raw: true, Promoted: f.promoted, Since: since}
}

// refuse makes it answer boot.lua with that, or with its epoch again after "".
func (f *forgetful) refuse(answer string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refuses = answer
}

func (f *forgetful) answer(cmd []string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case cmd[0] == "SCRIPT" || cmd[0] == "script":
		sum := sha1.Sum([]byte(cmd[2]))
		sha := hex.EncodeToString(sum[:])
		f.loaded[sha] = true
		grants := strings.HasSuffix(cmd[2], lua.Acquire.Source) || strings.HasPrefix(cmd[2], "-- process ")
		of := []lua.Script{lua.Acquire.In(f.run), lua.Release.In(f.run), lua.Attach.In(f.run)}
		switch {
		case grants && f.booted && slices.ContainsFunc(of, func(s lua.Script) bool { return s.Source == cmd[2] }):
			f.proven++
		case grants:
			first, _, _ := strings.Cut(cmd[2], "\n")
			f.unproven = append(f.unproven, first)
		}
		return bulk(sha)
	case !f.loaded[cmd[1]]:
		return "-NOSCRIPT No matching script. Please use EVAL.\r\n"
	case cmd[1] == lua.Boot.SHA && f.refuses != "":
		return strings.Replace(f.refuses, "ANSWER", f.tells(), 1)
	case cmd[1] == lua.Boot.SHA:
		f.booted = true
		return f.tells()
	case f.restless && !ends(cmd):
		f.name += "x"
		return anotherEpoch
	case cmd[1] == lua.Acquire.In(f.run).SHA && epochArgs(cmd)[0] != f.name && epochArgs(cmd)[0] != "":
		return anotherEpoch
	}
	return ":1\r\n"
}

const anotherEpoch = "-EPOCH the epoch of this node is another one\r\n"

// epochArgs are the arguments of an acquire that say in which epoch it asks: see lua.Epoch.Args.
func epochArgs(cmd []string) [3]string {
	keys, err := strconv.Atoi(cmd[2])
	if err != nil || len(cmd) < 6+keys {
		return [3]string{fmt.Sprintf("no acquire: %q", cmd)}
	}
	return [3]string(cmd[3+keys:])
}

// tells is the reply of boot.lua.
func (f *forgetful) tells() string {
	return "*9\r\n" + bulk(f.name) + bulk("kept") + ":1000\r\n" + bulk(f.run) + bulk(f.version) + bulk(f.why) +
		fmt.Sprintf(":%d\r\n:1\r\n", since) + bulk(f.promoted)
}

func bulk(s string) string { return fmt.Sprintf("$%d\r\n%s\r\n", len(s), s) }

// guard makes n report its epoch; each change is in the list.
func guard(n *Node) (changes func() []string) {
	var mu sync.Mutex
	var all []string
	name := func() string { return fmt.Sprint("m-", owners.Add(1)) }
	n.SetGuard(Guard{Limit: time.Minute, Name: name, Changed: func(m Epoch, take func()) {
		mu.Lock()
		defer mu.Unlock()
		defer take()
		all = append(all, m.Name)
	}})
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(all)
	}
}

// answering is a node that answers all scripts with an error.
func answering(t *testing.T, addr, errline string) *redistest.MemNode {
	m := redistest.StartMemNode(t, addr)
	m.Mini.Server().SetPreHook(func(c *server.Peer, cmd string, _ ...string) bool {
		if cmd != "EVALSHA" {
			return false
		}
		c.WriteError(errline)
		return true
	})
	return m
}

// clusterOfOne is a client of a Cluster that has all its slots on m. Other addresses are dialled with dial;
// read, if any, is called when the client reads the map.
func clusterOfOne(t *testing.T, m *redistest.MemNode,
	dial func(context.Context, string, string) (net.Conn, error),
	read func(context.Context) error) *redis.ClusterClient {
	c := redis.NewClusterClient(&redis.ClusterOptions{
		DialerRetries: 1, Protocol: 2, PoolSize: 1000, MaxRetries: -1, MaxRedirects: 1,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
			if addr == m.Addr() {
				return m.Dial(ctx, network, addr)
			}
			return dial(ctx, network, addr)
		},
		ClusterSlots: func(ctx context.Context) ([]redis.ClusterSlot, error) {
			if read != nil {
				if err := read(ctx); err != nil {
					return nil, err
				}
			}
			return []redis.ClusterSlot{{Start: 0, End: slots - 1, Nodes: []redis.ClusterNode{{Addr: m.Addr()}}}}, nil
		},
	})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// goroutines counts those of nodes and of their clients that the test starts from now on, or that these
// start, and that still run.
func goroutines(t *testing.T) (count func() int) {
	pprof.SetGoroutineLabels(pprof.WithLabels(t.Context(), pprof.Labels("test", t.Name())))
	ours := "# labels: {\"test\":" + strconv.Quote(t.Name())
	return func() (n int) {
		t.Helper()
		var all strings.Builder
		if err := pprof.Lookup("goroutine").WriteTo(&all, 1); err != nil {
			t.Fatal(err)
		}
		for group := range strings.SplitSeq(all.String(), "\n\n") {
			_, stack, found := strings.Cut(group, ours)
			if !found || !strings.Contains(stack, "internal/node.(") && !strings.Contains(stack, "go-redis/") {
				continue
			}
			same, _, _ := strings.Cut(group, " @ ")
			i, err := strconv.Atoi(same[strings.LastIndexByte(same, '\n')+1:])
			if err != nil {
				t.Fatalf("%v in %s", err, group)
			}
			n += i
		}
		return n
	}
}

// asOnASocket makes a client of m see that an idle connection was reset before it uses it.
func asOnASocket(m *redistest.MemNode) func(*redis.Options) {
	return func(o *redis.Options) { o.Dialer = m.SocketOptions().Dialer }
}
