package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// What happens to locks while slots move. The subtests share a Cluster of two masters and one that
// has no slots yet.
func TestMovingSlots(t *testing.T) {
	t.Parallel()
	c := redistest.StartGrowingCluster(t, 2, 1)
	t.Run("what masters answer", func(t *testing.T) { movingAnswers(t, c) })
	t.Run("held", func(t *testing.T) { movingHeld(t, c) })
	t.Run("fresh", func(t *testing.T) { movingFresh(t, c) })
	t.Run("to an empty master", func(t *testing.T) { movingToEmpty(t, c) })
	t.Run("to a master that the map does not name", func(t *testing.T) { movingBehindTheMap(t, c) })
}

// moving is a slot that moves: a key in it, its fence counter and its wants.
type moving struct {
	key, counter, wants string
	slot                int
}

// newMoving is a key of a slot of its own that from serves.
func newMoving(t *testing.T, c *redistest.Cluster, from *redistest.Server, prefix string) moving {
	t.Helper()
	key := c.KeyOn(t, from, prefix)
	target := newTarget(key, "")
	return moving{key, bucketOf(target), wantsOf(target), c.SlotOf(t, key)}
}

// movingNode tolerates everything that a busy machine does.
func movingNode(t *testing.T, c *redistest.Cluster) *Node {
	return startNode(t, c.Client(t, func(o *redis.ClusterOptions) { o.DialerRetries = 1 }), patience)
}

// names are those of the letters: K the key, B its fence counter, W its wants.
func (m moving) names(letters string) (names []string) {
	for _, letter := range letters {
		names = append(names, map[rune]string{'K': m.key, 'B': m.counter, 'W': m.wants}[letter])
	}
	return names
}

// What the two masters of a slot that moves answer to a script, by its keys. No script has to run for
// that: it is decided before, by which of its keys are there. The source is the master whose slot it
// is still; the target is asked with ASKING, as a client asks that was sent there.
//
// Commands have these keys: KBW for acquire with a contender and refresh with a look, KB for those
// without, KW for release, K for what is left of each when it cannot have more.
//
// Redis before 7.0 answers ASK instead of TRYAGAIN at the source.
var movingRows = []struct {
	there, moved string // what exists, and what of that was moved
	source       string // its answers to K, KB, KW, KBW
	target       string
}{
	// The key is held, and nobody waits: with its wants nothing works, however few keys have moved.
	{"KB", "", "ran ran TRYAGAIN TRYAGAIN", "ran TRYAGAIN TRYAGAIN TRYAGAIN"},
	{"KB", "K", "ASK TRYAGAIN ASK TRYAGAIN", "ran TRYAGAIN TRYAGAIN TRYAGAIN"},
	{"KB", "B", "ran TRYAGAIN TRYAGAIN TRYAGAIN", "ran TRYAGAIN TRYAGAIN TRYAGAIN"},
	{"KB", "KB", "ASK ASK ASK ASK", "ran ran TRYAGAIN TRYAGAIN"},
	// The key is held, and somebody waits.
	{"KBW", "", "ran ran ran ran", "ran TRYAGAIN TRYAGAIN TRYAGAIN"},
	{"KBW", "K", "ASK TRYAGAIN TRYAGAIN TRYAGAIN", "ran TRYAGAIN TRYAGAIN TRYAGAIN"},
	{"KBW", "B", "ran TRYAGAIN ran TRYAGAIN", "ran TRYAGAIN TRYAGAIN TRYAGAIN"},
	{"KBW", "W", "ran ran TRYAGAIN TRYAGAIN", "ran TRYAGAIN TRYAGAIN TRYAGAIN"},
	{"KBW", "KB", "ASK ASK TRYAGAIN TRYAGAIN", "ran ran TRYAGAIN TRYAGAIN"},
	{"KBW", "KW", "ASK TRYAGAIN ASK TRYAGAIN", "ran TRYAGAIN ran TRYAGAIN"},
	{"KBW", "BW", "ran TRYAGAIN TRYAGAIN TRYAGAIN", "ran TRYAGAIN TRYAGAIN TRYAGAIN"},
	{"KBW", "KBW", "ASK ASK ASK ASK", "ran ran ran ran"},
	// The key is free: a script that names it, and another key, does not run anywhere.
	{"B", "", "ASK TRYAGAIN ASK TRYAGAIN", "ran TRYAGAIN TRYAGAIN TRYAGAIN"},
	{"B", "B", "ASK ASK ASK ASK", "ran TRYAGAIN TRYAGAIN TRYAGAIN"},
	{"BW", "", "ASK TRYAGAIN TRYAGAIN TRYAGAIN", "ran TRYAGAIN TRYAGAIN TRYAGAIN"},
	{"BW", "W", "ASK TRYAGAIN ASK TRYAGAIN", "ran TRYAGAIN TRYAGAIN TRYAGAIN"},
	{"BW", "B", "ASK ASK TRYAGAIN TRYAGAIN", "ran TRYAGAIN TRYAGAIN TRYAGAIN"},
	{"BW", "BW", "ASK ASK ASK ASK", "ran TRYAGAIN TRYAGAIN TRYAGAIN"},
	{"", "", "ASK ASK ASK ASK", "ran TRYAGAIN TRYAGAIN TRYAGAIN"},
}

