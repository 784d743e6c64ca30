package forget

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// Without the right to INFO a deployment works: that is logged once. What leaves a node empty is
// noticed; what leaves it with the data of a snapshot, if the marker's encoding shows it.
func TestQuarantineWithoutINFO(t *testing.T) {
	t.Parallel()
	for _, rights := range []string{"-info", "-info -object", "-info -append", "-info -append -object"} {
		t.Run(rights, func(t *testing.T) {
			t.Parallel()
			sees := rights == "-info"
			tr := lockkit.NewTrio(t, "--dbfilename", "dump.rdb")
			deny := func(s *redistest.Server) {
				args := []any{"ACL", "SETUSER", "default"}
				for _, r := range strings.Fields(rights) {
					args = append(args, r)
				}
				s.Do(t, args...)
			}
			for _, s := range tr.Servers {
				deny(s)
			}
			var log testkit.LogBuffer
			opts := flightlock.Options{MaxTTL: 10 * time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))}
			c := tr.Client(opts)
			redistest.Eventually(t, time.Minute, "all nodes vote", func() bool { // a slow bootstrap is followed by a quarantine
				_, err := c.TryLock(t.Context(), "first", time.Second)
				return err == nil && c.Stats().Quarantined == 0
			})
			lockkit.EventuallyLock(t, c, "k")
			lockkit.WantFree(t, "k", tr.Servers...) // or the snapshot has the lock
			redistest.Eventually(t, 20*time.Second, "the log says that INFO is refused", func() bool {
				return log.Count("+info") == 1
			})
			tr.Servers[0].Do(t, "SAVE")
			testkit.Must(t, tr.Servers[0].Restart())
			deny(tr.Servers[0])
			if sees {
				lockkit.LockUntilQuarantined(t, c, "k", 1)
			} else {
				lockkit.EventuallyLock(t, c, "k")
				testkit.Must(t, tr.Servers[2].Kill())
				lockkit.EventuallyLock(t, c, "k") // by its old data it has the same epoch
				tr.Servers[0].Do(t, "FLUSHALL")
				if _, err := c.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrUnavailable) {
					t.Errorf("a flush was not noticed: %v", err)
				}
			}
			if n := log.Count("+info"); n != 1 {
				t.Errorf("said %d times:\n%s", n, log.String())
			}
		})
	}
}

// Clients begin without the right to INFO, which is granted later, while they run or by a restart.
// After that they do not trust a server that comes back with old data.
func TestNoSecondGrantWhenINFOIsAllowedLater(t *testing.T) {
	t.Parallel()
	for _, byRestart := range []bool{false, true} {
		t.Run(fmt.Sprintf("byRestart=%v", byRestart), func(t *testing.T) {
			a := amnesias[slices.IndexFunc(amnesias, func(a amnesia) bool { return a.name == "stale append-only file" })]
			tr := lockkit.NewTrio(t, a.args...)
			allow := func(right string) {
				for _, s := range tr.Servers {
					s.Do(t, "ACL", "SETUSER", "default", right)
				}
			}
			for _, s := range tr.Servers { // an epoch that began in the same second as its process is not trusted either
				redistest.Eventually(t, 20*time.Second, "a second has passed", func() bool {
					return !infoHas(t, s, "server", "uptime_in_seconds:0")
				})
			}
			allow("-info")
			holder, rival := tr.Client(flightlock.Options{}), tr.Client(flightlock.Options{})
			for _, c := range []*flightlock.Client{holder, rival} {
				lockkit.UseOnAll(t, c, "k", tr.Servers...)
			}
			forget := a.prepare(tr)
			if !byRestart {
				allow("+info")
			}
			held := tr.Hold(holder, "k", time.Minute)
			defer held.Release(context.Background())
			forget()
			allow("+info")
			for i, c := range []*flightlock.Client{rival, tr.Client(flightlock.Options{})} {
				l, err := c.SingleFlightLock(t.Context(), "k", time.Second, flightlock.LimitedRetry(5*time.Millisecond, 5))
				if lost := held.Err(); lost != nil {
					t.Fatalf("the lock was over, so the try says nothing: %v", lost)
				}
				if err == nil {
					t.Errorf("client %d: granted twice, with tokens %d and %d", i, held.Fence(), l.Fence())
				}
				lockkit.LockUntilQuarantined(t, c, fmt.Sprint("other", i), 1)
			}
		})
	}
}

// A right that is revoked, or granted again, while clients run is not a loss of data: they see
// less, or more.
func TestRightsThatChangeAreNoMemoryLoss(t *testing.T) {
	t.Parallel()
	tr := lockkit.NewTrio(t)
	full, less := tr.Client(flightlock.Options{}), tr.Client(flightlock.Options{})
	set := func(rights ...any) {
		for _, s := range tr.Servers {
			s.Do(t, append([]any{"ACL", "SETUSER", "default"}, rights...)...)
		}
	}
	lockkit.TryLock(t, full, "k")
	for range 3 {
		set("-object", "-append")
		lockkit.TryLock(t, less, "k")
		lockkit.TryLock(t, full, "k")
		set("+@all")
		lockkit.TryLock(t, tr.Client(flightlock.Options{}), "k")
		lockkit.TryLock(t, less, "k")
		lockkit.TryLock(t, full, "k")
	}
	wantQuarantined(t, full, 0)
	wantQuarantined(t, less, 0)
}
