package testkit

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// Bubble runs fn in virtual time with n nodes in memory.
func Bubble(t *testing.T, n int,
	fn func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		nodes := redistest.StartMemNodes(t, n)
		var clients []redis.UniversalClient
		for _, node := range nodes {
			clients = append(clients, node.Client(t))
		}
		fn(t, nodes, clients)
	})
}

// Down makes nodes unreachable, or reachable again.
func Down(on bool, nodes ...*redistest.MemNode) {
	for _, n := range nodes {
		n.Down(on)
	}
}

// Stall has nodes not answer, or answer again.
func Stall(on bool, nodes ...*redistest.MemNode) {
	for _, n := range nodes {
		n.Stall(on)
	}
}

// Delay has nodes receive and answer so much later.
func Delay(d time.Duration, nodes ...*redistest.MemNode) {
	for _, n := range nodes {
		n.SetDelay(d)
	}
}

// Lose deletes a key on nodes.
func Lose(key string, nodes ...*redistest.MemNode) {
	for _, n := range nodes {
		n.Mini.Del(key)
	}
}
