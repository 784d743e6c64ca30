package node

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/flightlock/flightlock/internal/redistest"
)

// A slot moves to a master that is not in the Cluster's map yet, and that has died. Requests for
// keys of the slot are sent there each time. However long that lasts, it costs one client, as it
// costs one server.
func TestADeadTargetOfAMoveCostsOneClient(t *testing.T) {
	dead := redistest.RefusedAddr(t)
	source := redistest.StartFake(t, func(cmd []string) string {
		switch strings.ToUpper(cmd[0]) {
		case "EVALSHA":
			return fmt.Sprintf("-ASK 1 %s\r\n", dead)
		case "PING":
			return "+PONG\r\n"
		}
		return "+OK\r\n"
	})
	c := redis.NewClusterClient(&redis.ClusterOptions{
		DialerRetries: 1, Protocol: 2,
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			return []redis.ClusterSlot{{Start: 0, End: slots - 1, Nodes: []redis.ClusterNode{{Addr: source.Addr()}}}}, nil
		},
	})
	t.Cleanup(func() { _ = c.Close() })
	n := newNode(t, c)
	clients := func() int {
		n.mu.Lock()
		defer n.mu.Unlock()
		return len(n.clients)
	}
	for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		<-newAttempt(t, n, "k").acquire().heard
	}
	if got := clients(); got > 1+2*lanesPerServer {
		t.Errorf("%d clients after 4s, for %d servers", got, serversOf(n))
	}
}
