package conn

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// What a server says before it closes a connection wins over the end of that: whether the client's first
// write fails, a later one, or a read.
func TestARefusalWinsOverTheEndOfItsConnection(t *testing.T) {
	for _, reply := range []string{
		"ERR max number of clients reached",
		"DENIED Redis is running in protected mode because protected mode is enabled",
		"NOAUTH Authentication required.",
	} {
		for writes := range 4 {
			for _, identity := range []bool{false, true} {
				t.Run(fmt.Sprintf("%.6s, %d writes, identity=%v", reply, writes, identity), func(t *testing.T) {
					c := redis.NewClient(&redis.Options{
						Dialer: redistest.RefusingDialer(reply, writes), DisableIdentity: !identity,
					})
					defer c.Close()
					if err := RefusedLogin(t.Context(), c, time.Second); !errors.Is(err, ErrLogin) ||
						!strings.Contains(err.Error(), reply) || strings.Contains(err.Error(), "broken pipe") {
						t.Errorf("it is refused with %v", err)
					}
					own, err := DialOnce(t.Context(), c.Options(), time.Second, NewLimit(1), func(*redis.Options) {})
					if err != nil {
						t.Fatal(err)
					}
					defer own.Close()
					if err := Said(own.Ping(t.Context()).Err()); !IsReply(err) || err.Error() != reply {
						t.Errorf("a command ended with %v", err)
					}
				})
			}
		}
	}
}

// An alert of TLS that has arrived is what the server says, too: a write that fails because it has closed the
// connection names it.
func TestAnAlertOfTLSWinsOverAFailedWrite(t *testing.T) {
	h := httptest.NewTLSServer(nil) // for its certificate
	h.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() { // ends with the handshake, which fails
		if c, err := l.Accept(); err == nil {
			_ = tls.Server(c, &tls.Config{Certificates: h.TLS.Certificates,
				ClientAuth: tls.RequireAnyClientCert}).Handshake()
			_ = c.Close()
		}
	}()
	tcp, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	var fail atomic.Bool
	below := (&redistest.Conn{Conn: tcp, OnWrite: func(c net.Conn, p []byte) (int, error) {
		if fail.Load() {
			return 0, &net.OpError{Op: "write", Net: "tcp", Err: os.NewSyscallError("write", syscall.EPIPE)}
		}
		return c.Write(p)
	}}).Open()
	own := tls.Client(below, &tls.Config{InsecureSkipVerify: true}) // of a test
	// of TLS 1.3, where the client's end is first
	if err := own.Handshake(); err != nil {
		t.Fatal(err)
	}
	redistest.Eventually(t, 20*time.Second, "the alert has arrived",
		func() bool { return unread(tcp.(*net.TCPConn)) })
	fail.Store(true)
	w := newConn(own, time.Second)
	if _, err := w.Write([]byte("x")); err == nil || !strings.Contains(err.Error(), "tls: ") {
		t.Errorf("it ended with %v", err)
	}
}

// logged are the lines that go-redis has logged.
type logged struct {
	mu    sync.Mutex
	lines []string
}

func (l *logged) Printf(_ context.Context, format string, v ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf(format, v...))
}

// A server that is away is dialled four times a second. go-redis would log each dial.
func TestADialThatFailsIsNotLogged(t *testing.T) {
	var log logged
	redis.SetLogger(&log)
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = lis.Close()
	c := redis.NewClient(&redis.Options{Addr: lis.Addr().String()})
	defer c.Close()
	for range 20 {
		if _, err := DialOnce(t.Context(), c.Options(), time.Second, NewLimit(1),
			func(*redis.Options) {}); err == nil {
			t.Fatal("nobody listens, and there is a connection")
		}
	}
	log.mu.Lock()
	defer log.mu.Unlock()
	if len(log.lines) > 0 {
		t.Errorf("%d lines, the first: %s", len(log.lines), log.lines[0])
	}
}
