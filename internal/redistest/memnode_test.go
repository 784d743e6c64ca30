package redistest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// inBubble runs a test on one in-memory node in virtual time.
func inBubble(t *testing.T, f func(t *testing.T, n *MemNode, c *redis.Client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := StartMemNode(t, "10.0.0.1:6379")
		f(t, n, n.Client(t))
	})
}

func mustSet(t *testing.T, c *redis.Client, key string) {
	t.Helper()
	if err := c.Set(t.Context(), key, "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
}

// In a bubble a key expires when the bubble's clock says so.
func TestBubbleKeysExpireInVirtualTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		minis, clients := NewBubble(t, 3)
		for i, c := range clients {
			if err := c.Set(t.Context(), "k", i, 30*time.Second).Err(); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(29 * time.Second)
		for i, c := range clients {
			if got := c.Get(t.Context(), "k").Val(); got != fmt.Sprint(i) {
				t.Errorf("node %d before: %q", i, got)
			}
		}
		time.Sleep(time.Second)
		for i, c := range clients {
			if err := c.Get(t.Context(), "k").Err(); !errors.Is(err, redis.Nil) || minis[i].Exists("k") {
				t.Errorf("node %d after: %v", i, err)
			}
		}
	})
}

// The nodes have distinct addresses that need no look-up.
func TestMemNodesHaveTheirOwnAddresses(t *testing.T) {
	seen := map[string]bool{}
	for _, n := range StartMemNodes(t, 300) {
		seen[n.Addr()] = true
	}
	if len(seen) != 300 || !seen["10.0.0.1:6379"] || !seen["10.0.0.3:6379"] {
		t.Errorf("%d addresses", len(seen))
	}
}

// A long pipeline with long replies does not block on the connection.
func TestBubbleRunsLongPipelines(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *MemNode, c *redis.Client) {
		script := redis.NewScript("redis.call('SET', KEYS[1], ARGV[1]); return string.rep(ARGV[1], 1000)")
		if err := script.Load(t.Context(), c).Err(); err != nil {
			t.Fatal(err)
		}
		pipe := c.Pipeline()
		var cmds []*redis.Cmd
		for i := range 200 {
			cmds = append(cmds, script.EvalSha(t.Context(), pipe, []string{fmt.Sprint("k", i)}, i%10))
		}
		if _, err := pipe.Exec(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i, cmd := range cmds {
			if got := cmd.Val().(string); len(got) != 1000 || got[0] != byte('0'+i%10) {
				t.Errorf("reply %d: %d bytes", i, len(got))
			}
		}
	})
}

// A client with all of go-redis's defaults works in a bubble and can be closed there.
func TestBubbleTakesADefaultClient(t *testing.T) {
	inBubble(t, func(t *testing.T, n *MemNode, _ *redis.Client) {
		c := newClient(t, &redis.Options{Addr: n.Addr(), Dialer: n.Dial}, nil)
		mustSet(t, c, "k")
	})
}

// Maintenance notifications need no clock outside the bubble.
func TestBubbleTakesMaintenanceNotifications(t *testing.T) {
	inBubble(t, func(t *testing.T, n *MemNode, _ *redis.Client) {
		c := n.Client(t, func(o *redis.Options) {
			o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeAuto}
		})
		mustSet(t, c, "k")
	})
}

// A script on a connection with subscriptions, whose messages come meanwhile: neither is written into the
// other, and the race detector has nothing to say.
func TestScriptsBesideMessages(t *testing.T) {
	const scripts = 300
	n := StartMemNode(t, "10.0.0.1:6379")
	conn, err := n.Dial(t.Context(), "", "")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var commands strings.Builder
	for _, args := range slices.Concat([][]string{{"HELLO", "3"}, {"SUBSCRIBE", "c"}}, slices.Repeat([][]string{
		{"EVAL", "redis.call('PUBLISH', 'c', 'm'); return {1, 2, 3}", "0"}}, scripts), [][]string{{"PING"}}) {
		fmt.Fprintf(&commands, "*%d\r\n", len(args))
		for _, arg := range args {
			fmt.Fprintf(&commands, "$%d\r\n%s\r\n", len(arg), arg)
		}
	}
	go io.WriteString(conn, commands.String())
	var got []byte
	for part := make([]byte, 1<<12); !bytes.Contains(got, []byte("+PONG")); {
		k, err := conn.Read(part)
		if got = append(got, part[:k]...); err != nil {
			t.Fatal(err)
		}
	}
	if whole := bytes.Count(got, []byte("*3\r\n:1\r\n:2\r\n:3\r\n")); whole != scripts {
		t.Errorf("%d of %d scripts have replied in one piece", whole, scripts)
	}
}

