package forget

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/flightlock/flightlock/lua"
)

// Several active replicas accept writes, and each would grant what another has: whatever is no master is
// refused by the name of its role.
func TestOnlyAMasterVotes(t *testing.T) {
	t.Parallel()
	tr := lockkit.NewTrio(t)
	var log testkit.LogBuffer
	c, _ := tr.Saying(flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))},
		map[string]string{"role": "active-replica"})
	_, err := c.TryLock(t.Context(), "k", time.Minute)
	if !errors.Is(err, flightlock.ErrUnavailable) || !strings.Contains(err.Error(), "active-replica") {
		t.Errorf("TryLock: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second) // it waits for a failover
	defer cancel()
	if err := c.Ready(ctx); err == nil || !strings.Contains(err.Error(), "active-replica") {
		t.Errorf("Ready: %v", err)
	}
	report, err := c.Check(t.Context())
	if text := fmt.Sprint(report); err != nil || !strings.Contains(text, "active-replica") {
		t.Errorf("Check: %v, %s", err, text)
	}
	redistest.Eventually(t, 20*time.Second, "the log names the role of each node", func() bool {
		return log.Count("level=WARN", "node unverified", "active-replica") == 3
	})
}

// anonymous is what Dragonfly's INFO lacks, and kvrocks'.
var anonymous = map[string]string{"run_id": "", "master_replid2": "", "second_repl_offset": ""}

// A server without run_id that restarts with an old snapshot, scripts included, has no vote: its process id
// and the second in which it began identify it.
func TestNoSecondGrantWithoutARunID(t *testing.T) {
	t.Parallel()
	for i := range tries(t) {
		t.Run(fmt.Sprint("try ", i), func(t *testing.T) {
			t.Parallel()
			tr := lockkit.NewTrio(t, "--dbfilename", "dump.rdb")
			holder, _ := tr.Saying(flightlock.Options{}, anonymous)
			rival, points := tr.Saying(flightlock.Options{}, anonymous)
			redistest.Eventually(t, time.Minute, "a new deployment works", func() bool {
				return holder.Ready(t.Context()) == nil
			})
			lockkit.UseOnAll(t, rival, "warm", tr.Servers...)
			tr.Servers[0].Do(t, "SAVE")
			l := tr.Hold(holder, "k", time.Minute)
			testkit.Must(t, tr.Servers[0].Restart())
			points[0].Reload(t, tr.Servers[0])
			redistest.Eventually(t, 20*time.Second, "the node is in quarantine", func() bool {
				if second, err := rival.TryLock(t.Context(), "k", time.Minute); err == nil && l.Err() == nil {
					t.Fatalf("%s has it, as has %s", second.Owner(), l.Owner())
				}
				return rival.Stats().Quarantined == 1
			})
			if l.Err() != nil {
				t.Fatalf("the holder's lock ended first: %v", l.Err())
			}
			_ = l.Release(t.Context()) // one node has it
		})
	}
}

// A server without run_id is established some seconds after its process has begun. One that began later than
// the others is so later than they, and has lost nothing meanwhile.
func TestAServerWithoutARunIDThatBeganLater(t *testing.T) {
	t.Parallel()
	tr := lockkit.NewTrio(t)
	began := time.Now()
	redistest.Eventually(t, 20*time.Second, "another second", func() bool {
		return time.Since(began) > 1500*time.Millisecond
	})
	testkit.Must(t, tr.Servers[2].Restart())
	var log testkit.LogBuffer
	c, _ := tr.Saying(flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}, anonymous)
	redistest.Eventually(t, time.Minute, "the third one is established", func() bool {
		_ = c.Ready(t.Context())
		return strings.Contains(fmt.Sprint(tr.Servers[2].Do(t, "GET", lua.Past)), " kept ")
	})
	if log.Count("quarantined") > 0 {
		t.Errorf("nothing was lost: %s", log.String())
	}
}

// Where nothing identifies the process, nothing is granted, and the reason is not that a right is missing.
func TestAProcessThatNothingIdentifies(t *testing.T) {
	t.Parallel()
	tr := lockkit.NewTrio(t)
	c, _ := tr.Saying(flightlock.Options{}, map[string]string{"run_id": "", "process_id": ""})
	_, err := c.TryLock(t.Context(), "k", time.Minute)
	if text := fmt.Sprint(err); !errors.Is(err, flightlock.ErrUnavailable) || strings.Contains(text, "+info") ||
		!strings.Contains(text, "INFO reports neither run_id, nor process_id and uptime_in_seconds") {
		t.Error(text)
	}
	report, err := c.Check(t.Context())
	testkit.Must(t, err)
	if text := fmt.Sprint(report); !strings.Contains(text, "INFO reports neither") {
		t.Error(text)
	}
}
