package conn

import (
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

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
	own, err := DialOnce(t.Context(), c.Options(), time.Second, NewLimit(1), func(*redis.Options) {})
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
