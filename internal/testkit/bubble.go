package testkit

import (
	"testing"
	"testing/synctest"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// Bubble runs fn in virtual time with n nodes in memory.
func Bubble(t *testing.T, n int, fn func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient)) {
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
