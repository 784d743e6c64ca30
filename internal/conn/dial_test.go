package conn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

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

// A server that is away is probed four times a second. go-redis would log each dial.
func TestAProbeThatFailsIsNotLogged(t *testing.T) {
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
		if err := Probe(t.Context(), c, time.Second, NewLimit(1)); err == nil {
			t.Fatal("nobody listens, and there was an answer")
		}
	}
	log.mu.Lock()
	defer log.mu.Unlock()
	if len(log.lines) > 0 {
		t.Errorf("%d lines, the first: %s", len(log.lines), log.lines[0])
	}
}

// A client for one connection makes no other when that has ended: another process may listen by then.
func TestAClientForOneConnectionDialsOnce(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	var accepted atomic.Int32
	go func() { // ends with the listener
		for {
			c, err := lis.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			_ = c.Close()
		}
	}()
	c := redis.NewClient(&redis.Options{Addr: lis.Addr().String()})
	defer c.Close()
	own, err := DialOnce(t.Context(), c, time.Second, NewLimit(1), func(*redis.Options) {})
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	for range 5 {
		if err := own.Ping(t.Context()).Err(); err == nil {
			t.Fatal("nobody answers, and there was an answer")
		}
	}
	if err := own.Ping(t.Context()).Err(); !errors.Is(err, errDialed) || accepted.Load() != 1 {
		t.Errorf("%v, after %d connections", err, accepted.Load())
	}
}
