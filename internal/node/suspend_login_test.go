package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// lockout makes a server refuse the logins of a client, or accept them again.
type lockout struct {
	name           string
	client         func(*redis.Options)
	refuse, accept []string // commands
	says           string   // why
}

var lockouts = []lockout{
	{
		"WRONGPASS", func(o *redis.Options) { o.Username, o.Password = "app", "old" },
		[]string{"ACL SETUSER app resetpass >new"}, []string{"ACL SETUSER app >old"}, "WRONGPASS",
	},
	{
		"user off", func(o *redis.Options) { o.Username, o.Password, o.ClientName = "app", "old", "name" },
		[]string{"ACL SETUSER app off"}, []string{"ACL SETUSER app on"}, "WRONGPASS",
	},
	{
		"NOAUTH to the handshake", func(o *redis.Options) { o.ClientName = "name" },
		[]string{"CONFIG SET requirepass new"}, []string{"CONFIG SET requirepass ", "ACL SETUSER default nopass"},
		"NOAUTH",
	},
	{
		"NOAUTH to commands", func(o *redis.Options) {},
		[]string{"CONFIG SET requirepass new"}, []string{"CONFIG SET requirepass ", "ACL SETUSER default nopass"},
		"NOAUTH",
	},
	{
		"clients", func(o *redis.Options) {},
		[]string{"CONFIG SET maxclients 1"}, []string{"CONFIG SET maxclients 100"}, "max number of clients",
	},
	{
		"clients, with a name", func(o *redis.Options) {
			o.Username, o.Password, o.ClientName = "app", "old", "name"
		},
		[]string{"CONFIG SET maxclients 1"}, []string{"CONFIG SET maxclients 100"}, "max number of clients",
	},
}

// A server that refuses all logins is suspended like one that is silent: it is probed, and its
// requests fail at once, with the reason. They do not dial, each by itself. It is reported once,
// and soon back.
func TestAServerThatRefusesLoginsIsLeftAlone(t *testing.T) {
	t.Parallel()
	for _, lo := range lockouts {
		t.Run(lo.name, func(t *testing.T) {
			t.Parallel()
			s := redistest.StartServer(t)
			admin := s.Client(t, func(o *redis.Options) { o.PoolSize = 1 }).Conn()
			defer admin.Close()
			do(t, admin, "ACL SETUSER app on >old ~* &* +@all")
			n := newNode(t, s.Client(t, quick, lo.client))
			var told changes
			n.Changed = told.add
			newAttempt(t, n, "warm").acquire().want(t, Granted)
			settle()

			before := connections(t, admin)
			for _, cmd := range lo.refuse {
				do(t, admin, cmd)
			}
			do(t, admin, "CLIENT KILL TYPE normal")
			began := time.Now()
			hammer(t, n, 8, 300)
			dialled := connections(t, admin) - before
			if most := 20 + 2*int(time.Since(began)/redialEvery); dialled > most {
				t.Errorf("%d connections in %v, want %d at most", dialled, time.Since(began), most)
			}
			eventuallySuspended(t, n, true)
			redistest.Eventually(t, patience, "the reason is reported", func() bool {
				rep := newAttempt(t, n, "k").acquire().want(t, Failed)
				return strings.Contains(rep.Err.Error(), lo.says) &&
					strings.Contains(rep.Err.Error(), conn.ErrLogin.Error())
			})

			for _, cmd := range lo.accept {
				do(t, admin, cmd)
			}
			eventuallySuspended(t, n, false)
			newAttempt(t, n, "again").acquire().want(t, Granted)
			told.want(t, lo.says)
		})
	}
}

// A server that is not Redis at all is suspended, too, and dialed as rarely.
func TestWhatIsNoRedisIsLeftAlone(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var dialled atomic.Int32
	go func() { // ends with l
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			dialled.Add(1)
			_, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
			_ = c.Close()
		}
	}()
	n := newNode(t, redistest.StartServer(t).Client(t, at(l.Addr().String()), quick))
	began := time.Now()
	hammer(t, n, 8, 300)
	if most := 20 + 2*int(time.Since(began)/redialEvery); int(dialled.Load()) > most {
		t.Errorf("%d connections in %v, want %d at most", dialled.Load(), time.Since(began), most)
	}
	eventuallySuspended(t, n, true)
}

// do executes a command given in words; a space at the end is an empty one.
func do(t *testing.T, c *redis.Conn, command string) {
	t.Helper()
	var args []any
	for word := range strings.SplitSeq(command, " ") {
		args = append(args, word)
	}
	if err := c.Do(context.Background(), args...).Err(); err != nil {
		t.Fatalf("%s: %v", command, err)
	}
}

// connections is how many the server has accepted so far, or refused.
func connections(t *testing.T, c *redis.Conn) (n int) {
	t.Helper()
	info, err := c.Info(context.Background(), "stats").Result()
	if err != nil {
		t.Fatal(err)
	}
	return connectionsOf(t, info)
}

