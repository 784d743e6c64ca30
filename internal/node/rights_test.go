package node

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A login that is refused for a moment is not final, and one that is refused for a second is.
func TestARefusedLoginIsFinalAfterASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := newNode(t, m.Client(t))
		m.RequireAuth("another")
		refused := func(final bool) {
			t.Helper()
			answer := newAttempt(t, n, "k").acquire().want(t, Failed).Err
			synctest.Wait()
			for _, err := range []error{answer, n.SuspendedFor()} {
				if !conn.Says(err, conn.Rights) || Final(err) != final {
					t.Errorf("final %v: %v", !final, err)
				}
			}
		}
		refused(false)
		time.Sleep(finalAfter / 2)
		refused(false)
		time.Sleep(finalAfter / 2)
		refused(true)

		time.Sleep(redialEvery / 2) // between two logins: miniredis reads passwords without its mutex
		m.RequireAuth("")
		newAttempt(t, n, "k").acquire().want(t, Failed) // locks what the next login locks, too
		time.Sleep(forgottenAfter + time.Second)
		newAttempt(t, n, "k").acquire().want(t, Granted)
		m.RequireAuth("another")
		m.Cut()
		time.Sleep(redialEvery)
		refused(false)
	})
}

// A command that is refused is final a second later. If there is a provider of credentials, it is asked for
// those of then, and the link is made anew.
func TestARefusedCommandIsFinalAfterASecond(t *testing.T) {
	for want, provide := range []func() (user, password string){nil, func() (string, string) { return "", "" }} {
		synctest.Test(t, func(t *testing.T) { refuseCommand(t, want, provide) })
	}
}

func refuseCommand(t *testing.T, want int, provide func() (user, password string)) {
	t.Helper()
	m := redistest.StartMemNode(t, "10.0.0.1:6379")
	n := newNode(t, m.Client(t, func(o *redis.Options) { o.CredentialsProvider = provide }))
	newAttempt(t, n, "k").acquire().want(t, Granted)
	conns := m.Mini.TotalConnectionCount()
	refuse := func(c *server.Peer, cmd string, _ ...string) bool {
		if cmd == "EVALSHA" {
			c.WriteError("NOPERM this user has no permissions to run the 'get' command")
		}
		return cmd == "EVALSHA"
	}
	m.Mini.Server().SetPreHook(refuse)
	for range 4 {
		if rep := newAttempt(t, n, "j").acquire().want(t, Failed); Final(rep.Err) {
			t.Errorf("final: %v", rep.Err)
		}
		time.Sleep(finalAfter / 4)
	}
	if rep := newAttempt(t, n, "j").acquire().want(t, Failed); !Final(rep.Err) {
		t.Errorf("not final: %v", rep.Err)
	}
	if made := m.Mini.TotalConnectionCount() - conns; made != want {
		t.Errorf("%d connections were made", made)
	}
}
