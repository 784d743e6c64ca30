package node

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
)

func TestMain(m *testing.M) {
	redistest.SilenceRedis()
	goleak.VerifyTestMain(m)
}

const (
	patience = 20 * time.Second // for what must happen; a loaded machine may need some of it
	longTTL  = 50 * time.Second // of keys that must not just expire

	redialEvery = 250 * time.Millisecond // as package link has it
)

// owners makes every attempt's owner unique.
var owners atomic.Int64

// attempt is an Entry of its own owner.
type attempt struct {
	Entry
	buf RequestBuf
	t   *testing.T
}

func newAttempt(t *testing.T, n *Node, key string) *attempt {
	a := &attempt{t: t}
	a.Init(n, newTarget(key, fmt.Sprint("owner-", owners.Add(1))), 0)
	return a
}

func newTarget(key, owner string) *Target {
	t := &Target{}
	t.Init(key, owner, "")
	return t
}

func soon() time.Time { return time.Now().Add(patience) }

// acquire sends the request and returns the sink of its reply.
func (a *attempt) acquire() *ear {
	e := newEar()
	a.Acquire(&a.buf, e, longTTL, 1, false)
	return e
}

func (a *attempt) refresh() *ear {
	e := newEar()
	a.Refresh(e, longTTL, 1, 0, soon(), "")
	return e
}

func (a *attempt) release() *ear {
	e := newEar()
	a.Release(&a.buf, e, false, &TurnPass{})
	return e
}

// An ear is a Sink that receives one reply, and counts.
type ear struct {
	heard chan Reply
	n     atomic.Int32
}

func newEar() *ear { return &ear{heard: make(chan Reply, 1)} }

func (e *ear) Answer(_ int, rep Reply) {
	if e.n.Add(1) == 1 {
		e.heard <- rep
	}
}

// want waits for the reply, which must be of that kind.
func (e *ear) want(t *testing.T, kind Kind) Reply {
	t.Helper()
	select {
	case rep := <-e.heard:
		if rep.Kind != kind {
			t.Fatalf("reply of kind %d (%v), want %d", rep.Kind, rep, kind)
		}
		return rep
	case <-time.After(patience):
		t.Fatalf("no reply, want kind %d", kind)
		return Reply{}
	}
}

// wantNow is want for a reply that was given by the caller itself.
func (e *ear) wantNow(t *testing.T, kind Kind) Reply {
	t.Helper()
	if e.n.Load() == 0 {
		t.Fatalf("no reply yet, want kind %d at once", kind)
	}
	return e.want(t, kind)
}

// newNode makes a node that ends with the test, before its client. It may take long to answer, for the
// machine may be busy.
func newNode(t *testing.T, c redis.UniversalClient) *Node {
	t.Helper()
	return startNode(t, c, 10*time.Second)
}

// newImpatientNode is newNode for tests of what happens when an answer is late.
func newImpatientNode(t *testing.T, c redis.UniversalClient) *Node {
	t.Helper()
	return startNode(t, c, 50*time.Millisecond)
}

func startNode(t *testing.T, c redis.UniversalClient, timeout time.Duration) *Node {
	t.Helper()
	return startOneOf(t, c, timeout, true)
}

// startOneOf starts one of several nodes, whose connections are always read, or one that is alone.
func startOneOf(t *testing.T, c redis.UniversalClient, timeout time.Duration, alone bool) *Node {
	t.Helper()
	n, err := New(c, timeout, alone)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := n.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return n
}

// at points a client at addr instead, a proxy for example.
func at(addr string) func(*redis.Options) {
	return func(o *redis.Options) { o.Addr = addr }
}

// quick makes failed dials fail at once.
func quick(o *redis.Options) { o.DialerRetries = 1 }

func exists(t *testing.T, s *redistest.Server, key string) bool {
	t.Helper()
	return s.Do(t, "EXISTS", key) == int64(1)
}

// lockKeys are the server's keys without the fence counters.
func lockKeys(t *testing.T, s *redistest.Server) (keys []string) {
	t.Helper()
	for _, k := range s.Keys(t) {
		if len(k) < len(Reserved) || k[:len(Reserved)] != Reserved {
			keys = append(keys, k)
		}
	}
	return keys
}

// bucketOf is the name of t's fence bucket.
func bucketOf(t *Target) string { return string(t.bucket[:]) }

// wantsOf is the name of the set of those who wait for t's key.
func wantsOf(t *Target) string {
	_, name, _ := strings.Cut(string(t.appendName(nil, wantsPart)), "\r\n")
	return strings.TrimSuffix(name, "\r\n")
}

func wantDebts(t *testing.T, n *Node, want int) {
	t.Helper()
	redistest.Eventually(t, patience, fmt.Sprintf("the node has %d debts", want),
		func() bool { return n.Debts() == want })
}

// ends reports whether cmd releases a key or undoes a grant.
func ends(cmd []string) bool {
	return len(cmd) > 1 && slices.ContainsFunc([]lua.Script{lua.Release, lua.Done, lua.Undo},
		func(s lua.Script) bool { return cmd[1] == s.SHA || cmd[1] == s.Source })
}
