package flightlock_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
)

// A single node fails over to its replica and back. A client that was away meanwhile knows the
// first server, and that server still has its scripts. What the second one had counted, and not
// replicated, is lost. Tokens rise all the same.
func TestTokensRiseAfterAFailoverAndBackThatAClientMissed(t *testing.T) {
	t.Parallel()
	for _, resync := range []bool{true, false} {
		t.Run(fmt.Sprintf("resync=%v", resync), func(t *testing.T) {
			first, second := redistest.StartServer(t, atOnce...), redistest.StartServer(t, atOnce...)
			tr := &trio{t: t, servers: []*redistest.Server{first}, proxy: redistest.StartProxy(t, first.Addr())}
			away, there := tr.client(flightlock.Options{}), tr.client(flightlock.Options{})
			rise := rising(t)
			rise(away, "at first")
			rise(there, "at first")
			follow(t, second, first)
			second.Do(t, "REPLICAOF", "NO", "ONE")
			tr.proxy.SetTarget(second.Addr())
			tr.proxy.ResetAll()
			rise(there, "on the second")
			if resync {
				follow(t, first, second)
			}
			first.Do(t, "REPLICAOF", "127.0.0.1", "1") // from here on it lags
			rise(there, "on the second, which has no replica")
			first.Do(t, "REPLICAOF", "NO", "ONE")
			tr.proxy.SetTarget(first.Addr())
			tr.proxy.ResetAll()
			time.Sleep(120 * time.Millisecond) // a check of the server's identity is reused for 100
			rise(away, "by the one who was away")
			rise(there, "by the one who was there")
		})
	}
}