// A cut is a reset of what is open; the next connection works.
func TestCutResetsOpenConnections(t *testing.T) {
	inBubble(t, func(t *testing.T, n *MemNode, c *redis.Client) {
		mustSet(t, c, "k")
		n.Cut()
		if err := c.Get(t.Context(), "k").Err(); !errors.Is(err, syscall.ECONNRESET) &&
			!errors.Is(err, syscall.EPIPE) {
			t.Errorf("after the cut: %v", err)
		}
		if err := c.Get(t.Context(), "k").Err(); err != nil {
			t.Errorf("on a new connection: %v", err)
		}
	})
}

// A stalled node lets clients time out, executes what they sent once it continues, and then answers
// again.
func TestStalledNodeExecutesLate(t *testing.T) {
	inBubble(t, func(t *testing.T, n *MemNode, c *redis.Client) {
		mustSet(t, c, "k")
		n.Stall(true)
		begin := time.Now()
		err := c.Set(t.Context(), "late", "v", 0).Err()
		if !os.IsTimeout(err) || time.Since(begin) != 5*time.Second {
			t.Errorf("SET: %v after %v", err, time.Since(begin))
		}
		if n.Mini.Exists("late") {
			t.Error("executed while stalled")
		}
		n.Stall(false)
		synctest.Wait()
		if !n.Mini.Exists("late") {
			t.Error("not executed late")
		}
		mustSet(t, c, "k")
	})
}

// A stalled node accepts connections, which work once it continues.
func TestStalledNodeAcceptsConnections(t *testing.T) {
	inBubble(t, func(t *testing.T, n *MemNode, c *redis.Client) {
		n.Stall(true)
		time.AfterFunc(time.Second, func() { n.Stall(false) })
		begin := time.Now()
		mustSet(t, c, "k")
		if d := time.Since(begin); d != time.Second {
			t.Errorf("answered after %v", d)
		}
	})
}

// A node that is down refuses connections, and has kept its data when it is back.
func TestDownNodeRefusesAndKeepsItsKeys(t *testing.T) {
	inBubble(t, func(t *testing.T, n *MemNode, c *redis.Client) {
		mustSet(t, c, "k")
		n.Stall(true) // so that a request is under way when the node goes down
		done := make(chan error)
		go func() { done <- c.Set(context.Background(), "lost", "v", 0).Err() }()
		synctest.Wait()
		n.Down(true)
		if err := <-done; !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("under way: %v", err)
		}
		if err := c.Get(t.Context(), "k").Err(); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("while down: %v", err)
		}
		n.Stall(false)
		n.Down(false)
		if got := c.Get(t.Context(), "k").Val(); got != "v" {
			t.Errorf("GET: %q", got)
		}
		if n.Mini.Exists("lost") {
			t.Error("executed a lost request")
		}
	})
}

// A restarted node has neither keys nor scripts.
func TestRestartedNodeIsEmpty(t *testing.T) {
	inBubble(t, func(t *testing.T, n *MemNode, c *redis.Client) {
		script := redis.NewScript("return 1")
		if err := script.Load(t.Context(), c).Err(); err != nil {
			t.Fatal(err)
		}
		mustSet(t, c, "k")
		n.Stall(true)
		if err := n.Restart(); err != nil {
			t.Fatal(err)
		}
		_ = c.Ping(t.Context()) // finds the reset
		if err := script.EvalSha(t.Context(), c, nil).Err(); !redis.HasErrorPrefix(err, "NOSCRIPT") {
			t.Errorf("EVALSHA: %v", err)
		}
		if got := n.Mini.Keys(); len(got) != 0 {
			t.Errorf("Keys: %v", got)
		}
	})
}

