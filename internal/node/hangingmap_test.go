package node

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A slot moves to a master that the map does not name yet, while the map cannot be read: each try hangs. Requests
// that were sent on wait for one try together, and not for one each, one after the other.
func TestRequestsThatWereSentOnWaitForOneTryToReadTheMap(t *testing.T) {
	t.Parallel()
	target := redistest.StartFake(t, func(cmd []string) string {
		if strings.EqualFold(cmd[0], "EVALSHA") {
			return ":1\r\n"
		}
		return "+OK\r\n"
	})
	source := redistest.StartFake(t, func(cmd []string) string {
		if strings.EqualFold(cmd[0], "EVALSHA") {
			return fmt.Sprintf("-MOVED 1 %s\r\n", target.Addr())
		}
		return "+OK\r\n"
	})
	var reads atomic.Int32
	c := redis.NewClusterClient(&redis.ClusterOptions{
		DialerRetries: 1, Protocol: 2,
		ClusterSlots: func(ctx context.Context) ([]redis.ClusterSlot, error) {
			if reads.Add(1) > 1 {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return []redis.ClusterSlot{{Start: 0, End: slots - 1, Nodes: []redis.ClusterNode{{Addr: source.Addr()}}}}, nil
		},
	})
	t.Cleanup(func() { _ = c.Close() })
	n := startNode(t, c, 500*time.Millisecond, false)
	const requests = 6
	var ears []*ear
	for i := range requests {
		ears = append(ears, newAttempt(t, n, fmt.Sprint("{k}", i)).acquire())
	}
	for _, e := range ears {
		e.want(t, Granted)
	}
	if tries := reads.Load() - 1; tries > requests/2 {
		t.Errorf("%d requests took %d tries to read the map, one after the other", requests, tries)
	}
}
