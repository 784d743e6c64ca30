package flightlock

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

func TestSmoke(t *testing.T) {
	var nodes []redis.UniversalClient
	for range 3 {
		m := miniredis.RunT(t)
		cl := redis.NewClient(&redis.Options{Addr: m.Addr()})
		defer cl.Close()
		nodes = append(nodes, cl)
	}
	c, err := New(Options{Nodes: nodes})
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	l, err := c.SingleFlightLock(ctx, "a", time.Second, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(l.Owner(), l.Fence(), time.Until(l.Until()))
	if _, err := c.TryLock(ctx, "a", time.Second); err != nil {
		t.Log(err)
	}
	if _, err := c.Lock(ctx, "a", time.Second, NoRetry()); err != nil {
		t.Log(err)
	}
	if err := l.Refresh(ctx); err != nil {
		t.Fatal(err)
	}
	if err := l.Release(ctx); err != nil {
		t.Fatal(err)
	}
	t.Log(l.Release(ctx))
	var wg sync.WaitGroup
	start := time.Now()
	var last int64
	for range 100 {
		wg.Go(func() {
			for range 2000 {
				l, err := c.SingleFlightLock(ctx, "hot", time.Second, nil)
				if err != nil {
					t.Error(err)
					return
				}
				if l.Fence() <= last {
					t.Error("fence", l.Fence(), last)
				}
				last = l.Fence()
				if err := l.Release(ctx); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	t.Log(time.Since(start)/200000, c.Stats())
	if err := c.Close(ctx); err != nil {
		t.Fatal(err)
	}
}
