package outage

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// outages are the ways in which a node is out of reach.
var outages = map[string]func(n *redistest.MemNode, on bool){
	"refused": (*redistest.MemNode).Down,
	"stopped": (*redistest.MemNode).Stall,
	"lost":    (*redistest.MemNode).Lose,
	"reset, then lost": func(n *redistest.MemNode, on bool) {
		if on {
			n.Cut()
		}
		n.Lose(on)
	},
}

const (
	outageTTL         = time.Second
	outageNodeTimeout = 50 * time.Millisecond
	outageRoundTrip   = 200 * time.Microsecond
)

// outageClient is a client of the nodes, each a round trip away. All are dialled, and have the scripts.
func outageClient(t *testing.T, nodes []*redistest.MemNode,
	clients []redis.UniversalClient) *flightlock.Client {
	for _, n := range nodes {
		n.SetDelay(outageRoundTrip / 2)
	}
	c := lockkit.New(t, flightlock.Options{NodeTimeout: outageNodeTimeout}, clients...)
	lockkit.Release(t, lockkit.Lock(t, c, "warm", outageTTL))
	return c
}

// outage has nodes out of reach for so long, and reports for how long each lock was valid when that was over.
func outage(set func(*redistest.MemNode, bool), nodes []*redistest.MemNode, lasts time.Duration,
	locks ...*flightlock.Lock) (left []time.Duration) {
	for _, n := range nodes {
		set(n, true)
	}
	time.Sleep(lasts)
	for _, l := range locks {
		left = append(left, time.Until(l.Until()))
	}
	for _, n := range nodes {
		set(n, false)
	}
	return left
}

// A lock that is refreshed survives an outage of a majority of the nodes if more than NodeTimeout and a round
// trip are left of its validity when the outage is over, whatever the moments in which the outage begins and
// ends.
func TestALockOutlivesAnOutage(t *testing.T) {
	for how, set := range outages {
		for _, lasts := range []time.Duration{
			200 * time.Millisecond, 600 * time.Millisecond, 700 * time.Millisecond,
		} {
			t.Run(fmt.Sprintf("%s/%v", how, lasts), func(t *testing.T) {
				testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
					c := outageClient(t, nodes, clients)
					locks := make([]*flightlock.Lock, testkit.Full(60, 20))
					for i := range locks { // at all moments of an interval between refreshes
						locks[i] = lockkit.Lock(t, c, fmt.Sprint(i), outageTTL)
						testkit.Must(t, locks[i].AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
						time.Sleep(outageTTL / 3 / time.Duration(len(locks)))
					}
					left := outage(set, nodes[:2], lasts, locks...)
					time.Sleep(2 * outageTTL)
					for i, l := range locks {
						if err := l.Err(); err != nil && left[i] > outageNodeTimeout+outageRoundTrip {
							t.Errorf("lost with %v left: %v", left[i], err)
						}
						_ = l.Release(context.Background())
					}
				})
			})
		}
	}
}

// So does a lock that is the only one, and asks for all probes itself, of one node too.
func TestALoneLockOutlivesAnOutage(t *testing.T) {
	for how, set := range outages {
		for _, n := range []int{1, 3} {
			t.Run(fmt.Sprintf("%s/%d", how, n), func(t *testing.T) {
				testkit.Bubble(t, n, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
					c := outageClient(t, nodes, clients)
					for phase := range 32 {
						l := lockkit.Lock(t, c, "k", outageTTL)
						testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
						time.Sleep(outageTTL + time.Duration(phase)*outageTTL/3/32)
						left := outage(set, nodes[:n/2+1], time.Duration(600+phase%4*50)*time.Millisecond, l)[0]
						time.Sleep(outageTTL)
						if err := l.Err(); err != nil && left > outageNodeTimeout+outageRoundTrip {
							t.Errorf("phase %d: lost with %v left: %v", phase, left, err)
						}
						_ = l.Release(context.Background())
						time.Sleep(2 * outageTTL) // also what was left on a node is over
					}
				})
			})
		}
	}
}

// A retry that its strategy would make too late is made while there is time, as long as the strategy retries
// at all.
func TestTheLastRetryIsInTime(t *testing.T) {
	for name, tc := range map[string]struct {
		retry    flightlock.RetryStrategy
		survives bool
	}{
		"late":  {flightlock.LimitedRetry(10*time.Second, 1), true},
		"never": {flightlock.LimitedRetry(1<<63-1, 1), false},
		"none":  {flightlock.NoRetry(), false},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				c := outageClient(t, nodes, clients)
				l := lockkit.Lock(t, c, "k", outageTTL)
				testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Retry: tc.retry}))
				outage((*redistest.MemNode).Stall, nodes, outageTTL/2) // the first refresh fails
				time.Sleep(outageTTL)
				if err := l.Err(); (err == nil) != tc.survives {
					t.Errorf("the lock after the outage: %v", err)
				}
				_ = l.Release(context.Background())
			})
		})
	}
}