// beginMove sets up a row: which keys exist, and which of them have moved.
func beginMove(t *testing.T, c *redistest.Cluster, m moving, from, to *redistest.Server, moved string) {
	t.Helper()
	c.SetMigrating(t, m.slot, from, to)
	c.MigrateKeys(t, from, to, m.names(moved)...)
}

func movingAnswers(t *testing.T, c *redistest.Cluster) {
	from, to := c.Servers()[0], c.Servers()[1]
	onSource, onTarget := from.Client(t, once), to.Client(t, once)
	for i, row := range movingRows {
		m := newMoving(t, c, from, fmt.Sprint("row", i, "-"))
		for _, name := range m.names(row.there) {
			from.Do(t, "SET", name, 1)
		}
		beginMove(t, c, m, from, to, row.moved)
		var source, target []string
		for _, keys := range []string{"K", "KB", "KW", "KBW"} {
			source = append(source, runsOn(t, onSource, false, m.names(keys)))
			target = append(target, runsOn(t, onTarget, true, m.names(keys)))
		}
		if s, g := strings.Join(source, " "), strings.Join(target, " "); s != row.source || g != row.target {
			t.Errorf("there %q, moved %q: source %q, target %q; want %q, %q", row.there, row.moved, s, g, row.source,
				row.target)
		}
		c.FinishMigration(t, m.slot, from, to)
		for _, name := range m.names(row.there) {
			to.Do(t, "DEL", name)
		}
	}
}

// once makes a client not retry what was refused.
func once(o *redis.Options) { o.MaxRetries = -1 }

// runsOn is the code of what c's server answers to a script with these keys.
func runsOn(t *testing.T, c *redis.Client, asking bool, keys []string) string {
	args := []any{"EVAL", "return 1", len(keys)}
	for _, key := range keys {
		args = append(args, key)
	}
	if err := answerOf(t, c, asking, args...).Err(); err != nil {
		return strings.Fields(err.Error())[0]
	}
	return "ran"
}

// answerOf has one master answer, and follows no redirection.
func answerOf(t *testing.T, c *redis.Client, asking bool, args ...any) *redis.Cmd {
	pipe := c.Pipeline()
	if asking {
		pipe.Do(t.Context(), "ASKING")
	}
	cmd := pipe.Do(t.Context(), args...)
	_, _ = pipe.Exec(t.Context())
	return cmd
}

// renew is a refresh for longer than the acquire was, which may request the next contender, and
// more tokens.
func (a *attempt) renew(look string, more int64) *ear {
	e := newEar()
	a.Refresh(e, 2*longTTL, 1, more, soon(), look)
	return e
}

// contending is an attempt of a contender that has waited.
func contending(t *testing.T, n *Node, key string) *attempt {
	a := &attempt{t: t}
	target := &Target{}
	target.Init(key, fmt.Sprint("owner-", owners.Add(1)), "somebody-1")
	a.Init(n, target, 0)
	return a
}

