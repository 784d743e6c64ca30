package setup

import (
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// connections are those of the client of that name to a server, as CLIENT LIST has them.
func connections(t *testing.T, s *redistest.Server, name string) (all []string) {
	t.Helper()
	for line := range strings.Lines(s.Do(t, "CLIENT", "LIST").(string)) {
		if strings.Contains(line, " name="+name+" ") {
			all = append(all, line)
		}
	}
	return all
}

// handOver has one client wait for a lock that another one holds, and get it.
func handOver(t *testing.T, holder, waiter *flightlock.Client) {
	t.Helper()
	l := lockkit.Lock(t, holder, "k", 10*time.Second)
	got := make(chan *flightlock.Lock, 1)
	go func() {
		l, err := waiter.SingleFlightLock(t.Context(), "k", 10*time.Second, nil)
		if err != nil {
			t.Error(err)
		}
		got <- l
	}()
	redistest.Eventually(t, 10*time.Second, "it waits", func() bool { return waiter.Stats().Attempts > 0 })
	time.Sleep(100 * time.Millisecond) // it subscribes: of which a server that refuses that shows nothing
	lockkit.Release(t, l)
	if l := <-got; l != nil {
		lockkit.Release(t, l)
	}
}

var carryLocks = regexp.MustCompile(` cmd=(evalsha|script\|load|subscribe) `)

// A client that waits has one connection to each server for locks and for notices.
func TestOneConnectionPerClientAndServer(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprint("nodes=", n), func(t *testing.T) {
			t.Parallel()
			var servers []*redistest.Server
			nodes := map[string][]redis.UniversalClient{}
			for range n {
				s := redistest.StartServer(t)
				servers = append(servers, s)
				for _, name := range []string{"holder", "waiter"} {
					c := s.Client(t, func(o *redis.Options) { o.ClientName = name })
					nodes[name] = append(nodes[name], c)
				}
			}
			holder := lockkit.New(t, lockkit.Patient, nodes["holder"]...)
			waiter := lockkit.New(t, lockkit.Patient, nodes["waiter"]...)
			handOver(t, holder, waiter)
			for _, s := range servers {
				for name, subscribed := range map[string]int{"holder": 0, "waiter": 1} {
					all := strings.Join(connections(t, s, name), "")
					// After 10 seconds the list of nodes is announced by the user's own connections, and by these
					// two nodes are told apart if a grant was late. They carry no locks.
					if n := len(carryLocks.FindAllString(all, -1)); n != 1 {
						t.Errorf("%s: %d connections\n%s", name, n, all)
					}
					if n := strings.Count(all, " sub=1 "); n != subscribed {
						t.Errorf("%s: %d of these subscribe, want %d\n%s", name, n, subscribed, all)
					}
				}
			}
		})
	}
}

// Where a server refuses RESP3 no notices can come: who waits polls, and the log and Check say so.
func TestServersWithoutRESP3(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t, "--rename-command", "HELLO", "")
	var log testkit.LogBuffer
	opts := lockkit.Patient
	opts.Logger = slog.New(slog.NewTextHandler(&log, nil))
	holder, waiter := lockkit.New(t, lockkit.Patient, s.Client(t)), lockkit.New(t, opts, s.Client(t))
	for range 3 {
		handOver(t, holder, waiter)
	}
	const line = "node sends no notices: who waits polls"
	redistest.Eventually(t, 10*time.Second, "the log says so", func() bool { return log.Count(line) > 0 })
	if n := log.Count(line); n != 1 {
		t.Errorf("%d lines", n)
	}
	lockkit.WantFinding(t, lockkit.Check(t, waiter), s.Addr(), "pubsub rights", flightlock.StatusWarn, "RESP3")
	if got := s.Do(t, "PUBSUB", "CHANNELS").([]any); len(got) > 0 {
		t.Errorf("subscribed to %v", got)
	}
}
