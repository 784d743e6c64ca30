package sharing

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/testkit"
)

// readers are mostly readers, and sometimes writers, of one key.
func readers(c *flightlock.Client, n notes, _ order) func(ctx context.Context, id int) {
	return func(ctx context.Context, id int) {
		kind, lock := "r", c.RLock
		if rand.IntN(8) == 0 {
			kind, lock = "w", c.SingleFlightLock
		}
		l, err := lock(ctx, "k", time.Duration(100+rand.IntN(400))*time.Millisecond, nil)
		if err != nil {
			return
		}
		for range rand.IntN(10) {
			if !n.note(l, id, kind) {
				break
			}
			time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
		}
		n.note(l, id, kind)
		_ = l.Release(ctx)
	}
}

// Eight processes read and write a key on three nodes. Processes are killed and stopped, and nodes are
// stopped and restarted empty. No writer is valid beside anybody, and tokens rise from writer to writer with
// those of the readers between them.
func TestReadersAndWritersThatAreKilled(t *testing.T) {
	t.Parallel()
	c := startCrew(t, 8, 3, order{Work: "readers", MaxTTL: 2 * time.Second})
	c.suffer(testkit.Full(time.Minute, 4*time.Second))
	checkSpans(t, c.spans())
}

// checkSpans looks, in the order in which they begin, for a writer beside anybody, and for tokens that fall.
func checkSpans(t *testing.T, all []span) {
	t.Helper()
	kinds := map[string]int{}
	var last, writer span // which ends last of all, and of the writers; and the largest tokens
	var largest, written int64
	together := 0
	for _, s := range all {
		kinds[s.kind]++
		before := last
		if s.kind == "r" {
			before = writer
			if s.begin < last.end {
				together++
			}
		}
		if s.begin < before.end {
			t.Errorf("%+v has the key beside %+v", s, before)
		}
		if s.kind == "w" && s.fence <= largest || s.kind == "r" && s.fence <= written {
			t.Errorf("%+v: the largest token before is %d, and %d of writers", s, largest, written)
		}
		largest = max(largest, s.fence)
		if s.end > last.end {
			last = s
		}
		if s.kind == "w" {
			written = max(written, s.fence)
			if s.end > writer.end {
				writer = s
			}
		}
	}
	t.Logf("%d reads, of which %d beside others, and %d writes", kinds["r"], together, kinds["w"])
	if together == 0 || kinds["w"] == 0 {
		t.Error("nobody has read beside others, or nobody has written")
	}
}
