package node

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// Releases are sent to a server that refuses logins, on connections that were let in before. When those are gone too,
// the debts, of which there may be tens of thousands, are not tried all the time, and do not dial.
func TestDebtsDoNotDialAServerThatRefusesLogins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		m.Mini.RequireAuth("old")
		var lockedOut atomic.Bool
		var dials atomic.Int64
		n := newImpatientNode(t, m.Client(t, func(o *redis.Options) {
			o.CredentialsProvider = func() (string, string) {
				if lockedOut.Load() {
					return "", "wrong"
				}
				return "", "old"
			}
			dial := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				dials.Add(1)
				return dial(ctx, network, addr)
			}
		}))
		const debts = 300
		all := make([]*attempt, debts)
		for i := range all {
			all[i] = newAttempt(t, n, fmt.Sprint("key-", i))
			all[i].acquire().want(t, Granted)
		}
		lockedOut.Store(true)
		m.Cut()
		for _, a := range all {
			a.release()
		}
		time.Sleep(2 * time.Second) // the bubble's time, as below
		if n.LoginRefused("") == nil {
			t.Fatal("the node is not suspended")
		}
		dials.Store(0)
		const seconds = 10
		time.Sleep(seconds * time.Second)
		if got, limit := dials.Load(), int64(seconds*time.Second/probePause)+5; got > limit {
			t.Errorf("%d dials in %d s, want %d at most", got, seconds, limit)
		}
		if got := n.Debts(); got != debts {
			t.Errorf("%d debts", got)
		}
		lockedOut.Store(false)
		time.Sleep(time.Second)
		if got := n.Debts(); got != 0 {
			t.Errorf("%d debts a second after the node was back", got)
		}
	})
}
