package node

import (
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
)

// since is when the memories of a forgetful server began.
const since = 1_700_000_000_000_000

// forgetful is a fake server that gives its memory another name as often as there are names,
// and then keeps the last one.
type forgetful struct {
	mu           sync.Mutex
	names        []string
	run, version string
	promoted     string
	loaded       map[string]bool
}

func (f *forgetful) answer(cmd []string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case cmd[0] == "SCRIPT" || cmd[0] == "script":
		sum := sha1.Sum([]byte(cmd[2]))
		sha := hex.EncodeToString(sum[:])
		f.loaded[sha] = true
		return bulk(sha)
	case !f.loaded[cmd[1]]:
		return "-NOSCRIPT No matching script. Please use EVAL.\r\n"
	case cmd[1] == lua.Boot.SHA:
		name := f.names[0]
		if len(f.names) > 1 {
			f.names = f.names[1:]
		}
		return "*9\r\n" + bulk(name) + bulk("kept") + ":1000\r\n" + bulk(f.run) + bulk(f.version) + bulk("") + fmt.Sprintf(":%d\r\n:1\r\n", since) + bulk(f.promoted)
	}
	return ":1\r\n"
}

func bulk(s string) string { return fmt.Sprintf("$%d\r\n%s\r\n", len(s), s) }

