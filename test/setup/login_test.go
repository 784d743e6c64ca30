package setup

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/auth"
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
			testkit.Must(t, admin.ConfigSet(t.Context(), "maxclients",
				regexp.MustCompile(`connected_clients:(\d+)`).FindStringSubmatch(info)[1]).Err())
		},
		"password": func(admin *redis.Conn) {
			testkit.Must(t, admin.Do(t.Context(), "ACL", "SETUSER", "app", "resetpass", ">new").Err())
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
				testkit.Must(t, admin.ScriptFlush(t.Context()).Err())
				_, _ = c.TryLock(t.Context(), "other", time.Second)
			},
		} {
			if testkit.InAHurry() && (name == "maxclients") == (cause == "burst") {
				continue
			}
			t.Run(name+"/"+cause, func(t *testing.T) {
				t.Parallel()
				s := redistest.StartServer(t)
				s.Do(t, "ACL", "SETUSER", "app", "on", ">old", "~*", "&*", "+@all")
				admin := s.Client(t).Conn()
				defer admin.Close()
				c := lockkit.Open(t, lockkit.Patient, "redis://app:old@"+s.Addr())
				l := lockkit.Lock(t, c, "held", 3*time.Second)
				testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
				time.Sleep(1200 * time.Millisecond) // its refresh has a connection, and the scripts are known
				testkit.Must(t, l.Err())
				refuse(admin)
				time.Sleep(1200 * time.Millisecond) // it is refreshed meanwhile
				testkit.Must(t, l.Err())            // the connection goes on
				dial(admin, c)
				time.Sleep(4 * time.Second) // more than its ttl
				if err := l.Err(); errors.Is(err, flightlock.ErrLockLost) {
					t.Errorf("%v; suspended: %d", err, c.Stats().Suspended)
				}
				testkit.Must(t, admin.ConfigSet(t.Context(), "maxclients", "1000").Err())
				_ = l.Release(t.Context())
			})
		}
	}
}

// streaming is a credentials provider that changes the credentials while the client lives.
type streaming struct{}

func (streaming) Subscribe(auth.CredentialsListener) (auth.Credentials, auth.UnsubscribeFunc, error) {
	return auth.NewBasicCredentials("default", ""), func() error { return nil }, nil
}

// A client whose credentials are streamed locks.
func TestStreamedCredentials(t *testing.T) {
	t.Parallel()
	var nodes []redis.UniversalClient
	for range 3 {
		nodes = append(nodes, redistest.StartServer(t).Client(t, func(o *redis.Options) {
			o.StreamingCredentialsProvider = streaming{}
		}))
	}
	c := lockkit.New(t, lockkit.Patient, nodes...)
	lockkit.Release(t, lockkit.Lock(t, c, "k", time.Minute))
}

// A node whose password was changed is suspended, and not dialed for each request: whether all its
// connections have ended, or all but one. The log says so once, with the fix; so do Check
// and Stats. The node is used again by itself when the password is right again.
func TestANodeThatRefusesTheLogin(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(s *redistest.Server){
		"connections end": func(s *redistest.Server) { s.Do(t, "CLIENT", "KILL", "USER", "app") },
		"all but one": func(s *redistest.Server) {
			ids := regexp.MustCompile(`(?m)^id=(\d+) .* user=app `).FindAllStringSubmatch(s.Do(t, "CLIENT",
				"LIST").(string), -1)
			for _, id := range ids[1:] {
				s.Do(t, "CLIENT", "KILL", "ID", id[1])
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			servers, urls := threeForApp(t)
			var log testkit.LogBuffer
			logger := slog.New(slog.NewTextHandler(&log, nil))
			c := lockkit.Open(t, flightlock.Options{NodeTimeout: lockkit.Patience, Logger: logger}, urls...)
			lockkit.Many(t, c, 8, 20)
			s := servers[0]
			s.Do(t, "ACL", "SETUSER", "app", "resetpass", ">new")
			end(s)
			before, began := dialled(t, s), time.Now()
			lockkit.Many(t, c, 8, 100)
			if n, most := dialled(t, s)-before, 20+2*int(time.Since(began)/(250*time.Millisecond)); n > most {
				t.Errorf("%d connections in %v, want %d at most", n, time.Since(began), most)
			}
			if name == "all but one" {
				return // it may do without more
			}
			redistest.Eventually(t, 20*time.Second, "it is suspended", func() bool { return c.Stats().Suspended == 1 })
			testkit.WantOneLine(t, &log, "level=WARN", "node suspended: login refused", s.Addr(), "WRONGPASS",
				"right user and password")
			if n := c.Stats().Unverified; n != 0 || strings.Contains(log.String(), "old") {
				t.Errorf("%d nodes are unverified; the log:\n%s", n, log.String())
			}
			lockkit.WantFinding(t, lockkit.Check(t, c), s.Addr(), "reachable", flightlock.StatusFail, "WRONGPASS",
				"right user and password")

			s.Do(t, "ACL", "SETUSER", "app", ">old")
			redistest.Eventually(t, 20*time.Second, "it is back", func() bool { return c.Stats().Suspended == 0 })
			testkit.WantOneLine(t, &log, "level=INFO", "node is back", s.Addr())
			testkit.Must(t, servers[1].Kill())
			lockkit.EventuallyLock(t, c, "k")
		})
	}
}

