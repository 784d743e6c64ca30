package rediscache

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/group"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// Lookups that fail because this process is busy do not make a server that answers look down. One that
// does not answer a probe either is, until it does.
func TestProbesConfirmFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := redistest.StartMemNode(t, "10.0.0.1:6379")
		rdb := n.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		closed := make(chan struct{})
		var tasks group.Group
		b := breaker{s: newServer(rdb, time.Second, time.Minute), tasks: &tasks, closed: closed,
			servers: map[string]*health{}}
		for range 10 {
			for range 2 * maxFailed {
				b.failed(t.Context(), "k")
			}
			if b.down() != 0 {
				t.Fatal("it is down without a probe")
			}
			synctest.Wait()
			if b.down() != 0 || b.troubled.Load() {
				t.Fatal("it is down, and answers")
			}
		}
		n.Stall(true)
		for range maxFailed {
			b.failed(t.Context(), "k")
		}
		time.Sleep(time.Second)
		if b.down() != 1 {
			t.Error("it is not down, and does not answer")
		}
		n.Stall(false)
		time.Sleep(time.Second)
		if b.down() != 0 || b.troubled.Load() {
			t.Error("it is down, and answers again")
		}
		close(closed)
		tasks.Close()
		if err := tasks.Wait(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