// A lock that is held stays held, and can be released, whatever part of it has moved. Others get
// the answer that it is held.
func movingHeld(t *testing.T, c *redistest.Cluster) {
	from, to := c.Servers()[0], c.Servers()[1]
	onSource, onTarget := from.Client(t, once), to.Client(t, once)
	n := movingNode(t, c)
	for i, row := range movingRows {
		if !strings.Contains(row.there, "K") {
			continue
		}
		t.Run(row.there+" moved "+row.moved, func(t *testing.T) {
			m := newMoving(t, c, from, fmt.Sprint("held", i, "-"))
			a := newAttempt(t, n, m.key)
			first := a.acquire().want(t, Granted).Counter
			if strings.Contains(row.there, "W") {
				contending(t, n, m.key).acquire().want(t, Held)
			}
			beginMove(t, c, m, from, to, row.moved)

			together := strings.Contains(row.moved, "K") == strings.Contains(row.moved, "B")
			for what, asked := range map[string]*ear{
				"refresh": a.renew("", 0), "look": a.renew("me", 0), "more": a.renew("", 5),
			} {
				if rep := asked.want(t, Renewed); together != (rep.Counter >= first) {
					t.Errorf("%s: counter %d, after %d", what, rep.Counter, first)
				}
			}
			for what, other := range map[string]*attempt{
				"another": newAttempt(t, n, m.key), "one that waits": contending(t, n, m.key),
			} {
				if rep := other.acquire().want(t, Held); rep.Holder != a.t0().Owner() {
					t.Errorf("%s: held by %q", what, rep.Holder)
				}
				other.release()
			}
			s := onSource
			if strings.Contains(row.moved, "K") {
				s = onTarget
			}
			if left, _ := answerOf(t, s, true, "PTTL", m.key).Val().(int64); left <= longTTL.Milliseconds() {
				t.Errorf("%d ms left", left)
			}
			a.release().want(t, Deleted)
			c.FinishMigration(t, m.slot, from, to)
			if next := grantedSoon(t, n, m.key); next <= first {
				t.Errorf("counter %d after %d", next, first)
			}
		})
	}
	wantDebts(t, n, 0)
	wantEmpty(t, c)
}

// grantedSoon is the counter of the next grant, to the contender whose turn it is if there is one.
// The lock is released.
func grantedSoon(t *testing.T, n *Node, key string) (counter int64) {
	t.Helper()
	redistest.Eventually(t, patience, "the key is granted", func() bool {
		a := contending(t, n, key)
		rep := <-a.acquire().heard
		<-a.release().heard
		counter = rep.Counter
		return rep.Kind == Granted
	})
	return counter
}

// A key that is free is granted as soon as its counter has moved, and not before: the source
// creates no keys any more, and without the counter a token could be one that was granted already.
func movingFresh(t *testing.T, c *redistest.Cluster) {
	from, to := c.Servers()[0], c.Servers()[1]
	n := movingNode(t, c)
	attempts := map[string]func(*testing.T, *Node, string) *attempt{"newcomer": newAttempt,
		"one that waits": contending}
	for i, row := range movingRows {
		if strings.Contains(row.there, "K") {
			continue
		}
		for name, attemptOn := range attempts {
			t.Run(fmt.Sprintf("%s moved %s, %s", row.there, row.moved, name), func(t *testing.T) {
				m := newMoving(t, c, from, fmt.Sprint("fresh", i, name, "-"))
				var last int64
				if strings.Contains(row.there, "B") {
					before := newAttempt(t, n, m.key)
					last = before.acquire().want(t, Granted).Counter
					before.release().want(t, Deleted)
				}
				if strings.Contains(row.there, "W") {
					from.Do(t, "ZADD", m.wants, 1, "somebody-1")
					from.Do(t, "PEXPIRE", m.wants, 10000)
				}
				beginMove(t, c, m, from, to, row.moved)

				a := attemptOn(t, n, m.key)
				if strings.Contains(row.moved, "B") {
					if rep := a.acquire().want(t, Granted); rep.Counter != last+1 {
						t.Errorf("counter %d after %d", rep.Counter, last)
					}
					last++
					attemptOn(t, n, m.key).acquire().want(t, Held)
					a.refresh().want(t, Renewed)
					a.release().want(t, Deleted)
				} else {
					if rep := a.acquire().want(t, Failed); !conn.HasCode(rep.Err, "TRYAGAIN") || Final(rep.Err) {
						t.Error(rep.Err)
					}
					a.release()
				}
				c.FinishMigration(t, m.slot, from, to)
				if next := grantedSoon(t, n, m.key); next != last+1 && last != 0 {
					t.Errorf("counter %d after %d", next, last)
				}
			})
		}
	}
	wantDebts(t, n, 0)
	wantEmpty(t, c)
}