// threeForApp starts three servers with a user app, whose password is old, and gives its URLs.
func threeForApp(t *testing.T) (servers []*redistest.Server, urls []string) {
	t.Helper()
	for range 3 {
		s := redistest.StartServer(t)
		s.Do(t, "ACL", "SETUSER", "app", "on", ">old", "~*", "&*", "+@all")
		servers, urls = append(servers, s), append(urls, "redis://app:old@"+s.Addr())
	}
	return servers, urls
}

// While a majority of nodes is suspended because they refuse the user, no strategy waits: somebody has to
// change something first.
func TestWhileAMajorityRefusesTheUserNobodyWaits(t *testing.T) {
	t.Parallel()
	servers, urls := threeForApp(t)
	c := lockkit.Open(t, lockkit.Patient, urls...)
	lockkit.Many(t, c, 2, 2)
	for _, s := range servers[:2] {
		s.Do(t, "ACL", "SETUSER", "app", "resetpass", ">new")
		s.Do(t, "CLIENT", "KILL", "USER", "app")
	}
	redistest.Eventually(t, 20*time.Second, "both are suspended", func() bool {
		_, _ = c.TryLock(t.Context(), "k", time.Second)
		return c.Stats().Suspended == 2
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err := c.SingleFlightLock(ctx, "k", time.Second, nil)
	if !errors.Is(err, flightlock.ErrUnavailable) || ctx.Err() != nil ||
		!strings.Contains(err.Error(), "WRONGPASS") {
		t.Errorf("after %v: %v", ctx.Err(), err)
	}
}

// However a login is refused, Check reports that, with what to do about it, and does not take the
// refusal for the answer to each of its commands: it would advise to grant rights to a user that
// nobody meant. So does the log.
func TestCheckOfARefusedLogin(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		url  string // with the server's address for ADDR
		says []string
	}{
		"the user was forgotten": {"redis://:secret@ADDR", []string{"ERR AUTH", "right user and password"}},
		"a database that is not there": {"redis://app:secret@ADDR/16",
			[]string{"DB index", "CONFIG GET databases"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := redistest.StartServer(t)
			s.Do(t, "ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all")
			s.Do(t, "ACL", "SETUSER", "default", "off")
			var log testkit.LogBuffer
			opts := lockkit.Patient
			opts.Logger = slog.New(slog.NewTextHandler(&log, nil))
			c := lockkit.Open(t, opts, strings.Replace(tc.url, "ADDR", s.Addr(), 1))
			for range 2 { // the second time it is suspended
				r := lockkit.Check(t, c)
				lockkit.WantFinding(t, r, s.Addr(), "reachable", flightlock.StatusFail,
					append(tc.says, "login refused")...)
				for _, f := range r.Findings {
					if f.Node != "" && f.Check != "reachable" {
						t.Errorf("nobody is logged in: %+v", f)
					}
				}
				if _, err := c.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrUnavailable) {
					t.Errorf("TryLock: %v", err)
				}
			}
			testkit.WantOneLine(t, &log, append(tc.says, "level=WARN", "node suspended: login refused", s.Addr())...)
		})
	}
}

// A server that is busy with a script of somebody else refuses the steps of a login, too. Neither the log nor
// Check take that for a refused login, which the owner of the client would have to mend.
func TestABusyServerRefusesNoLogin(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t, "--busy-reply-threshold", "10")
	p := redistest.StartProxy(t, s.Addr())
	var log testkit.LogBuffer
	opts := lockkit.Patient
	opts.Logger = slog.New(slog.NewTextHandler(&log, nil))
	c := lockkit.Open(t, opts, "redis://"+p.Addr())
	lockkit.LockAndRelease(t, c)

	scripts := s.Client(t, func(o *redis.Options) { o.ReadTimeout = -1 })
	ended := make(chan error, 1)
	go func() { ended <- scripts.Eval(context.Background(), "while true do end", nil).Err() }()
	plain := s.Client(t, func(o *redis.Options) { o.Protocol, o.DisableIdentity = 2, true })
	redistest.Eventually(t, 20*time.Second, "it is busy", func() bool {
		err := plain.Ping(t.Context()).Err()
		return err != nil && strings.HasPrefix(err.Error(), "BUSY")
	})
	p.ResetAll()
	redistest.Eventually(t, 20*time.Second, "it is suspended", func() bool {
		_, err := c.TryLock(t.Context(), "k", time.Second)
		return err != nil && strings.Contains(err.Error(), "suspended")
	})
	lockkit.WantFinding(t, lockkit.Check(t, c), p.Addr(), "reachable", flightlock.StatusFail, "BUSY",
		"SCRIPT KILL")
	for _, f := range lockkit.Check(t, c).Findings {
		if strings.Contains(f.Found, "login") {
			t.Errorf("%+v", f)
		}
	}
	s.Do(t, "SCRIPT", "KILL")
	<-ended
	lockkit.EventuallyLock(t, c, "k")
	redistest.Eventually(t, 20*time.Second, "the log says so",
		func() bool { return log.Count("node is back") == 1 })
	testkit.WantOneLine(t, &log, "level=WARN", "node suspended: it does not answer", "BUSY")
	if log.Count("login") != 0 {
		t.Error(log.String())
	}
}

