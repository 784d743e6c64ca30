package servers

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// A server that evicts scripts (Valkey 8.1, maxmemory-scripts) knows one of twenty no more, and has no memory
// for one of twenty loads. No lock is lost, none has two holders, and no connection is made for it.
func TestScriptsThatAreEvictedAtRandom(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprintf("%d nodes", n), func(t *testing.T) {
			t.Parallel()
			var missing, loaded atomic.Int64 // answers of NOSCRIPT; bytes of scripts
			var urls []string
			var servers []*redistest.Server
			for i := range n {
				servers = append(servers, redistest.StartServer(t))
				e := redistest.StartKind(t, redistest.Plain, servers[i].Addr())
				e.SetAnswers(func(cmd []string) string {
					switch odd := rand.IntN(20) == 0; {
					case strings.EqualFold(cmd[0], "SCRIPT"):
						loaded.Add(int64(len(cmd[2])))
						if odd {
							return "-OOM command not allowed when used memory > 'maxmemory'.\r\n"
						}
					case odd && strings.EqualFold(cmd[0], "EVALSHA"):
						missing.Add(1)
						return "-NOSCRIPT No matching script. Please use EVAL.\r\n"
					}
					return ""
				})
				urls = append(urls, "redis://"+e.Addr())
			}
			ctx, cancel := context.WithTimeout(t.Context(), testkit.Full(time.Minute, 2*time.Second))
			defer cancel()
			var clients []*flightlock.Client
			var locks, late, lost atomic.Int64
			var holders [8]atomic.Int64
			var all sync.WaitGroup
			for range 3 {
				c := lockkit.Open(t, lockkit.Patient, urls...)
				clients = append(clients, c)
				for i := range holders {
					all.Go(func() {
						for ctx.Err() == nil {
							l, err := c.SingleFlightLock(ctx, fmt.Sprint(i), time.Minute, nil)
							if err != nil {
								continue // ctx has ended
							}
							const half = time.Minute / 2
							granted := time.Until(l.Until()) < half // by a release elsewhere: for 450 ms, until it is refreshed
							if holders[i].Add(1) != 1 {
								t.Error("two holders")
							}
							if err := l.Refresh(t.Context()); err != nil {
								late.Add(1) // it is tried again by AutoRefresh
							}
							if err := l.Err(); err != nil && granted { // before it was refreshed
								lost.Add(1)
							} else if err != nil {
								t.Errorf("a held lock: %v", err)
							}
							holders[i].Add(-1)
							_ = l.Release(t.Context()) // what is not confirmed is repeated
							locks.Add(1)
						}
					})
				}
			}
			all.Wait()
			var inAll int64
			for _, c := range clients {
				inAll += int64(c.Stats().Lost)
			}
			if inAll > lost.Load() {
				t.Errorf("%d locks were lost, and %d of them were grants", inAll, lost.Load())
			}
			var hellos uint64
			for _, s := range servers {
				hellos += uint64(s.CommandCalls(t)["hello"])
			}
			t.Logf("%d locks, %d grants lost, %d refreshes refused, %d NOSCRIPT, %d bytes of scripts for each, %d "+
				"connections",
				locks.Load(), lost.Load(), late.Load(), missing.Load(), loaded.Load()/max(1, missing.Load()), hellos)
			if missing.Load() == 0 || locks.Load() == 0 {
				t.Errorf("%d locks, %d NOSCRIPT: nothing was tried", locks.Load(), missing.Load())
			}
			if most := uint64(15 * n); hellos > most { // those of the clients, of what they announce, and of the test
				t.Errorf("%d connections, want %d at most", hellos, most)
			}
		})
	}
}
