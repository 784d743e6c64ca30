package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"
)

// site is the servers of all bouts, and a proxy in front of each for those that want a delay.
type site struct {
	servers  []*redistest.Server
	proxies  []*redistest.Proxy
	admin    []*redis.Client
	versions *redistest.Server // of the values that are changed: none of a cache's own traffic is there
	profile  string            // directory for the workers' profiles, if any
}

// openSite starts n servers.
func openSite(n int) (s *site, err error) {
	s = &site{}
	if s.versions, err = redistest.Launch(); err != nil {
		return nil, err
	}
	for range n {
		server, err := redistest.Launch()
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.servers = append(s.servers, server)
		proxy, err := redistest.NewProxy(server.Addr())
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.proxies = append(s.proxies, proxy)
		s.admin = append(s.admin, redis.NewClient(&redis.Options{Addr: server.Addr(), PoolSize: 1}))
	}
	return s, nil
}

func (s *site) close() (err error) {
	for _, c := range s.admin {
		err = errors.Join(err, c.Close())
	}
	for _, p := range s.proxies {
		err = errors.Join(err, p.Close())
	}
	for _, r := range s.servers {
		err = errors.Join(err, r.Close())
	}
	return errors.Join(err, s.versions.Close())
}

// addrs are those of the first n servers; with a delay, all of them, or the last one only, through
// their proxies.
func (s *site) addrs(b bout) (addrs []string) {
	for i := range b.Nodes {
		switch last := i == b.Nodes-1; {
		case b.Proxied, b.SlowBy > 0 && last:
			addrs = append(addrs, s.proxies[i].Addr())
		default:
			addrs = append(addrs, s.servers[i].Addr())
		}
	}
	return addrs
}

// delay sets what the bout's proxies add to a round trip, until undo.
func (s *site) delay(b bout) (undo func()) {
	for i, p := range s.proxies {
		p.SetDelay(b.RTT)
		if i == b.Nodes-1 && b.SlowBy > 0 {
			p.SetDelay(b.SlowBy)
		}
	}
	if b.RTT+b.SlowBy == 0 {
		return func() {}
	}
	return finerTimers()
}

// flush makes the servers as new, so that no bout meets another's keys.
func (s *site) flush(ctx context.Context) error {
	return s.each(func(_ int, c *redis.Client) error { return c.FlushAll(ctx).Err() })
}

func (s *site) each(f func(i int, c *redis.Client) error) error {
	var g errgroup.Group
	for i, c := range s.admin {
		g.Go(func() error { return f(i, c) })
	}
	return g.Wait()
}

// usage is what all servers have done so far.
type usage struct {
	commands map[string]float64 // calls, by name; those that scripts make as well
	fields   map[string]float64 // of INFO, that are numbers
}

func (s *site) usage(ctx context.Context) (sum usage, err error) {
	texts := make([]string, len(s.admin))
	err = s.each(func(i int, c *redis.Client) (err error) {
		texts[i], err = c.Info(ctx, "clients", "stats", "cpu", "commandstats").Result()
		return err
	})
	sum.commands, sum.fields = map[string]float64{}, map[string]float64{}
	for _, text := range texts {
		for lines := bufio.NewScanner(strings.NewReader(text)); lines.Scan(); {
			sum.add(lines.Text())
		}
	}
	return sum, err
}

// add takes in one line of INFO.
func (u *usage) add(line string) {
	name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
	if command, ok := strings.CutPrefix(name, "cmdstat_"); ok {
		command, _, _ = strings.Cut(command, "|")
		calls, _, _ := strings.Cut(strings.TrimPrefix(value, "calls="), ",")
		n, _ := strconv.ParseFloat(calls, 64)
		u.commands[command] += n
	}
	if v, err := strconv.ParseFloat(value, 64); err == nil {
		u.fields[name] += v
	}
}

// since is by how much a field of INFO has grown.
func (u usage) since(before usage, field string) float64 {
	return u.fields[field] - before.fields[field]
}

// work counts the commands that clients of a rival have sent since, and the processor time of the servers.
func (u usage) work(before usage, r rival) (commands float64, cpu time.Duration) {
	names := []string{"evalsha", "eval", "script", "subscribe", "unsubscribe", "ssubscribe", "sunsubscribe",
		"hello", "client", "ping"}
	if r.set {
		names = append(names, "set")
	}
	for _, n := range names {
		commands += u.commands[n] - before.commands[n]
	}
	seconds := u.since(before, "used_cpu_sys") + u.since(before, "used_cpu_user")
	return commands, time.Duration(seconds * float64(time.Second))
}

// version is the server's.
func (s *site) version(ctx context.Context) (string, error) {
	text, err := s.admin[0].Info(ctx, "server").Result()
	_, v, ok := strings.Cut(text, "redis_version:")
	if err != nil || !ok {
		return "", fmt.Errorf("asking for the server's version: %w", err)
	}
	v, _, _ = strings.Cut(v, "\r\n")
	return "Redis " + v, nil
}
