package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A node whose password was changed is suspended, and not dialed for each request: whether all its
// connections have ended, or all but one, or whether they continue and it has lost the scripts,
// which are loaded on a connection of their own. The log says so once, with the fix; so do Check
// and Stats. The node is used again by itself when the password is right again.
func TestANodeThatRefusesTheLogin(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(s *redistest.Server){
		"connections end": func(s *redistest.Server) { s.Do(t, "CLIENT", "KILL", "USER", "app") },
		"all but one": func(s *redistest.Server) {
			ids := regexp.MustCompile(`(?m)^id=(\d+) .* user=app `).FindAllStringSubmatch(s.Do(t, "CLIENT", "LIST").(string), -1)
			for _, id := range ids[1:] {
				s.Do(t, "CLIENT", "KILL", "ID", id[1])
			}
		},
		"scripts are gone": func(s *redistest.Server) { s.Do(t, "SCRIPT", "FLUSH") },
	} {
		t.Run(name, func(t *testing.T) {
			servers, urls := threeForApp(t)
			var log lines
			logger := slog.New(slog.NewTextHandler(&log, nil))
			c := mustOpen(t, flightlock.Options{NodeTimeout: 2 * time.Second, Logger: logger}, urls...)
			lockMany(t, c, 8, 20)
			s := servers[0]
			s.Do(t, "ACL", "SETUSER", "app", "resetpass", ">new")
			end(s)
			before, began := dialled(t, s), time.Now()
			lockMany(t, c, 8, 100)
			if n, most := dialled(t, s)-before, 20+2*int(time.Since(began)/(250*time.Millisecond)); n > most {
				t.Errorf("%d connections in %v, want %d at most", n, time.Since(began), most)
			}
			if name == "all but one" {
				return // it may do without more
			}
			redistest.Eventually(t, 20*time.Second, "it is suspended", func() bool { return c.Stats().Suspended == 1 })
			wantOneLine(t, &log, "level=WARN", "node suspended: login refused", s.Addr(), "WRONGPASS", "right user and password")
			if n := c.Stats().Unverified; n != 0 || strings.Contains(log.text(), "old") {
				t.Errorf("%d nodes are unverified; the log:\n%s", n, log.text())
			}
			wantFinding(t, check(t, c), s.Addr(), "reachable", flightlock.StatusFail, "WRONGPASS", "right user and password")

			s.Do(t, "ACL", "SETUSER", "app", ">old")
			redistest.Eventually(t, 20*time.Second, "it is back", func() bool { return c.Stats().Suspended == 0 })
			wantOneLine(t, &log, "level=INFO", "node is back", s.Addr())
			must(t, servers[1].Kill())
			eventuallyLock(t, c, "k")
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

// While a majority of nodes is suspended because they refuse the user, no strategy waits: somebody has to change
// something first.
func TestWhileAMajorityRefusesTheUserNobodyWaits(t *testing.T) {
	t.Parallel()
	servers, urls := threeForApp(t)
	c := mustOpen(t, flightlock.Options{NodeTimeout: 2 * time.Second}, urls...)
	lockMany(t, c, 2, 2)
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
	if !errors.Is(err, flightlock.ErrUnavailable) || ctx.Err() != nil || !strings.Contains(err.Error(), "WRONGPASS") {
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
			var log lines
			opts := patient
			opts.Logger = slog.New(slog.NewTextHandler(&log, nil))
			c := mustOpen(t, opts, strings.Replace(tc.url, "ADDR", s.Addr(), 1))
			for range 2 { // the second time it is suspended
				r := check(t, c)
				wantFinding(t, r, s.Addr(), "reachable", flightlock.StatusFail, append(tc.says, "login refused")...)
				for _, f := range r.Findings {
					if f.Node != "" && f.Check != "reachable" {
						t.Errorf("nobody is logged in: %+v", f)
					}
				}
				if _, err := c.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrUnavailable) {
					t.Errorf("TryLock: %v", err)
				}
			}
			wantOneLine(t, &log, append(tc.says, "level=WARN", "node suspended: login refused", s.Addr())...)
		})
	}
}

// A server that is busy with a script of somebody else refuses the steps of a login, too. Neither the log nor Check
// take that for a refused login, which the owner of the client would have to mend.
func TestABusyServerRefusesNoLogin(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t, "--busy-reply-threshold", "10")
	p := redistest.StartProxy(t, s.Addr())
	var log lines
	opts := patient
	opts.Logger = slog.New(slog.NewTextHandler(&log, nil))
	c := mustOpen(t, opts, "redis://"+p.Addr())
	lockAndRelease(t, c)

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
	wantFinding(t, check(t, c), p.Addr(), "reachable", flightlock.StatusFail, "BUSY", "SCRIPT KILL")
	for _, f := range check(t, c).Findings {
		if strings.Contains(f.Found, "login") {
			t.Errorf("%+v", f)
		}
	}
	s.Do(t, "SCRIPT", "KILL")
	<-ended
	eventuallyLock(t, c, "k")
	redistest.Eventually(t, 20*time.Second, "the log says so", func() bool { return log.count("node is back") == 1 })
	wantOneLine(t, &log, "level=WARN", "node suspended: it does not answer", "BUSY")
	if log.count("login") != 0 {
		t.Error(log.text())
	}
}

// lockMany has goroutines lock a key of their own each, so many times one after the other.
func lockMany(t *testing.T, c *flightlock.Client, goroutines, times int) {
	t.Helper()
	done := make(chan error, goroutines)
	for g := range goroutines {
		go func() {
			for range times {
				l, err := c.Lock(t.Context(), fmt.Sprint("key", g), 5*time.Second, nil)
				if err == nil {
					err = l.Release(t.Context())
				}
				if err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for range goroutines {
		must(t, <-done)
	}
}

// dialled is the number of connections that a server has accepted so far.
func dialled(t *testing.T, s *redistest.Server) int {
	t.Helper()
	stats := s.Do(t, "INFO", "stats").(string)
	n, err := strconv.Atoi(regexp.MustCompile(`total_connections_received:(\d+)`).FindStringSubmatch(stats)[1])
	must(t, err)
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
				return mustOpen(t, options, urls...)
			}
			for _, params := range []string{"", "?client_name=billing", "?client_name=no%20name", "?protocol=2"} {
				var log lines
				opts := patient
				opts.Logger = slog.New(slog.NewTextHandler(&log, nil))
				c := open(opts, "pw", params)
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				must(t, c.Ready(ctx))
				cancel()
				tryLock(t, c, "k")
				wantFinding(t, check(t, c), servers[0].Addr(), "reachable", flightlock.StatusOK)
				wantFinding(t, check(t, c), servers[0].Addr(), "pubsub rights", flightlock.StatusOK)
				closeClient(t, c) // everything has been logged by then
				for _, s := range servers {
					if log.count("level=WARN", "no name", s.Addr()) != 1 {
						t.Errorf("%q: not one line for %s:\n%s", params, s.Addr(), log.text())
					}
				}
			}
			var clients []redis.UniversalClient
			for _, s := range servers {
				clients = append(clients, s.Client(t, func(o *redis.Options) {
					o.Username, o.Password, o.ClientName = "app", "pw", "billing"
				}))
			}
			tryLock(t, newClient(t, patient, clients...), "k")

			_, err := open(patient, "wrong", "").TryLock(t.Context(), "k", time.Minute)
			if !errors.Is(err, flightlock.ErrUnavailable) || !strings.Contains(err.Error(), "WRONGPASS") {
				t.Error("with a wrong password:", err)
			}
		})
	}
}
