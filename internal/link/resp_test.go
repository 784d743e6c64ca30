package link

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/redis/go-redis/v9"
)

func TestParse(t *testing.T) {
	for in, want := range map[string]string{
		"+OK\r\n":                              "OK",
		"$0\r\n\r\n":                           "",
		"$3\r\na\r\n\r\n":                      `a\r\n`,
		"$-1\r\n":                              "nil",
		"*-1\r\n":                              "nil",
		"_\r\n":                                "nil",
		":-42\r\n":                             "-42",
		":9223372036854775807\r\n":             "9223372036854775807",
		"#t\r\n":                               "1",
		"#f\r\n":                               "0",
		",1.5\r\n":                             "1.5",
		"(123456789012345678901234567890\r\n":  "123456789012345678901234567890",
		"-ERR no\r\n":                          "error ERR no",
		"!6\r\nERR no\r\n":                     "error ERR no",
		"=5\r\ntxt:a\r\n":                      "a",
		"*0\r\n":                               "[]",
		"*2\r\n*2\r\n:1\r\n:2\r\n*1\r\n+a\r\n": "[[1 2] [a]]",
		"%1\r\n+a\r\n~2\r\n:1\r\n:2\r\n":       "[a [1 2]]",
		">2\r\n+a\r\n+b\r\n":                   "push [a b]",
		"|1\r\n+ttl\r\n:1\r\n+a\r\n":           "a",
	} {
		var p parser
		for n := range len(in) {
			if _, _, err := p.next([]byte(in[:n])); !errors.Is(err, errShort) {
				t.Errorf("%q: %v", in[:n], err)
			}
		}
		v, n, err := p.next([]byte(in + "+rest\r\n"))
		if got := strings.ReplaceAll(v.String(), `"`, ""); got != want || n != len(in) || err != nil {
			t.Errorf("%q: %q, %d bytes, %v; want %q", in, got, n, err, want)
		}
	}
	for _, in := range []string{
		"HTTP/1.1 400\r\n", "\r\n", "+a\n", ":\r\n",
		":x\r\n", ":1-\r\n", ":99999999999999999999\r\n", "$x\r\n", "*x\r\n",
		"$2000000\r\n", "$-2\r\n", "!-1\r\n", "$1\r\nabc", "=1\r\na\r\n", "*-2\r\n", "*2000000\r\n",
		strings.Repeat("*1\r\n", maxDepth+1) + ":1\r\n",
		"+" + strings.Repeat("a", maxReply),
	} {
		var bad *protocolError
		if _, _, err := new(parser).next([]byte(in)); !errors.As(err, &bad) {
			t.Errorf("%.40q: %v", in, err)
		}
	}
}

// A reply is read without an allocation.
func TestParseAllocatesNothing(t *testing.T) {
	var p parser
	in := []byte("*3\r\n:1\r\n$4\r\nname\r\n*2\r\n:1\r\n:2\r\n")
	if n := testing.AllocsPerRun(100, func() { _, _, _ = p.next(in) }); n > testkit.Sized(0.0, 2) {
		t.Errorf("%v allocations", n)
	}
}

// What go-redis reads of the same bytes is the same.
func FuzzParse(f *testing.F) {
	for _, in := range []string{
		"+OK\r\n", "$3\r\nabc\r\n", "*2\r\n:1\r\n$-1\r\n", "-ERR x\r\n", "%1\r\n+a\r\n:1\r\n", "*-1\r\n",
		"~1\r\n_\r\n", "#t\r\n",
		"!6\r\nERR no\r\n", "=5\r\ntxt:a\r\n", ">1\r\n+a\r\n", ",1.5\r\n",
	} {
		f.Add([]byte(in))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		v, n, err := new(parser).next(in)
		if err != nil || v.Kind == Push || bytes.ContainsAny(in, "|(,") || n != len(in) {
			// it is stricter, there is more to it than a reply, or it is a number whose text we do not look into
			return
		}
		rdb := redis.NewClient(&redis.Options{
			Protocol: 2, DisableIdentity: true, MaxRetries: -1,
			Dialer: func(context.Context, string, string) (net.Conn, error) {
				return &canned{reply: in}, nil
			},
		})
		defer rdb.Close()
		got, err := rdb.Do(context.Background(), "x").Result()
		if want := fmt.Sprintf("%T", got); err != nil && !errors.Is(err, redis.Nil) && v.Kind != Error {
			t.Errorf("%q: %v; we read %v", in, err, v)
		} else if v.Kind == Nil != errors.Is(err, redis.Nil) {
			t.Errorf("%q: %v, %v; we read %v", in, got, err, v)
		} else if v.Kind == String && in[0] == '$' && fmt.Sprint(got) != string(v.Text) {
			t.Errorf("%q: %v (%s); we read %v", in, got, want, v)
		}
	})
}

// canned is a connection to a server that refuses HELLO, and has one reply.
type canned struct {
	net.Conn
	reply []byte
	asked int
	rest  []byte
}

func (c *canned) Write(p []byte) (int, error) {
	if c.asked++; c.asked == 1 {
		c.rest = []byte("-ERR unknown command\r\n")
	} else {
		c.rest = c.reply
	}
	return len(p), nil
}

func (c *canned) Read(p []byte) (int, error) {
	if len(c.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

func (c *canned) Close() error { return nil }

func (c *canned) SetDeadline(time.Time) error { return nil }

func (c *canned) SetReadDeadline(time.Time) error { return nil }

func (c *canned) SetWriteDeadline(time.Time) error { return nil }

func (c *canned) RemoteAddr() net.Addr { return &net.TCPAddr{} }
