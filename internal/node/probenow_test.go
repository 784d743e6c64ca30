package node

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// However many refreshes have too few votes, a server that is suspended gets a probe for them every quarter of
// NodeTimeout at most, also if its dials hang for minutes; one that answers none, because it needs none; and one that
// refuses logins is probed as ever.
func TestProbesForRefreshesAreBounded(t *testing.T) {
	const lasts = 2 * time.Second
	for name, tc := range map[string]struct {
		change func(m *redistest.MemNode, hangs *atomic.Bool)
		most   func(n *Node) int64
	}{
		"well":    {func(*redistest.MemNode, *atomic.Bool) {}, func(*Node) int64 { return 0 }},
		"refused": {func(m *redistest.MemNode, _ *atomic.Bool) { m.Down(true) }, everyQuarter},
		"lost":    {func(m *redistest.MemNode, _ *atomic.Bool) { m.Lose(true) }, everyQuarter},
		"hangs": {func(m *redistest.MemNode, hangs *atomic.Bool) { hangs.Store(true); m.Cut() },
			func(*Node) int64 { return probeSpacing*probeTime + 2*lanesPerServer + int64(lasts/probePause) }},
		"no login": {func(m *redistest.MemNode, _ *atomic.Bool) { m.Mini.RequireAuth("other"); m.Cut() },
			func(*Node) int64 { return 4 + int64(lasts/probePause) }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := redistest.StartMemNode(t, "10.0.0.1:6379")
				var hangs atomic.Bool
				var dials atomic.Int64
				end := make(chan struct{})
				defer close(end)
				n := newImpatientNode(t, m.Client(t, func(o *redis.Options) {
					dial := o.Dialer
					o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
						dials.Add(1)
						if hangs.Load() { // and ignores ctx
							<-end
							return nil, errors.New("no connection")
						}
						return dial(ctx, network, addr)
					}
				}))
				newAttempt(t, n, "k").acquire().want(t, Granted)
				tc.change(m, &hangs)
				dials.Store(0)
				for began := time.Now(); time.Since(began) < lasts; time.Sleep(100 * time.Microsecond) {
					newAttempt(t, n, "k2").acquire()
					n.ProbeNow()
				}
				if got, most := dials.Load(), tc.most(n); got > most {
					t.Errorf("%d dials in %v, want %d at most", got, lasts, most)
				}
			})
		})
	}
}

func everyQuarter(n *Node) int64 {
	return 2*lanesPerServer + 2 + int64(2*time.Second/(n.timeout/probeSpacing)+2*time.Second/probePause)
}
