package servers

import (
	"context"
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
	"github.com/flightlock/flightlock/lua"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// This file has servers of other kinds than Redis 7 and later.

// If scripts may access only the keys that they declare on one node of three, all is as on others: keys can
// be locked, by several clients in turn, a release grants the lock to the next, caches work, Check has
// nothing to say of it, and once it has lost its data it has no vote.
func TestScriptsThatMayAccessOnlyWhatTheyDeclare(t *testing.T) {
	t.Parallel()
	var log testkit.LogBuffer
	opts := lockkit.Patient
	opts.Logger = slog.New(slog.NewTextHandler(&log, nil))
	lost := redistest.StartServer(t)
	strict := redistest.StartNamed(t, "declared-keys", lost.Addr()).Addr()
	urls := []string{"redis://" + strict}
	for range 2 {
		urls = append(urls, "redis://"+redistest.StartServer(t).Addr())
	}
	c, other := lockkit.Open(t, opts, urls...), lockkit.Open(t, lockkit.Patient, urls...)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	testkit.Must(t, c.Ready(ctx))
	lockkit.Many(t, c, 8, 20)
	granted(t, ctx, c, other)
	useCache(t, ctx, c, strict)

	r := lockkit.Check(t, c)
	for _, about := range []string{"quarantine", "script rights", "pubsub rights"} {
		lockkit.WantFinding(t, r, strict, about, flightlock.StatusOK)
	}
	if n := c.Stats().Unguarded; n != 0 || log.Count("quarantine is off") > 0 {
		t.Errorf("%d nodes are unguarded; the log:\n%s", n, log.String())
	}
	lost.Do(t, "FLUSHALL")
	lockkit.LockUntilQuarantined(t, c, "k", 1)
}

// granted has two clients lock one key in turn until a release of one has granted the lock to the other,
// without an attempt of that one that wins. (A holder that never had to wait for the key grants it to
// nobody.)
func granted(t *testing.T, ctx context.Context, clients ...*flightlock.Client) {
	t.Helper()
	for range 20 {
		contend(t, ctx, clients...)
		if clients[0].Stats().Grants > 0 && clients[1].Stats().Grants > 0 {
			return
		}
	}
	t.Error("no release has granted the lock")
}

// useCache checks that a cache whose values are at addr works.
func useCache(t *testing.T, ctx context.Context, c *flightlock.Client, addr string) {
	t.Helper()
	client := redis.NewClient(&redis.Options{Addr: addr})
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
}

// On nodes that are Clusters behind one address each, all keys can be locked, by several clients in turn, and
// caches work. That there is no quarantine is in the log, once for each node, in Check, Stats and the
// metrics. One such node among others suffices for that.
func TestAClusterBehindOneAddressHasNoQuarantine(t *testing.T) {
	t.Parallel()
	for _, others := range []int{0, 2} {
		t.Run(fmt.Sprintf("%d others", others), func(t *testing.T) {
			t.Parallel()
			var urls, odd []string
			for i := range 3 - others {
				odd = append(odd, redistest.StartNamed(t, "one-endpoint", clusters[i].Get(t).Addrs()...).Addr())
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
			lockkit.Many(t, c, 8, 20)
			for i := range 60 {
				lockkit.Release(t, lockkit.Lock(t, c, fmt.Sprint("key ", i), time.Minute))
			}
			contend(t, ctx, c, lockkit.Open(t, lockkit.Patient, urls...))

			const says = "CROSSSLOT"
			redistest.Eventually(t, 30*time.Second, "the log and Stats have all nodes", func() bool {
				n := 0
				for _, addr := range odd {
					n += log.Count("level=WARN", "quarantine is off", addr, says, "fix=")
				}
				return n == len(odd) && c.Stats().Unguarded == int64(len(odd))
			})
			r := lockkit.Check(t, c)
			for _, addr := range odd {
				lockkit.WantFinding(t, r, addr, "quarantine", flightlock.StatusWarn, "off", says)
				lockkit.WantFinding(t, r, addr, "script rights", flightlock.StatusOK)
				lockkit.WantFinding(t, r, addr, "pubsub rights", flightlock.StatusOK)
			}
			if others > 0 {
				lockkit.WantFinding(t, r, strings.TrimPrefix(urls[0], "redis://"), "quarantine", flightlock.StatusWarn,
					"off", odd[0])
			}
			useCache(t, ctx, c, odd[0])
		})
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
				odd = append(odd, redistest.StartKind(t, redistest.Apart(lua.Marker, part), servers[i].Addr()))
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