func connectionsOf(t *testing.T, stats string) (n int) {
	t.Helper()
	for _, name := range []string{"total_connections_received", "rejected_connections"} {
		found := regexp.MustCompile(name + `:(\d+)`).FindStringSubmatch(stats)
		m, err := strconv.Atoi(found[1])
		if err != nil {
			t.Fatal(err)
		}
		n += m
	}
	return n
}

// A Cluster that has refused all logins so far has no master that could be suspended: its topology
// is requested as rarely as a suspended server is probed.
func TestAClusterThatRefusesLoginsIsLeftAlone(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3)
	rights := func(rights ...any) {
		for _, s := range cluster.Servers() {
			s.Do(t, append([]any{"ACL", "SETUSER", "app", "~*", "&*", "+@all"}, rights...)...)
		}
	}
	received := func() (n int) {
		for _, s := range cluster.Servers() {
			n += connectionsOf(t, s.Do(t, "INFO", "stats").(string))
		}
		return n
	}
	rights("off", ">secret")
	c := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: cluster.Addrs(), Username: "app", Password: "secret", DialerRetries: 1,
	})
	defer c.Close()
	n := newNode(t, c)
	before, began := received(), time.Now()
	hammer(t, n, 8, 100)
	dialled := received() - before
	// Each of the masters is probed, several times, for each time that the Cluster is.
	if most := 60 + 20*int(time.Since(began)/redialEvery); dialled > most {
		t.Errorf("%d connections in %v, want %d at most", dialled, time.Since(began), most)
	}
	rights("on")
	redistest.Eventually(t, patience, "it locks", func() bool {
		e := newAttempt(t, n, "k").acquire()
		return (<-e.heard).Kind == Granted
	})
}

// A server that was down, and comes back with another password, is reported again: the fix is a
// different one now.
func TestAServerThatComesBackWithAnotherPassword(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	s.Do(t, "ACL", "SETUSER", "app", "on", ">old", "~*", "&*", "+@all")
	p := redistest.StartProxy(t, s.Addr())
	n := newNode(t, s.Client(t, at(p.Addr()), quick,
		func(o *redis.Options) { o.Username, o.Password = "app", "old" }))
	told := make(chan error, 10)
	n.Changed = func(_ string, err error) { told <- err }
	next := func() error {
		select {
		case err := <-told:
			return err
		case <-time.After(patience):
			t.Fatal("nothing was reported")
			return nil
		}
	}
	newAttempt(t, n, "k").acquire().want(t, Granted)
	_ = p.Refuse(true)
	p.ResetAll()
	for range 3 {
		newAttempt(t, n, "k2").acquire().want(t, Failed)
	}
	if err := next(); err == nil || errors.Is(err, conn.ErrLogin) {
		t.Errorf("%v was reported", err)
	}
	s.Do(t, "ACL", "SETUSER", "app", "resetpass", ">new")
	_ = p.Refuse(false)
	if err := next(); !errors.Is(err, conn.ErrLogin) {
		t.Errorf("%v was reported", err)
	}
	if err := n.LoginRefused(""); !errors.Is(err, conn.ErrLogin) {
		t.Errorf("it is suspended for %v", err)
	}
	s.Do(t, "ACL", "SETUSER", "app", ">old")
	if err := next(); err != nil {
		t.Errorf("%v was reported", err)
	}
}

// A connection on which nobody is logged in, because the provider had no password yet, is given up when a
// probe is let in: the node is used again without a restart of the client.
func TestAConnectionWithoutLoginIsGivenUp(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	s.Do(t, "ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all")
	s.Do(t, "ACL", "SETUSER", "default", "resetpass", ">admin")
	var known atomic.Bool
	n := newNode(t, redis.NewClient(&redis.Options{Addr: s.Addr(), DialerRetries: 1,
		CredentialsProviderContext: func(context.Context) (string, string, error) {
			if known.Load() {
				return "app", "secret", nil
			}
			return "", "", nil
		}}))
	t.Cleanup(func() { _ = n.client.Close() })
	rep := newAttempt(t, n, "k").acquire().want(t, Failed)
	if !strings.Contains(rep.Err.Error(), "NOAUTH") {
		t.Fatal(rep.Err)
	}
	known.Store(true)
	redistest.Eventually(t, patience, "it locks", func() bool {
		e := newAttempt(t, n, "k").acquire()
		return (<-e.heard).Kind == Granted
	})
}

// A server that refuses a connection and closes it says why, and that is why requests fail, from the first
// one on: not that a write has failed.
func TestTheReasonOfARefusalIsThatOfARequest(t *testing.T) {
	const text = "ERR max number of clients reached"
	for writes := range 4 {
		t.Run(fmt.Sprintf("%d writes", writes), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := redis.NewClient(&redis.Options{
					Dialer:                   redistest.RefusingDialer(text, writes),
					MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
				})
				t.Cleanup(func() { _ = c.Close() })
				n := startNode(t, c, 100*time.Millisecond)
				for range 3 {
					err := newAttempt(t, n, "k").acquire().want(t, Failed).Err
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
