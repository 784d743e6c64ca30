package redistest

import (
	"errors"
	"io"
	"net"
	"os"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func fakeClient(t *testing.T, f *Fake, change ...func(*redis.Options)) *redis.Client {
	t.Helper()
	return newClient(t, &redis.Options{Addr: f.Addr(), MaxRetries: -1}, change)
}

// go-redis with its default options can talk to a fake, which records the commands and
// none of the handshake.
func TestFakeIsDialledByGoRedis(t *testing.T) {
	f := StartFake(t, ErrorFor("EVALSHA|SCRIPT", "READONLY You can't write against a read only replica."))
	c := fakeClient(t, f, func(o *redis.Options) { o.DB, o.Password, o.ClientName = 1, "pw", "name" })
	ctx := t.Context()
	if err := c.Ping(ctx).Err(); err != nil {
		t.Errorf("PING: %v", err)
	}
	if err := c.EvalSha(ctx, "abc", []string{"k"}, 1).Err(); !redis.IsReadOnlyError(err) {
		t.Errorf("EVALSHA: %v", err)
	}
	if err := c.Set(ctx, "k", "v", 0).Err(); err != nil {
		t.Errorf("SET: %v", err)
	}
	want := [][]string{{"ping"}, {"evalsha", "abc", "1", "k", "1"}, {"set", "k", "v"}}
	if got := f.Commands(); !reflect.DeepEqual(got, want) {
		t.Errorf("Commands: %q", got)
	}
}

// Each command of a pipeline gets its own reply.
func TestFakeAnswersPipelines(t *testing.T) {
	f := StartFake(t, func(cmd []string) string { return "+" + cmd[1] + "\r\n" })
	pipe := fakeClient(t, f).Pipeline()
	var cmds []*redis.StringCmd
	for _, k := range []string{"a", "b", "c"} {
		cmds = append(cmds, pipe.Get(t.Context(), k))
	}
	if _, err := pipe.Exec(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"a", "b", "c"} {
		if got := cmds[i].Val(); got != want {
			t.Errorf("reply %d: %q", i, got)
		}
	}
}

// A command without an answer silences its connection, so that no later reply is taken for its own.
func TestFakeNeverAnswersOutOfTurn(t *testing.T) {
	f := StartFake(t, func(cmd []string) string {
		if cmd[0] == "silent" {
			return ""
		}
		return "+OK\r\n"
	})
	c := dialRaw(t, f.Addr())
	send(t, c, "*1\r\n$4\r\nloud\r\n*1\r\n$6\r\nsilent\r\n*1\r\n$4\r\nloud\r\n")
	expectReply(t, c, "+OK\r\n")
	Eventually(t, 10*time.Second, "all commands are recorded", func() bool { return len(f.Commands()) == 3 })
	expectNothing(t, c)
}

// A handler can end the connection, also in the middle of a reply.
func TestFakeHangsUp(t *testing.T) {
	f := StartFake(t, func([]string) string { return "$5\r\nhal" + Hangup })
	err := fakeClient(t, f).Get(t.Context(), "k").Err()
	if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("GET: %v", err)
	}
}

// Input that is not a command ends the connection.
func TestFakeTakesNothingButCommands(t *testing.T) {
	f := StartFake(t, func([]string) string { return "+OK\r\n" })
	for _, bad := range []string{"PING\r\n", "*1\r\n:5\r\n", "*-1\r\n", "\n", "*99999999999\r\n",
		"*1\r\n$-1\r\n"} {
		c := dialRaw(t, f.Addr())
		send(t, c, "*0\r\n"+bad)
		if n, err := c.Read(make([]byte, 10)); n != 0 || err == nil {
			t.Errorf("%q: read %d bytes, %v", bad, n, err)
		}
	}
	if got := f.Commands(); len(got) != 0 {
		t.Errorf("Commands: %q", got)
	}
}

// A black hole accepts; a refused address does not.
func TestDeadAddresses(t *testing.T) {
	c := dialRaw(t, BlackHole(t))
	send(t, c, strings.Repeat("x", 1<<20))
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v", err)
	}
	if _, err := net.Dial("tcp", RefusedAddr(t)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial: %v", err)
	}
}
