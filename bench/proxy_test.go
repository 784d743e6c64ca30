package main

import (
	"context"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// down cuts what is open and refuses what is new; up brings the node back on the same port, with its data.
func TestProxyPlaysANodesDeathAndReturn(t *testing.T) {
	m := miniredis.RunT(t)
	p, err := newProxy(m.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer p.down()
	c := redis.NewClient(&redis.Options{Addr: p.addr, MaxRetries: -1, DialerRetries: 1})
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := c.Set(ctx, "k", "v", 0).Err(); err != nil {
		t.Fatal("before:", err)
	}
	for range 3 {
		p.down()
		if err := c.Get(ctx, "k").Err(); err == nil {
			t.Fatal("a command went through a dead node")
		}
		if err := p.up(); err != nil {
			t.Fatal(err)
		}
		// The first command may still meet a connection that was cut.
		var got string
		for range 3 {
			if got, err = c.Get(ctx, "k").Result(); err == nil {
				break
			}
		}
		if got != "v" || err != nil {
			t.Fatalf("after: %q, %v", got, err)
		}
	}
}
