//go:build unix

package scale

import (
	"fmt"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// A deploy: four processes under load are replaced one after the other. Each gets SIGTERM, serves
// the callers it has, and closes. No caller has an error, no load is without a lock, and no lock is
// left.
func TestRollingRestartUnderLoad(t *testing.T) {
	redistest.OnlyLong(t)
	for _, n := range []int{1, 3} {
		for _, open := range []bool{false, true} {
			t.Run(fmt.Sprintf("nodes=%d/%s", n, madeBy(open)), func(t *testing.T) {
				servers, addrs := startServers(t, n)
				cfg := serviceConfig{Nodes: addrs, Cache: redistest.StartServer(t).Addr(), Open: open, Cold: true}
				w := workload{Prefix: "k", Keys: 3000, Rate: 1500, Load: 20 * time.Millisecond, Fresh: time.Second}
				const procs, restarts = 4, 8
				type end struct {
					name string
					r    outcome
					err  error
				}
				ends := make(chan end, procs+restarts)
				started := 0
				start := func() *serviceProcess {
					p := startServiceProcess(t, cfg)
					p.ready(t)
					name := fmt.Sprint("process ", started)
					started++
					go func() {
						r, err := p.run(w)
						ends <- end{name, r, err}
					}()
					return p
				}
				var running []*serviceProcess
				for range procs {
					running = append(running, start())
				}
				time.Sleep(time.Second) // under load
				for range restarts {
					running = append(running, start())
					testkit.Must(t, running[0].Signal(syscall.SIGTERM))
					running = running[1:]
					time.Sleep(300 * time.Millisecond) // under load
				}
				for _, p := range running {
					testkit.Must(t, p.Signal(syscall.SIGTERM))
				}
				var sum outcome
				for range started {
					e := <-ends
					t.Log(e.name, e.r, e.err)
					if e.err != nil || e.r.Failed > 0 || e.r.Unlocked > 0 {
						t.Errorf("%s: %v, %v", e.name, e.r, e.err)
					}
					sum = sum.with(e.r)
				}
				t.Log(sum)
				redistest.EventuallyNoLocks(t, 40*time.Second, servers...)
			})
		}
	}
}

// What fails for one process fails for the others: load, or Store, fails after 300 ms in each of
// eight processes. The last caller has its answer after the load that it waited for and one more,
// and not after eight, one after the other: in virtual time.
func TestFailingOriginOfManyProcesses(t *testing.T) {
	const load = 300 * time.Millisecond
	for _, fails := range []string{"load", "store"} {
		for _, n := range []int{1, 3} {
			t.Run(fmt.Sprintf("virtual time/%s/nodes=%d", fails, n), func(t *testing.T) {
				bubble(t, n, time.Millisecond, func(t *testing.T, nodes []*redistest.MemNode, _ *flightlock.Client) {
					w := workload{Prefix: "k", Keys: 1, Each: 20, Load: load, Fails: fails}
					var all sync.WaitGroup
					for range 8 {
						var clients []redis.UniversalClient
						for _, n := range nodes {
							clients = append(clients, n.Client(t))
						}
						s := fetchOn(t, lockkit.New(t, flightlock.Options{}, clients...), fetch.Options{})
						all.Go(func() {
							r := s.run(t.Context(), w)
							within(t, "the last answer", r.Slowest, 2*load+50*time.Millisecond)
						})
					}
					all.Wait()
				})
			})
			if !redistest.Long() && (n == 3 || fails == "store") {
				continue
			}
			t.Run(fmt.Sprintf("%s/nodes=%d", fails, n), func(t *testing.T) {
				servers, addrs := sharedServers(t, n)
				ps := startServiceProcesses(t, 8, serviceConfig{Nodes: addrs, Cache: redistest.StartServer(t).Addr(),
					Open: true})
				w := workload{Prefix: t.Name(), Keys: 1, Each: 20, Load: load, Fails: fails}
				r, each := runAll(t, ps, w)
				t.Log(r)
				var slowest []time.Duration
				for _, one := range each {
					slowest = append(slowest, one.Slowest.Round(time.Millisecond))
				}
				slices.Sort(slowest)
				t.Log("slowest caller of each process:", slowest)
				if failed := fails == "load"; failed && r.Failed != r.Callers || !failed && r.Failed > 0 {
					t.Error(r)
				}
				if r.Loads > 8 {
					t.Errorf("%d loads in 8 processes", r.Loads)
				}
				redistest.EventuallyNoLocks(t, 40*time.Second, servers...)
			})
		}
	}
}

// One of eight processes cannot load, and the others can: only its own callers see errors.
func TestFailingOriginOfOneProcess(t *testing.T) {
	redistest.OnlyLong(t)
	_, addrs := sharedServers(t, 1)
	cfg := serviceConfig{Nodes: addrs, Cache: redistest.StartServer(t).Addr(), Open: true}
	ps := startServiceProcesses(t, 8, cfg)
	for round := range 10 {
		w := workload{Prefix: fmt.Sprint("k", round, "-"), Keys: 5, Each: 10, Load: 300 * time.Millisecond}
		each := make([]outcome, len(ps))
		errs := make([]error, len(ps))
		var wg sync.WaitGroup
		for i, p := range ps {
			w := w
			if i == 0 {
				w.Load, w.Fails = 0, "load"
			}
			wg.Go(func() { each[i], errs[i] = p.run(w) })
		}
		wg.Wait()
		for i, r := range each {
			if errs[i] != nil || i > 0 && r.Failed > 0 {
				t.Errorf("process %d: %v, %v", i, r, errs[i])
			}
		}
	}
}
