package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// nodes are the servers that are locked on: embedded ones that live in this process, or those of
// -redis, which are asked to answer first and cleaned afterwards.
type nodes struct {
	embedded []*miniredis.Miniredis
	urls     []string
	prefix   string // of all keys of this run

	proxy    *proxy   // in front of the last node; nil with skipDown
	viaProxy []string // urls, the last one through the proxy
	skipDown string   // why no node can play dead
}

// embeddedNodes is how many nodes there are without -redis.
const embeddedNodes = 3

func startNodes(ctx context.Context, redisURLs []string) (*nodes, error) {
	id := make([]byte, 4)
	rand.Read(id)
	n := &nodes{urls: redisURLs, prefix: fmt.Sprintf("flightlock-bench:%x:", id)}
	var err error
	if len(redisURLs) == 0 {
		err = n.startEmbedded()
	} else {
		err = n.ping(ctx)
	}
	if err == nil {
		err = n.startProxy()
	}
	if err != nil {
		n.close()
		return nil, err
	}
	return n, nil
}

func (n *nodes) startEmbedded() error {
	for range embeddedNodes {
		m, err := miniredis.Run()
		if err != nil {
			return fmt.Errorf("starting an embedded node: %w", err)
		}
		m.ClockTTL(true) // else nothing expires there
		n.embedded = append(n.embedded, m)
		n.urls = append(n.urls, "redis://"+m.Addr())
	}
	return nil
}

// ping makes sure that every server is there, so that a typo is not measured as a dead node.
func (n *nodes) ping(ctx context.Context) error {
	return n.each(ctx, func(ctx context.Context, c *redis.Client) error { return c.Ping(ctx).Err() })
}

// startProxy prepares the last node for (c), if a majority is left without it.
func (n *nodes) startProxy() error {
	last := len(n.urls) - 1
	u, err := url.Parse(n.urls[last])
	switch {
	case err != nil:
		return err
	case len(n.urls) < 3:
		n.skipDown = fmt.Sprintf("needs 3 nodes or more, so that a majority is left; there are %d", len(n.urls))
		return nil
	case u.Scheme != "redis":
		n.skipDown = "the last node uses TLS, and a proxy in front of it would not have its certificate"
		return nil
	}
	if n.proxy, err = newProxy(u.Host); err != nil {
		return err
	}
	u.Host = n.proxy.addr
	n.viaProxy = append(append([]string{}, n.urls[:last]...), u.String())
	return nil
}

// each calls f with a plain client of each node of -redis. It takes at most 3 seconds for each.
func (n *nodes) each(ctx context.Context, f func(context.Context, *redis.Client) error) error {
	var errs []error
	for _, s := range n.urls {
		opts, err := redis.ParseURL(s)
		if err != nil {
			errs = append(errs, fmt.Errorf("flag -redis: %w", err))
			continue
		}
		opts.MaxRetries = -1
		c := redis.NewClient(opts)
		ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
		if err := f(ctx, c); err != nil {
			errs = append(errs, fmt.Errorf("node %s: %w", opts.Addr, err))
		}
		cancel()
		c.Close()
	}
	return errors.Join(errs...)
}

// cleanUp removes the keys of this run, as far as 3 seconds for each node suffice. What is left
// expires by itself, but for fence buckets: they belong to the library, which may share them with
// other locks.
func (n *nodes) cleanUp(ctx context.Context) error {
	if len(n.embedded) > 0 {
		return nil
	}
	return n.each(ctx, func(ctx context.Context, c *redis.Client) error {
		keys := c.Scan(ctx, 0, n.prefix+"*", 1000).Iterator()
		for keys.Next(ctx) {
			if err := c.Unlink(ctx, keys.Val()).Err(); err != nil {
				return err
			}
		}
		return keys.Err()
	})
}

func (n *nodes) close() {
	if n.proxy != nil {
		n.proxy.down()
	}
	for _, m := range n.embedded {
		m.Close()
	}
}

// hosts names the nodes without passwords.
func (n *nodes) hosts() (hosts []string) {
	for _, s := range n.urls {
		if u, err := url.Parse(s); err == nil {
			hosts = append(hosts, u.Host)
		}
	}
	return hosts
}
