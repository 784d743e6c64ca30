package setup

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// This file has servers of other kinds than Redis 6.2 and later.

// unguarded makes n nodes whose scripts may access only the keys that they declare, and the words with which each
// kind refuses others.
var unguarded = map[string]struct {
	addr func(t *testing.T) string
	says string
}{
	"declared keys only": {
		func(t *testing.T) string { return redistest.StartDeclaredOnly(t, redistest.StartServer(t), "").Addr() },
		"undeclared key",
	},
	"a Cluster behind one address": {
		func(t *testing.T) string {
			return redistest.StartOneAddress(t, redistest.StartCluster(t, 3), node.SlotOf).Addr()
		},
		"non local key",
	},
}

// On nodes that let scripts access only the keys that they declare, all keys can be locked, by
// several clients in turn, and caches work. That there is no quarantine is in the log, once for
// each node, in Check, Stats and the metrics. One such node among others suffices for that.
func TestScriptsThatMayAccessOnlyWhatTheyDeclare(t *testing.T) {
	t.Parallel()
	for name, kind := range unguarded {
		for _, others := range []int{0, 2} {
			t.Run(fmt.Sprintf("%s, %d others", name, others), func(t *testing.T) {
				t.Parallel()
				var urls, odd []string
				for range 3 - others {
					odd = append(odd, kind.addr(t))
				}
				for range others {
					urls = append(urls, "redis://"+redistest.StartServer(t).Addr())
				}
				for _, addr := range odd {
					urls = append(urls, "redis://"+addr)
				}
				var log testkit.LogBuffer
				opts := lockkit.Patient
				opts.Logger = slog.New(slog.NewTextHandler(&log, nil))
				c := lockkit.Open(t, opts, urls...)
				ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
				defer cancel()
				testkit.Must(t, c.Ready(ctx))
				lockMany(t, c, 8, 20)
				for i := range 60 {
					lockkit.Release(t, lockkit.Lock(t, c, fmt.Sprint("key ", i), time.Minute))
				}
				contend(t, ctx, c, lockkit.Open(t, lockkit.Patient, urls...))

				redistest.Eventually(t, 30*time.Second, "the log and Stats have all nodes", func() bool {
					n := 0
					for _, addr := range odd {
						n += log.Count("level=WARN", "quarantine is off", addr, kind.says, "fix=")
					}
					return n == len(odd) && c.Stats().Unguarded == int64(len(odd))
				})
				r := lockkit.Check(t, c)
				for _, addr := range odd {
					lockkit.WantFinding(t, r, addr, "quarantine", flightlock.StatusWarn, "off", kind.says)
					lockkit.WantFinding(t, r, addr, "script rights", flightlock.StatusOK)
					lockkit.WantFinding(t, r, addr, "pubsub rights", flightlock.StatusOK)
				}
				if others > 0 {
					lockkit.WantFinding(t, r, strings.TrimPrefix(urls[0], "redis://"), "quarantine", flightlock.StatusWarn, "off",
						odd[0])
				}

				client := redis.NewClient(&redis.Options{Addr: odd[0]})
				defer client.Close()
				cache, err := rediscache.New(c, client, fetch.Each(func(_ context.Context, key string) (string, error) {
					return "value of " + key, nil
				}), rediscache.Options[string]{Fresh: time.Minute})
				testkit.Must(t, err)
				defer cache.Close(ctx)
				keys := []string{"a", "b", "c", "d", "e", "f"}
				for range 2 {
					got, err := cache.GetMany(ctx, keys)
					if err != nil || len(got) != len(keys) || got["f"] != "value of f" {
						t.Errorf("GetMany: %v, %v", got, err)
					}
				}
				testkit.Must(t, cache.Invalidate(ctx, keys...))
			})
		}
	}
}

