// Command picture draws the dashboard from a real run: processes' worth of clients on three
// redis-servers that have bad moments, scraped once a second, each panel by its own queries.
//
//	cd docs/check && go run ./picture    # 105 s, needs redis-server; writes docs/grafana/flightlock.svg
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/docs/check"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/prom"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
)

const (
	board  = "../grafana/flightlock.json"
	target = "../grafana/flightlock.svg"

	scrapes = time.Second
	rate    = 4 * time.Second // $__rate_interval: four scrapes, as in Grafana
)

// service is three processes, as far as Redis can tell.
type service struct {
	servers []*redistest.Server
	work    atomic.Int64 // how long a hot key is held, in nanoseconds
	clients []*flightlock.Client
	metrics []*prometheus.Registry
}

// story is what happens to it.
var story = []struct {
	lasts time.Duration
	title string
	begin func(*service) error
	while func(*service) error // every scrape
}{
	{lasts: 12 * time.Second,
		title: "all is well: 3 processes, 50 goroutines each on 2 hot keys, 1 ms of work under the lock"},
	{lasts: 12 * time.Second,
		title: "the work under the hot locks takes 15 ms: callers wait for each other, in both tiers",
		begin: func(s *service) error { s.work.Store(int64(15 * time.Millisecond)); return nil }},
	{lasts: 10 * time.Second, title: "1 ms again",
		begin: func(s *service) error { s.work.Store(int64(time.Millisecond)); return nil }},
	{lasts: 12 * time.Second,
		title: "redis-b is stopped (SIGSTOP): suspended, owed releases; nobody waits for it",
		begin: func(s *service) error { return s.servers[1].Stop() }},
	{lasts: 10 * time.Second, title: "redis-c is stopped too: no majority, ErrUnavailable, locks run out",
		begin: func(s *service) error { return s.servers[2].Stop() }},
	{lasts: 12 * time.Second, title: "both go on, and get the releases that they are owed",
		begin: func(s *service) error { return errors.Join(s.servers[1].Cont(), s.servers[2].Cont()) }},
	{lasts: 14 * time.Second, title: "redis-c restarts empty: quarantined, no vote for MaxTTL (here 10 s)",
		begin: func(s *service) error { return errors.Join(s.servers[2].Kill(), s.servers[2].Restart()) }},
	{lasts: 12 * time.Second, title: "redis-a is out of memory: its error replies count, and cost nothing",
		begin: func(s *service) error { return s.maxMemory("1mb") }},
	{lasts: 12 * time.Second,
		title: "somebody deletes the keys of running jobs: taken, before their holders know",
		begin: func(s *service) error { return s.maxMemory("0") },
		while: (*service).deleteJobs},
}

func main() {
	log.SetFlags(0)
	redis.SetLogger(silent{})
	if err := run(); err != nil {
		log.Fatal("picture: ", err)
	}
}

// silent is for the lines that go-redis has for each failed dial.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

func run() error {
	panels, err := check.Board(board)
	if err != nil {
		return err
	}
	s := &service{}
	defer s.close()
	if err := s.start(); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	var busy sync.WaitGroup
	defer busy.Wait()
	defer stop()
	s.load(ctx, &busy)

	store := check.NewStore()
	var phases []check.Phase
	began := time.Now()
	for _, part := range story {
		fmt.Println(part.title)
		phase := check.Phase{Title: part.title, From: time.Now()}
		if part.begin != nil {
			if err := part.begin(s); err != nil {
				return err
			}
		}
		for next := phase.From; time.Since(phase.From) < part.lasts; {
			if part.while != nil {
				if err := part.while(s); err != nil {
					return err
				}
			}
			if err := s.scrape(store); err != nil {
				return err
			}
			next = next.Add(scrapes)
			time.Sleep(time.Until(next))
		}
		phase.To = time.Now()
		phases = append(phases, phase)
	}
	svg, err := check.Draw(panels, store, phases, began, time.Now(), scrapes, rate)
	if err != nil {
		return err
	}
	return os.WriteFile(target, []byte(svg), 0o644)
}

