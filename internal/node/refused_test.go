package node

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// A server that refuses a connection and closes it says why, and that is why requests fail, from the first one on: not
// that a write has failed.
func TestTheReasonOfARefusalIsThatOfARequest(t *testing.T) {
	const text = "ERR max number of clients reached"
	for writes := range 4 {
		for _, here := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d writes, here=%v", writes, here), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					c := redis.NewClient(&redis.Options{
						Dialer:                   redistest.RefusingDialer(text, writes),
						MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
					})
					t.Cleanup(func() { _ = c.Close() })
					n := newAlone(t, c, 100*time.Millisecond)
					n.servers[0].fast.Store(here)
					for range 3 {
						a := newAttempt(t, n, "k")
						reply := a.acquire
						if here {
							reply = a.acquireHere
						}
						err := reply().want(t, Failed).Err
						if !strings.Contains(err.Error(), text) || strings.Contains(err.Error(), "broken pipe") {
							t.Errorf("it failed with %v", err)
						}
					}
					if n.LoginRefused("") == nil {
						t.Errorf("the node lets nobody in, and is %v", n.SuspendedFor())
					}
				})
			})
		}
	}
}