// guard has n tell of its memory; each change is in the list.
func guard(n *Node) (changes func() []string) {
	var mu sync.Mutex
	var all []string
	n.SetGuard(Guard{Limit: time.Minute, Name: func() string { return fmt.Sprint("m-", owners.Add(1)) }, Changed: func(m Memory, take func()) {
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

// A vote is asked for in the memory that the server named last, on the connection on which
// the script became known to it, however often it forgets on the way. Before Redis 7 the
// script looks at the process too.
func TestTheScriptOfAMemory(t *testing.T) {
	for _, tc := range []struct{ run, version, inScript string }{
		{"r", "7.0.15", ""}, {"r", "6.2.1", "r"}, {"", "", ""},
	} {
		t.Run("version="+tc.version, func(t *testing.T) {
			f := &forgetful{names: []string{"m1", "m2", "m3"}, run: tc.run, version: tc.version, loaded: map[string]bool{}}
			fake := redistest.StartFake(t, f.answer)
			n := newNode(t, fakeClient(t, fake))
			changes := guard(n)
			if n.Memory() != nil {
				t.Error("it knows the memory of a node that it never asked")
			}
			want := lua.AcquireIn(lua.Memory{Name: "m3", Run: tc.inScript, Informed: tc.run != "", Raw: true, Since: since})
			for i := range 2 {
				rep := newAttempt(t, n, "k").acquire().want(t, Granted)
				if rep.Memory == nil || rep.Memory.Name != "m3" || rep.Memory.State != MemoryKept || (rep.Memory.Blind == nil) != (tc.run != "") {
					t.Errorf("granted in %+v", rep.Memory)
				}
				if got := changes(); !slices.Equal(got, []string{"m1", "m2", "m3"}) {
					t.Errorf("try %d: told of %v", i, got)
				}
				f.names = []string{"m3"}
			}
			booted := ""
			names := []string{"m1", "m2", "m3", "m3"}
			for _, cmd := range fake.Commands() {
				switch {
				case strings.EqualFold(cmd[0], "script") && strings.HasPrefix(cmd[2], "local memory"):
					if memory := strings.Split(cmd[2], `"`)[1]; booted == "" || booted == memory && memory != "m3" {
						t.Errorf("the script of %s became known after the server said %q", memory, booted)
					}
				case cmd[1] == lua.Boot.SHA:
					booted, names = names[0], names[1:]
				case cmd[1] == want.SHA, cmd[1] == unknown.usual.acquire.SHA:
				case cmd[1] != lua.Release.SHA && cmd[0] == "evalsha":
					t.Errorf("unexpected %v", cmd)
				}
			}
		})
	}
}

// lookout is a guarded node before a forgetful server.
type lookout struct {
	t             *testing.T
	n             *Node
	fake          *redistest.Fake
	usual, closer string                                  // the scripts of acquire
	instead       atomic.Pointer[func(key string) string] // answers an acquire, unless it says ""
}

func newLookout(t *testing.T) *lookout {
	k := &lookout{t: t}
	f := &forgetful{names: []string{"m"}, run: "r", version: "7.0", promoted: "abc:7", loaded: map[string]bool{}}
	m := lua.Memory{Name: "m", Informed: true, Raw: true, Promoted: f.promoted, Since: since}
	k.usual = lua.AcquireIn(m).SHA
	m.Closer = true
	k.closer = lua.AcquireIn(m).SHA
	k.fake = redistest.StartFake(t, func(cmd []string) string {
		if instead := k.instead.Load(); instead != nil && k.asks(cmd) {
			if answer := (*instead)(cmd[3]); answer != "" {
				return answer
			}
		}
		return f.answer(cmd)
	})
	k.n = newNode(t, fakeClient(t, k.fake))
	guard(k.n)
	k.vote("k") // after boot.lua, which looks as well
	return k
}

func (k *lookout) asks(cmd []string) bool {
	return len(cmd) > 3 && (cmd[1] == k.usual || cmd[1] == k.closer)
}

// vote says by which script it was asked for.
func (k *lookout) vote(key string) (script string) {
	k.t.Helper()
	newAttempt(k.t, k.n, key).acquire().want(k.t, Granted)
	return k.last()
}

// last is the script by which the last vote was asked for.
func (k *lookout) last() (script string) {
	for _, cmd := range k.fake.Commands() {
		if k.asks(cmd) {
			script = cmd[1]
		}
	}
	return script
}

const readOnly = "-READONLY You can't write against a read only replica.\r\n"

// A look counts for a while; then the next vote takes another. A connection that dies and a server that is no
// master call for one at once, and what else it refuses does not.
func TestWhenALookIsDue(t *testing.T) {
	k := newLookout(t)
	looked := func() {
		redistest.Eventually(t, patience, "the last look counts", func() bool { return k.vote("k") == k.usual })
	}
	looked()
	time.Sleep(lookEvery)
	if k.vote("k") != k.closer {
		t.Error("no look when the last one had run out")
	}
	for answer, want := range map[string]string{
		readOnly: k.closer,
		"-LOADING Redis is loading the dataset in memory\r\n": k.closer,
		"-MASTERDOWN Link with MASTER is down\r\n":            k.closer,
		redistest.Hangup: k.closer,
		"-OOM command not allowed when used memory > 'maxmemory'.\r\n": k.usual,
		"-WRONGTYPE Operation against a key\r\n":                       k.usual,
	} {
		instead := func(string) string { return answer }
		redistest.Eventually(t, patience, fmt.Sprintf("a vote after %q", answer), func() bool {
			looked()
			until := k.n.notices.home.looked.Load().until
			k.instead.Store(&instead)
			newAttempt(t, k.n, "k").acquire().want(t, Failed)
			k.instead.Store(nil)
			got := k.vote("k")
			if time.Now().After(until) { // it would be due anyway
				return false
			}
			if got != want {
				t.Errorf("after %q a look is taken: %v", answer, got == k.closer)
			}
			return true
		})
	}
}

// A doubt stands against a look that was sent before it, whenever its answer comes.
func TestALookThatIsOlderThanADoubt(t *testing.T) {
	k := newLookout(t)
	slow, quick := sameLane(1)[0], onOtherLanes(1)[0]
	k.n.notices.home.doubt()
	arrived, release := make(chan struct{}), make(chan struct{})
	instead := func(key string) string {
		if !strings.HasSuffix(key, slow) {
			return readOnly
		}
		close(arrived)
		<-release
		return ""
	}
	k.instead.Store(&instead)
	asked := newAttempt(t, k.n, slow).acquire()
	<-arrived
	if k.last() != k.closer {
		t.Error("no look in doubt")
	}
	newAttempt(t, k.n, quick).acquire().want(t, Failed)
	k.instead.Store(nil)
	close(release)
	asked.want(t, Granted)
	if k.vote(slow) != k.closer {
		t.Error("no look after the doubt, because of one that was sent before it")
	}
}

// A server whose memory has another name each time it is asked grants nothing.
func TestAServerThatForgetsAllTheTime(t *testing.T) {
	var names []string
	for i := range 100 {
		names = append(names, fmt.Sprint("m", i))
	}
	f := &forgetful{names: names, run: "r", version: "7.0", loaded: map[string]bool{}}
	n := newNode(t, fakeClient(t, redistest.StartFake(t, f.answer)))
	guard(n)
	if rep := newAttempt(t, n, "k").acquire().want(t, Failed); !strings.Contains(rep.Err.Error(), "another one each time") {
		t.Error(rep.Err)
	}
}

// A node that was flushed grants in another memory than before, also to a client that does
// not meet the flush first; and a release or a refresh in between does not hide it.
func TestEveryClientNoticesAFlush(t *testing.T) {
	s := redistest.StartServer(t)
	x, y := newNode(t, s.Client(t)), newNode(t, s.Client(t))
	guard(x)
	guard(y)
	for _, n := range []*Node{x, y} {
		a := newAttempt(t, n, "k")
		a.acquire().want(t, Granted)
		a.release().want(t, Deleted)
	}
	before := x.Memory().Name
	s.Do(t, "FLUSHALL")
	first := newAttempt(t, x, "k")
	m := first.acquire().want(t, Granted).Memory
	first.release().want(t, Deleted) // the fence bucket stays
	newAttempt(t, y, "k").refresh().want(t, Missing)
	if rep := newAttempt(t, y, "k").acquire().want(t, Granted); rep.Memory.Name != m.Name || m.Name == before {
		t.Errorf("granted in %+v, the other in %+v, before in %s", rep.Memory, m, before)
	}
}

// A node that is not guarded has no memory, and its votes tell of none.
func TestNoGuardNoMemory(t *testing.T) {
	s := redistest.StartServer(t)
	n := newNode(t, s.Client(t))
	if rep := newAttempt(t, n, "k").acquire().want(t, Granted); rep.Memory != nil || n.Memory() != nil {
		t.Errorf("%+v", rep)
	}
	if s.Do(t, "EXISTS", lua.Marker) != int64(0) {
		t.Error("it left a marker")
	}
	if !n.Guardable() || startNode(t, s.Client(t), time.Second, true).Guardable() {
		t.Error("a node among others can be guarded, the only one cannot")
	}
}
