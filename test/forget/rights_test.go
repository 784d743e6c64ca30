package forget

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// Without the right to INFO three nodes grant nothing, and say what to do; one does, and those that are to.
// When the right is given, the clients that were refused lock, without a quarantine. When it is taken away,
// what is held can be refreshed and released, and nothing is granted any more.
func TestThreeNodesWithoutINFOGrantNothing(t *testing.T) {
	t.Parallel()
	tr := lockkit.NewTrio(t)
	allow := func(right string) {
		for _, s := range tr.Servers {
			s.Do(t, "ACL", "SETUSER", "default", right)
		}
	}
	c := tr.Client(flightlock.Options{})
	refused := func() bool {
		t.Helper()
		l, err := c.TryLock(t.Context(), "k", time.Minute)
		if err == nil { // by a check that the nodes have answered a moment ago
			lockkit.Release(t, l)
			return false
		}
		if text := err.Error(); !errors.Is(err, flightlock.ErrUnavailable) ||
			!strings.Contains(text, "give the user +info") || !strings.Contains(text, "Options.DisableQuarantine") {
			t.Error(text)
		}
		return true
	}
	allow("-info")
	if !refused() {
		t.Error("granted by nodes that never were allowed to say whether they lost data")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // for a right that is given meanwhile
	defer cancel()
	if err := c.Ready(ctx); err == nil || !strings.Contains(err.Error(), "give the user +info") {
		t.Errorf("Ready: %v", err)
	}
	for _, s := range tr.Servers[1:] { // the first is known by its proxy
		lockkit.WantFinding(t, lockkit.Check(t, c), s.Addr(), "quarantine", flightlock.StatusFail,
			"INFO is refused", "+info")
	}
	lockkit.TryLock(t, lockkit.New(t, lockkit.Patient, tr.Servers[0].Client(t)), "one node")
	lockkit.TryLock(t, tr.Client(flightlock.Options{DisableQuarantine: true}), "no quarantine")

	allow("+info")
	lockkit.EventuallyLock(t, c, "k")
	testkit.Must(t, c.Ready(t.Context()))
	wantQuarantined(t, c, 0)

	l := lockkit.Lock(t, c, "held", time.Minute)
	allow("-info")
	redistest.Eventually(t, 20*time.Second, "nothing is granted", refused)
	testkit.Must(t, l.Refresh(t.Context()))
	lockkit.Release(t, l)
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
