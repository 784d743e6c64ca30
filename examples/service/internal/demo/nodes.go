package demo

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os/exec"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/flightlock/flightlock/internal/histogram"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// This file has the servers that the service locks on, and the one that keeps its values: redis-server
// processes of the demo's own, embedded ones where there is no redis-server, or those of -redis, which the
// demo leaves as they are.

// server is one of the demo's own, which may be stopped.
type server interface {
	url() string
	stop() error    // it stands still, with all that it knows
	resume() error  // and goes on
	kill() error    // it is gone
	restart() error // and is there again, empty
	flush() error
	close() error
}

// servers are all of them.
type servers struct {
	kind  string   // for the table
	nodes []server // nil with -redis
	cache server   // nil with -redis

	nodeURLs []string
	cacheURL string
}

// nodeCount is how many nodes the demo starts.
const nodeCount = 3

func startServers(given []string, cache string) (*servers, error) {
	if len(given) > 0 {
		s := &servers{kind: fmt.Sprintf("%d servers of -redis", len(given)), nodeURLs: given, cacheURL: cache}
		if cache == "" {
			s.cacheURL = given[0]
		}
		return s, s.ping()
	}
	start, kind := startReal, "redis-server processes"
	if !haveRedis() {
		start = startEmbedded
		kind = "embedded nodes (miniredis in the demo's process, which is slow; " +
			"they are closed and opened where a process would be stopped)"
	}
	s := &servers{kind: fmt.Sprintf("%d %s, and one for values", nodeCount, kind)}
	for i := range nodeCount + 1 {
		one, err := start()
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		if i == nodeCount {
			s.cache, s.cacheURL = one, one.url()
			break
		}
		s.nodes = append(s.nodes, one)
		s.nodeURLs = append(s.nodeURLs, one.url())
	}
	return s, nil
}

// haveRedis reports whether there is a redis-server to start.
func haveRedis() bool {
	_, err := exec.LookPath("redis-server")
	return err == nil
}

// own reports whether the servers are the demo's, which it may stop, kill and flush.
func (s *servers) own() bool { return len(s.nodes) > 0 }

// all are the nodes and the cache.
func (s *servers) all() []server { return append(append([]server{}, s.nodes...), s.cache) }

// pids are the processes of those that are processes.
func (s *servers) pids() (pids []int) {
	if !s.own() {
		return nil
	}
	for _, one := range s.all() {
		if r, ok := one.(real); ok {
			pids = append(pids, r.Pid())
		}
	}
	return pids
}

func (s *servers) close() error {
	var errs []error
	for _, one := range s.nodes {
		errs = append(errs, one.close())
	}
	if s.cache != nil {
		errs = append(errs, s.cache.close())
	}
	return errors.Join(errs...)
}

// ping makes sure that the servers of -redis are there, so that a typo is not measured as an outage.
func (s *servers) ping() error {
	for _, u := range append([]string{s.cacheURL}, s.nodeURLs...) {
		if _, err := roundTrips(u, 1); err != nil {
			return err
		}
	}
	return nil
}

// roundTrips measures so many round trips to a server, one after the other.
func roundTrips(u string, n int) (*histogram.Histogram, error) {
	o, err := redis.ParseURL(u)
	if err != nil {
		return nil, fmt.Errorf("flag -redis: %w", err)
	}
	c := redis.NewClient(o)
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	h := &histogram.Histogram{}
	for i := range n + 1 {
		began := time.Now()
		if err := c.Ping(ctx).Err(); err != nil {
			return nil, fmt.Errorf("server %s: %w", o.Addr, err)
		}
		if i > 0 { // the first one dials
			h.Record(time.Since(began))
		}
	}
	return h, nil
}

// real is a redis-server process.
type real struct{ *redistest.Server }

func startReal() (server, error) {
	s, err := redistest.Launch()
	if err != nil {
		return nil, err
	}
	return real{s}, nil
}

func (r real) url() string    { return "redis://" + r.Addr() }
func (r real) stop() error    { return r.Stop() }
func (r real) resume() error  { return r.Cont() }
func (r real) kill() error    { return r.Kill() }
func (r real) restart() error { return r.Restart() }
func (r real) close() error   { return r.Close() }
func (r real) flush() error   { return flush(r.url()) }

func flush(u string) error {
	o, err := redis.ParseURL(u)
	if err != nil {
		return err
	}
	c := redis.NewClient(o)
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return c.FlushAll(ctx).Err()
}

// embedded is a server inside this process.
type embedded struct{ m *miniredis.Miniredis }

func startEmbedded() (server, error) {
	m, err := miniredis.Run()
	if err != nil {
		return nil, fmt.Errorf("starting an embedded node: %w", err)
	}
	m.ClockTTL(true) // else nothing expires there
	return embedded{m}, nil
}

func (e embedded) url() string    { return "redis://" + e.m.Addr() }
func (e embedded) stop() error    { e.m.Close(); return nil }
func (e embedded) resume() error  { return e.m.Restart() }
func (e embedded) kill() error    { e.m.Close(); return nil }
func (e embedded) restart() error { e.m.FlushAll(); return e.m.Restart() }
func (e embedded) flush() error   { e.m.FlushAll(); return nil }
func (e embedded) close() error   { e.m.Close(); return nil }

// parseServers reads the value of -redis.
func parseServers(list string) (urls []string, err error) {
	seen := map[string]bool{}
	for s := range strings.SplitSeq(list, ",") {
		if s = strings.TrimSpace(s); !strings.Contains(s, "://") {
			s = "redis://" + s
		}
		u, err := url.Parse(s)
		switch {
		case err != nil || u.Port() == "" || u.Hostname() == "":
			return nil, errors.New("want host:port or a url for each server, separated by commas")
		case seen[u.Host]:
			return nil, fmt.Errorf("%s is there twice: every node must be a server of its own", u.Host)
		}
		seen[u.Host] = true
		urls = append(urls, s)
	}
	return urls, nil
}