// A round trip takes twice the delay, a pipeline no longer than one command.
func TestMemNodeDelay(t *testing.T) {
	inBubble(t, func(t *testing.T, n *MemNode, c *redis.Client) {
		mustSet(t, c, "k") // with the handshake
		n.SetDelay(10 * time.Millisecond)
		begin := time.Now()
		pipe := c.Pipeline()
		for range 50 {
			pipe.Get(t.Context(), "k")
		}
		if _, err := pipe.Exec(t.Context()); err != nil {
			t.Fatal(err)
		}
		// A pipeline has connections of its own, whose handshake takes a round trip.
		if d := time.Since(begin); d != 40*time.Millisecond {
			t.Errorf("pipeline: %v", d)
		}
		begin = time.Now()
		mustSet(t, c, "k")
		if d := time.Since(begin); d != 20*time.Millisecond {
			t.Errorf("SET: %v", d)
		}
	})
}

// The in-memory connection keeps the promises of net.Conn that clients rely on.
func TestPipeDeadlinesAndEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipe("10.0.0.1:6379", func() time.Duration { return time.Second })
		c, s := p.client, p.server
		b := make([]byte, 10)

		// A deadline ends a read, also one that is set while the read waits.
		time.AfterFunc(time.Minute, func() { _ = c.SetDeadline(time.Now()) })
		begin := time.Now()
		if _, err := c.Read(b); !os.IsTimeout(err) || time.Since(begin) != time.Minute {
			t.Errorf("read: %v after %v", err, time.Since(begin))
		}
		if _, err := c.Write(b); !os.IsTimeout(err) {
			t.Errorf("write: %v", err)
		}
		if err := c.SetDeadline(time.Time{}); err != nil {
			t.Fatal(err)
		}

		// What was written before Close arrives, in pieces as small as the reader's.
		if _, err := io.WriteString(s, "hello"); err != nil {
			t.Fatal(err)
		}
		if n, err := s.Write(nil); n != 0 || err != nil {
			t.Errorf("empty write: %d, %v", n, err)
		}
		if err := errors.Join(s.Close(), s.Close()); err != nil {
			t.Fatal(err)
		}
		if n, err := c.Read(nil); n != 0 || err != nil {
			t.Errorf("empty read: %d, %v", n, err)
		}
		if n, err := c.Read(b[:2]); string(b[:n]) != "he" || err != nil {
			t.Errorf("%q, %v", b[:n], err)
		}
		if rest, err := io.ReadAll(c); string(rest) != "llo" || err != nil {
			t.Errorf("%q, %v", rest, err)
		}
		if _, err := c.Write(b); !errors.Is(err, syscall.EPIPE) {
			t.Errorf("write to a closed end: %v", err)
		}
		if _, err := s.Write(b); err == nil {
			t.Error("write after Close")
		}
		if _, err := s.Read(b); err == nil {
			t.Error("read after Close")
		}
		if c.RemoteAddr().String() != "10.0.0.1:6379" || c.LocalAddr().Network() != "tcp" {
			t.Errorf("addresses %v, %v", c.RemoteAddr(), c.LocalAddr())
		}
	})
}

// miniredis on a socket, outside of any bubble.
func TestMiniOnLoopback(t *testing.T) {
	m := StartMini(t)
	mustSet(t, MiniClient(t, m), "k")
	if !m.Exists("k") {
		t.Error("no key")
	}
	n, err := LaunchMemNode("10.0.0.1:6379")
	if err != nil {
		t.Fatal(err)
	}
	mustSet(t, n.Client(t), "k")
	n.Close()
	n.Close()
	if _, err := n.Dial(t.Context(), "tcp", ""); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("Dial after Close: %v", err)
	}
}
