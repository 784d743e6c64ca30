package flightlock_test

import (
	"errors"
	"fmt"
	"regexp"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A server has reached maxclients through others that leak connections, or its password was
// changed. Connections that it accepted before still work, among them the one that refreshes a
// lock. A refused login, for a connection that the Client wants for something else, is no reason to
// lose the lock.
func TestAHeldLockOutlivesALoginThatIsRefused(t *testing.T) {
	t.Parallel()
	for name, refuse := range map[string]func(admin *redis.Conn){
		"maxclients": func(admin *redis.Conn) {
			info := admin.Info(t.Context(), "clients").Val()
			must(t, admin.ConfigSet(t.Context(), "maxclients",
				regexp.MustCompile(`connected_clients:(\d+)`).FindStringSubmatch(info)[1]).Err())
		},
		"password": func(admin *redis.Conn) {
			must(t, admin.Do(t.Context(), "ACL", "SETUSER", "app", "resetpass", ">new").Err())
		},
	} {
		for cause, dial := range map[string]func(admin *redis.Conn, c *flightlock.Client){
			"burst": func(_ *redis.Conn, c *flightlock.Client) {
				var wg sync.WaitGroup
				for i := range 200 {
					wg.Go(func() {
						if l, err := c.TryLock(t.Context(), fmt.Sprint("other", i), time.Second); err == nil {
							_ = l.Release(t.Context())
						}
					})
				}
				wg.Wait()
			},
			"scripts flushed": func(admin *redis.Conn, c *flightlock.Client) {
				must(t, admin.ScriptFlush(t.Context()).Err())
				_, _ = c.TryLock(t.Context(), "other", time.Second)
			},
		} {
			if inAHurry() && (name == "maxclients") == (cause == "burst") {
				continue
			}
			t.Run(name+"/"+cause, func(t *testing.T) {
				t.Parallel()
				s := redistest.StartServer(t)
				s.Do(t, "ACL", "SETUSER", "app", "on", ">old", "~*", "&*", "+@all")
				admin := s.Client(t).Conn()
				defer admin.Close()
				c := mustOpen(t, flightlock.Options{NodeTimeout: time.Second}, "redis://app:old@"+s.Addr())
				l := mustLock(t, c, "held", 3*time.Second)
				must(t, l.AutoRefresh(flightlock.RefreshPolicy{}))
				time.Sleep(1200 * time.Millisecond) // its refresh has a connection, and the scripts are known
				must(t, l.Err())
				refuse(admin)
				time.Sleep(1200 * time.Millisecond) // it is refreshed meanwhile
				must(t, l.Err())                    // the connection goes on
				dial(admin, c)
				time.Sleep(4 * time.Second) // more than its ttl
				if err := l.Err(); errors.Is(err, flightlock.ErrLockLost) {
					t.Errorf("%v; suspended: %d", err, c.Stats().Suspended)
				}
				must(t, admin.ConfigSet(t.Context(), "maxclients", "1000").Err())
				_ = l.Release(t.Context())
			})
		}
	}
}
