package servers

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// BenchmarkOddErrors is how many locks there are beside a server that answers one of 10,000 commands with an
// error that nobody knows, as a part of how many there are without these. They alternate in slices of 200 ms,
// a pair for each of b.N: use -benchtime 60x.
func BenchmarkOddErrors(b *testing.B) {
	s := redistest.StartServer(b)
	e := redistest.StartKind(b, redistest.Plain, s.Addr())
	var odd atomic.Bool
	var errs atomic.Int64
	e.SetAnswers(func([]string) string {
		if !odd.Load() || rand.IntN(10_000) != 0 {
			return ""
		}
		errs.Add(1)
		return "-ERR upstream failure\r\n"
	})
	c := lockkit.Open(b, lockkit.Patient, "redis://"+e.Addr())
	var locks [2]atomic.Int64
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for ctx.Err() == nil {
				l, err := c.SingleFlightLock(ctx, fmt.Sprint("key", i), time.Minute, nil)
				if err != nil {
					continue
				}
				_ = l.Release(ctx) // what is not confirmed is repeated
				n := 0
				if odd.Load() {
					n = 1
				}
				locks[n].Add(1)
			}
		})
	}
	for b.Loop() {
		for _, with := range []bool{false, true} {
			odd.Store(with)
			time.Sleep(200 * time.Millisecond)
		}
	}
	cancel()
	all.Wait()
	b.ReportMetric(float64(locks[1].Load())/float64(max(1, locks[0].Load())), "of-without")
	b.ReportMetric(float64(errs.Load()), "errors")
}