// dialled is the number of connections that a server has accepted so far.
func dialled(t *testing.T, s *redistest.Server) int {
	t.Helper()
	stats := s.Do(t, "INFO", "stats").(string)
	n, err := strconv.Atoi(regexp.MustCompile(`total_connections_received:(\d+)`).FindStringSubmatch(stats)[1])
	testkit.Must(t, err)
	return n
}

// A server that does not let a client name its connections is used without names: of Open's, with
// or without client_name, and of a client that has a ClientName. That is logged once for each node.
// A server that refuses the login refuses it nevertheless.
func TestAServerThatRefusesNames(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(t *testing.T) *redistest.Server{
		"by its ACL": func(t *testing.T) *redistest.Server {
			s := redistest.StartServer(t)
			s.Do(t, "ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-client|setname")
			return s
		},
		"by rename-command": func(t *testing.T) *redistest.Server {
			s := redistest.StartServer(t, "--rename-command", "CLIENT", "")
			s.Do(t, "ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all")
			return s
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			servers := []*redistest.Server{start(t), start(t), start(t)}
			open := func(options flightlock.Options, password, params string) *flightlock.Client {
				var urls []string
				for _, s := range servers {
					urls = append(urls, "redis://app:"+password+"@"+s.Addr()+params)
				}
				return lockkit.Open(t, options, urls...)
			}
			for _, params := range []string{"", "?client_name=billing", "?client_name=no%20name", "?protocol=2"} {
				var log testkit.LogBuffer
				opts := lockkit.Patient
				opts.Logger = slog.New(slog.NewTextHandler(&log, nil))
				c := open(opts, "pw", params)
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				testkit.Must(t, c.Ready(ctx))
				cancel()
				lockkit.TryLock(t, c, "k")
				lockkit.WantFinding(t, lockkit.Check(t, c), servers[0].Addr(), "reachable", flightlock.StatusOK)
				lockkit.WantFinding(t, lockkit.Check(t, c), servers[0].Addr(), "pubsub rights", flightlock.StatusOK)
				lockkit.Close(t, c) // everything has been logged by then
				for _, s := range servers {
					if log.Count("level=WARN", "no name", s.Addr()) != 1 {
						t.Errorf("%q: not one line for %s:\n%s", params, s.Addr(), log.String())
					}
				}
			}
			var clients []redis.UniversalClient
			for _, s := range servers {
				clients = append(clients, s.Client(t, func(o *redis.Options) {
					o.Username, o.Password, o.ClientName = "app", "pw", "billing"
				}))
			}
			lockkit.TryLock(t, lockkit.New(t, lockkit.Patient, clients...), "k")

			_, err := open(lockkit.Patient, "wrong", "").TryLock(t.Context(), "k", time.Minute)
			if !errors.Is(err, flightlock.ErrUnavailable) || !strings.Contains(err.Error(), "WRONGPASS") {
				t.Error("with a wrong password:", err)
			}
		})
	}
}

// Passwords are in no log line and no error, whatever fails.
func TestPasswordsAreNotLogged(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t, "--requirepass", "right")
	var log testkit.LogBuffer
	opts := flightlock.Options{NodeTimeout: lockkit.Patience, Logger: slog.New(slog.NewTextHandler(&log, nil))}
	c, err := flightlock.Open(opts, "redis://:hunter2@"+s.Addr(), "redis://:hunter2@"+redistest.RefusedAddr(t))
	if err != nil {
		t.Fatal(err)
	}
	defer lockkit.Close(t, c)
	for range 5 {
		if _, err := c.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrUnavailable) ||
			strings.Contains(err.Error(), "hunter2") {
			t.Errorf("TryLock: %v", err)
		}
	}
	if strings.Contains(log.String(), "hunter2") {
		t.Errorf("log:\n%s", log.String())
	}
}

// A password that is wrong for a moment, as while it is changed, ends nobody's wait.
func TestAPasswordThatIsWrongForAMoment(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t, "--requirepass", "right")
	var asked atomic.Int32
	c := lockkit.New(t, lockkit.Patient, s.Client(t, func(o *redis.Options) {
		o.CredentialsProvider = func() (user, password string) {
			if asked.Add(1) <= 2 {
				return "", "wrong"
			}
			return "", "right"
		}
	}))
	l, err := c.SingleFlightLock(t.Context(), "k", time.Minute, nil)
	testkit.Must(t, err)
	lockkit.Release(t, l)
}