func (s *service) start() error {
	for range 3 {
		server, err := redistest.Launch("--maxmemory-policy", "noeviction", "--save", "")
		if err != nil {
			return err
		}
		s.servers = append(s.servers, server)
	}
	for range 3 {
		var nodes []redis.UniversalClient
		for i, server := range s.servers {
			nodes = append(nodes, redis.NewClient(&redis.Options{
				Addr: fmt.Sprintf("redis-%c:6379", 'a'+i), DialerRetries: 1,
				Dialer: func(ctx context.Context, network, _ string) (net.Conn, error) {
					return (&net.Dialer{}).DialContext(ctx, network, server.Addr())
				},
			}))
		}
		reg := prometheus.NewRegistry()
		metrics, err := prom.New(reg)
		if err != nil {
			return err
		}
		c, err := flightlock.New(flightlock.Options{
			MaxTTL: 10 * time.Second, Observers: []*flightlock.Observer{metrics},
		}, nodes...)
		if err != nil {
			return err
		}
		s.clients, s.metrics = append(s.clients, c), append(s.metrics, reg)
	}
	s.work.Store(int64(time.Millisecond))
	return nil
}

func (s *service) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for _, c := range s.clients {
		_ = c.Close(ctx)
	}
	for _, server := range s.servers {
		_ = server.Close()
	}
}

// scrape is what Prometheus does.
func (s *service) scrape(store *check.Store) error {
	now := time.Now()
	for i, reg := range s.metrics {
		if err := store.Scrape(reg, now, "job", "orders", "instance", fmt.Sprintf("orders-%d", i+1)); err != nil {
			return err
		}
	}
	return nil
}

// load has each process lock hot keys, keys of its own, and jobs that last.
func (s *service) load(ctx context.Context, busy *sync.WaitGroup) {
	for p, c := range s.clients {
		for g := range 50 {
			busy.Go(func() {
				for ctx.Err() == nil {
					once(ctx, c, fmt.Sprint("hot:", g%2), nil, func() time.Duration { return time.Duration(s.work.Load()) })
					pause(ctx, rand.N(300*time.Millisecond))
				}
			})
		}
		for range 10 {
			busy.Go(func() {
				for ctx.Err() == nil {
					once(ctx, c, fmt.Sprint("user:", rand.N(100_000)), giveUp,
						func() time.Duration { return time.Millisecond })
					pause(ctx, rand.N(50*time.Millisecond))
				}
			})
		}
		for g := range 4 {
			busy.Go(func() {
				for ctx.Err() == nil {
					job(ctx, c, fmt.Sprintf("job:%d-%d", p, g))
				}
			})
		}
	}
}

// giveUp is for callers that rather fail than wait.
var giveUp = flightlock.LimitedRetry(20*time.Millisecond, 5)

// once locks key, if that takes no more than a second, and works.
func once(ctx context.Context, c *flightlock.Client, key string, retry flightlock.RetryStrategy,
	work func() time.Duration) {
	wait, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	l, err := c.SingleFlightLock(wait, key, 5*time.Second, retry)
	if err != nil {
		return
	}
	pause(ctx, work())
	_ = l.Release(ctx)
}

// job works for some seconds, and keeps its lock meanwhile.
func job(ctx context.Context, c *flightlock.Client, key string) {
	wait, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_ = c.Do(wait, key, 2*time.Second, nil, func(_ context.Context, l *flightlock.Lock) error {
		pause(l.Context(ctx), 3*time.Second+rand.N(time.Second))
		return nil
	})
}

func (s *service) maxMemory(limit string) error {
	return s.admin(func(ctx context.Context, c *redis.Client) error {
		return c.ConfigSet(ctx, "maxmemory", limit).Err()
	},
		s.servers[0])
}

// deleteJobs deletes the keys of some jobs everywhere.
func (s *service) deleteJobs() error {
	key := fmt.Sprintf("lock:job:%d-%d", rand.N(3), rand.N(4))
	return s.admin(func(ctx context.Context, c *redis.Client) error {
		return c.Del(ctx, key).Err()
	}, s.servers...)
}

// admin does something to servers.
func (s *service) admin(do func(context.Context, *redis.Client) error, servers ...*redistest.Server) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	for _, server := range servers {
		c := redis.NewClient(&redis.Options{Addr: server.Addr()})
		err := do(ctx, c)
		_ = c.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
