package sharing

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/flightlock/flightlock/semaphore"
)

// permits takes permits of one semaphore.
func permits(c *flightlock.Client, n notes, o order) func(ctx context.Context, id int) {
	s, err := semaphore.New(c, "s", o.Permits)
	if err != nil {
		panic(err)
	}
	return func(ctx context.Context, id int) {
		ttl := time.Duration(100+rand.IntN(400)) * time.Millisecond
		l, err := s.Acquire(ctx, ttl, nil)
		if rand.IntN(4) == 0 && err == nil { // one that may be had without the gate
			_ = l.Release(ctx)
			l, err = s.TryAcquire(ctx, ttl)
		}
		if err != nil {
			return
		}
		for range rand.IntN(10) {
			if !n.note(l, id, "p") {
				break
			}
			time.Sleep(time.Duration(rand.IntN(2000*o.Permits)) * time.Microsecond) // all are taken, mostly
		}
		n.note(l, id, "p")
		if rand.IntN(20) != 0 { // otherwise it lapses
			_ = l.Release(ctx)
		}
	}
}

// With FLIGHTLOCK_LONG=1 for each number of nodes and permits.
//
// Eight processes take permits. Processes are killed and stopped, and nodes are stopped and restarted empty.
// There are never more permits than there can be.
func TestPermitsOfProcessesThatAreKilled(t *testing.T) {
	for _, nodes := range testkit.Full([]int{1, 3, 5}, []int{3}) {
		for _, permits := range testkit.Full([]int{1, 2, 5, 10}, []int{2}) {
			t.Run(fmt.Sprintf("%d permits on %d nodes", permits, nodes), func(t *testing.T) {
				t.Parallel()
				c := startCrew(t, 8, nodes, order{Work: "permits", Permits: permits, MaxTTL: 2 * time.Second})
				c.suffer(testkit.Full(time.Minute, 4*time.Second))
				all := c.spans()
				most := atOnce(all)
				t.Logf("%d permits were had, by %d processes; at most %d at once", len(all), len(c.files), most)
				if most > permits || most == 0 {
					t.Errorf("at most %d permits were valid at once, of %d", most, permits)
				}
			})
		}
	}
}

// crossing are the keys of which sets locks some.
var crossing = strings.Split("abcdefghijklmnopqrst", "")

// sets locks 2 to 5 keys at once. It notes how long that took as if it was a token.
func sets(c *flightlock.Client, n notes, o order) func(ctx context.Context, id int) {
	return func(ctx context.Context, id int) {
		keys := slices.Clone(crossing)
		rand.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
		keys = keys[:2+rand.IntN(4)]
		began := time.Now()
		s, err := c.LockAll(ctx, keys, o.MaxTTL, flightlock.Within(nil, 5*time.Minute)) // it would be a deadlock
		wait := time.Since(began)
		if err != nil {
			fmt.Fprintln(os.Stderr, keys, err)
			return
		}
		for range 2 {
			for _, key := range keys {
				n.note(s.Lock(key), id, key)
			}
		}
		fmt.Fprintf(n.f, "%d wait %d %d\n", id, wait, time.Now().UnixNano())
		_ = s.Release(ctx)
	}
}

// With FLIGHTLOCK_LONG=1 there are 100,000 sets.
//
// Four processes, each with four goroutines, lock crossed sets of keys. All sets are had, no key has two
// holders, and in the end no key is left.
func TestCrossedSetsOfProcesses(t *testing.T) {
	t.Parallel()
	const processes = 4
	turns := testkit.Full(25_000, 250)
	c := startCrew(t, processes, 3, order{Work: "sets", Turns: turns, MaxTTL: 10 * time.Second})
	for _, child := range c.running {
		testkit.Must(t, child.Wait())
	}
	var waits []int64
	locks := map[string][]span{}
	for _, s := range c.spans() {
		if s.kind == "wait" {
			waits = append(waits, s.fence)
			continue
		}
		locks[s.kind] = append(locks[s.kind], s)
	}
	if len(waits) != processes*turns {
		t.Fatalf("%d sets were had, of %d", len(waits), processes*turns)
	}
	slices.Sort(waits)
	median, longest := time.Duration(waits[len(waits)/2]), time.Duration(waits[len(waits)-1])
	t.Logf("%d sets: median %v, longest %v, %.1fx", len(waits), median, longest,
		float64(longest)/float64(median))
	for key, all := range locks {
		if n := atOnce(all); n != 1 {
			t.Errorf("%q has %d holders", key, n)
		}
		for i, s := range all[1:] {
			if s.fence <= all[i].fence {
				t.Errorf("%q: token %d after %d", key, s.fence, all[i].fence)
			}
		}
		lockkit.WantFree(t, key, c.servers...)
	}
}