// Which kind of server a node is, is found again whenever the node lost its scripts, as after a
// restart: then there is a quarantine again. One that refuses only some slots is found by the first
// lock there, and all keys can be locked.
func TestTheKindOfAServerIsFoundAgain(t *testing.T) {
	t.Parallel()
	tag := "{" + node.SlotTag("any") + "}"
	key := "a " + tag + " key"
	for name, part := range map[string]string{"all slots": "", "one slot": tag} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var servers []*redistest.Server
			var odd []*redistest.Endpoint
			var urls []string
			for i := range 3 {
				servers = append(servers, redistest.StartServer(t))
				odd = append(odd, redistest.StartDeclaredOnly(t, servers[i], part))
				urls = append(urls, "redis://"+odd[i].Addr())
			}
			var log testkit.LogBuffer
			opts := lockkit.Patient
			opts.MaxTTL = 10 * time.Second // a node that is guarded from now on is new, or may have lost its locks
			opts.Logger = slog.New(slog.NewTextHandler(&log, nil))
			c := lockkit.Open(t, opts, urls...)
			testkit.Must(t, c.Ready(t.Context()))
			for _, key := range []string{"even", key, "even", "another " + tag} {
				lockkit.Release(t, lockkit.Lock(t, c, key, opts.MaxTTL))
			}
			redistest.Eventually(t, 30*time.Second, "all nodes are known to be odd", func() bool {
				lockkit.Release(t, lockkit.Lock(t, c, key, opts.MaxTTL))
				return c.Stats().Unguarded == 3
			})
			for i := range servers {
				odd[i].SetLenient(true)
				servers[i].Do(t, "SCRIPT", "FLUSH")
			}
			redistest.Eventually(t, 30*time.Second, "none is any more", func() bool {
				lockkit.Release(t, lockkit.Lock(t, c, key, opts.MaxTTL))
				return c.Stats().Unguarded == 0
			})
			servers[0].Do(t, "FLUSHALL")
			lockkit.LockUntilQuarantined(t, c, key, 1)
			lockkit.Close(t, c) // everything has been logged by then
			for _, e := range odd {
				if log.Count("level=WARN", "quarantine is off", e.Addr()) != 1 ||
					log.Count("level=INFO", "as the quarantine", e.Addr()) != 1 {
					t.Errorf("not one line of each kind for %s:\n%s", e.Addr(), log.String())
				}
			}
		})
	}
}

// contend has two clients lock one key in turn, so that each waits for the other.
func contend(t *testing.T, ctx context.Context, clients ...*flightlock.Client) {
	t.Helper()
	done := make(chan error)
	for _, c := range clients {
		go func() {
			for range 20 {
				l, err := c.SingleFlightLock(ctx, "contended", time.Minute, nil)
				if err != nil {
					done <- err
					return
				}
				if err := l.Release(ctx); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for range clients {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// Redis 6.0 grants locks, but no process is registered as waiting for one. Ready says so, with the
// node, its version and what it takes, and so does Check; also if it is one node of three.
func TestServersThatAreTooOld(t *testing.T) {
	t.Parallel()
	server := redistest.StartServer(t)
	old, version := redistest.StartOld(t, server).Addr(), server.Version(t)
	urls := []string{"redis://" + redistest.StartServer(t).Addr(), "redis://" + redistest.StartServer(t).Addr()}
	for _, urls := range [][]string{{"redis://" + old}, append(urls, "redis://"+old)} {
		c := lockkit.Open(t, lockkit.Patient, urls...)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		for range 2 {
			err := c.Ready(ctx)
			if !errors.Is(err, flightlock.ErrUnavailable) || ctx.Err() != nil {
				t.Fatalf("after %v: %v", ctx.Err(), err)
			}
			for _, want := range []string{old, "version " + version, "Redis 6.2", "ZADD LT"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("Ready does not say %q: %v", want, err)
				}
			}
		}
		lockkit.WantFinding(t, lockkit.Check(t, c), old, "script rights", flightlock.StatusFail, "ZADD", "6.2")
	}
}