// A slot moves to a master that has none yet: no map of the Cluster names it until it has.
func movingToEmpty(t *testing.T, c *redistest.Cluster) {
	from, to := c.Servers()[0], c.Servers()[2]
	client := c.Client(t, func(o *redis.ClusterOptions) { o.DialerRetries = 1 })
	n, err := New(client, patience/10, false)
	if err != nil {
		t.Fatal(err)
	}
	m := newMoving(t, c, from, "empty")
	a := newAttempt(t, n, m.key)
	a.acquire().want(t, Granted)
	beginMove(t, c, m, from, to, "KB")
	for range 3 {
		a.refresh().want(t, Renewed)
		a.renew("me", 2).want(t, Renewed)
	}
	newAttempt(t, n, m.key).acquire().want(t, Held)
	a.release().want(t, Deleted)
	b := newAttempt(t, n, m.key)
	b.acquire().want(t, Granted)
	c.FinishMigration(t, m.slot, from, to)
	b.refresh().want(t, Renewed)
	commands := n.Commands()
	b.refresh().want(t, Renewed)
	if got := n.Commands() - commands; got != 1 {
		t.Errorf("%d commands: the new master was not remembered", got)
	}
	b.release().want(t, Deleted)
	wantDebts(t, n, 0)
	wantEmpty(t, c)

	if err := n.Close(t.Context()); err != nil {
		t.Error(err)
	}
	_ = client.Close()
	redistest.Eventually(t, patience, "the master has no connections of the node", func() bool {
		return !strings.Contains(to.Do(t, "CLIENT", "LIST").(string), "cmd=evalsha")
	})
}

// A slot has moved, and the map that the client reads is outdated: the first master that took part
// in the move knows, others learn it later.
func movingBehindTheMap(t *testing.T, c *redistest.Cluster) {
	from, to := c.Servers()[0], c.Servers()[2]
	m := newMoving(t, c, from, "behind")
	port := func(s *redistest.Server) string { return fmt.Sprint("127.0.0.1:", s.Port()) }
	client := c.Client(t, func(o *redis.ClusterOptions) {
		o.ClusterSlots = func(context.Context) ([]redis.ClusterSlot, error) {
			return []redis.ClusterSlot{{Start: 0, End: 16383, Nodes: []redis.ClusterNode{{Addr: port(from)}}}}, nil
		}
	})
	n := startNode(t, client, patience)
	c.SetMigrating(t, m.slot, from, to)
	c.FinishMigration(t, m.slot, from, to)
	a := newAttempt(t, n, m.key)
	a.acquire().want(t, Granted)
	a.refresh().want(t, Renewed)
	a.release().want(t, Deleted)
	if !slices.Contains(c.Addrs(), port(to)) {
		t.Error("the test names addresses as the Cluster does not")
	}
	wantEmpty(t, c)
}

// Redirections lead to the master that the answer names, or to the one that answered if it names none. IPv6
// addresses are without brackets there.
func TestRedirections(t *testing.T) {
	for answer, want := range map[string]string{
		"MOVED 123 10.0.0.2:6379":  "10.0.0.2:6379",
		"ASK 123 redis-b:6380":     "redis-b:6380",
		"MOVED 123 :6380":          "10.0.0.1:6380",
		"ASK 123 ::1:6379":         "[::1]:6379",
		"MOVED 123 fd00::b:6379":   "[fd00::b]:6379",
		"MOVED 123 [fd00::b]:6379": "[fd00::b]:6379",
		"MOVED 123 without-a-port": "without-a-port",
	} {
		s := &Server{of: &redis.Options{Addr: "10.0.0.1:6379"}}
		if got := s.redirection(errors.New(answer)); got != want {
			t.Errorf("%s: to %s, want %s", answer, got, want)
		}
	}
}

// The same on a Cluster.
func TestMovingSlotsBetweenIPv6Addresses(t *testing.T) {
	t.Parallel()
	if l, err := net.Listen("tcp", "[::1]:0"); err != nil {
		t.Skip("this machine has no IPv6: ", err)
	} else {
		_ = l.Close()
	}
	c := redistest.StartGrowingCluster(t, 2, 1, "--bind", "127.0.0.1", "::1", "--cluster-announce-ip", "::1")
	t.Run("held", func(t *testing.T) { movingHeld(t, c) })
	t.Run("to an empty master", func(t *testing.T) { movingToEmpty(t, c) })
}

// A slot moves to a master that is not in the Cluster's map yet, and that has died. Requests for
// keys of the slot are sent there each time. However long that lasts, it costs one link.
func TestADeadTargetOfAMoveCostsOneLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const dead = "10.0.0.2:6379"
		source := answering(t, "10.0.0.1:6379", fmt.Sprintf("ASK 1 %s", dead))
		n := newNode(t, clusterOfOne(t, source, func(context.Context, string, string) (net.Conn, error) {
			return nil, syscall.ECONNREFUSED
		}, nil))
		for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			<-newAttempt(t, n, "k").acquire().heard
		}
		if got := serversOf(n); got > 2 {
			t.Errorf("%d links after 4s", got)
		}
	})
}
