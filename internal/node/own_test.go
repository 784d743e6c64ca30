package node

import (
	"context"
	"net"
	"slices"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/flightlock/flightlock/internal/redistest"
)

// A server that closes all idle connections, as by CLIENT KILL, delays nobody, however short they
// were idle: the next requests use others, the node is not suspended, and nothing is indeterminate.
func TestAKillOfIdleConnectionsIsNoFailure(t *testing.T) {
	conns := make(chan *net.TCPConn, 100)
	c := redistest.MiniClient(t, redistest.StartMini(t), func(o *redis.Options) {
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			if err == nil {
				conns <- c.(*net.TCPConn)
			}
			return c, err
		}
	})
	n := newNode(t, c)
	for range 5 {
		var locks []*attempt
		var asked []*ear // by all lanes at once
		for _, key := range slices.Concat(sameLane(2), onOtherLanes(2)) {
			a := newAttempt(t, n, key)
			locks, asked = append(locks, a), append(asked, a.acquire())
		}
		for i, e := range asked {
			e.want(t, Granted)
			asked[i] = locks[i].release()
		}
		for _, e := range asked {
			e.want(t, Deleted)
		}
		if len(conns) == 0 {
			t.Fatal("no connection to kill")
		}
		for len(conns) > 0 {
			_ = (<-conns).CloseRead() // as if the server had closed it
		}
	}
	wantDebts(t, n, 0)
}
