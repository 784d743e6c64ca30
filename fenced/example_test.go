package fenced_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fenced"
	"github.com/redis/go-redis/v9"
)

// A holder that was paused for too long writes after its successor: the write is refused.
func ExampleSet() {
	server := miniredis.NewMiniRedis()
	if err := server.Start(); err != nil {
		panic(err)
	}
	defer server.Close()
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer rdb.Close()
	c, err := flightlock.New(flightlock.Options{}, rdb)
	if err != nil {
		panic(err)
	}
	defer c.Close(context.Background())

	ctx := context.Background()
	paused, _ := c.SingleFlightLock(ctx, "order:42", time.Second, nil)
	paused.Release(ctx) // or it expired
	current, _ := c.SingleFlightLock(ctx, "order:42", time.Second, nil)
	defer current.Release(ctx)

	fmt.Println(fenced.Set(ctx, rdb, "order:42", "new", current.Fence(), time.Hour))
	err = fenced.Set(ctx, rdb, "order:42", "old", paused.Fence(), time.Hour)
	fmt.Println(errors.Is(err, fenced.ErrStale), rdb.Get(ctx, "order:42").Val())
	// Output:
	// <nil>
	// true new
}

// A writer that changes the origin deletes the cached value, and no reader that loaded before can
// store the old one again.
func ExampleDel() {
	server := miniredis.NewMiniRedis()
	if err := server.Start(); err != nil {
		panic(err)
	}
	defer server.Close()
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer rdb.Close()

	ctx := context.Background()
	const reader, writer = 1001, 1002 // Lock.Fence of two locks, one after the other
	fmt.Println(fenced.Del(ctx, rdb, "order:42", writer))
	fmt.Println(errors.Is(fenced.Set(ctx, rdb, "order:42", "old", reader, time.Hour), fenced.ErrStale))
	// Output:
	// <nil>
	// true
}

// A value and its token share a hash slot, so a Cluster stores them on one server.
func ExampleFenceKey() {
	fmt.Println(fenced.FenceKey("order:42"), fenced.FenceKey("order:{42}:name"))
	fmt.Println("remembered for", fenced.Keep, "longer than the value")
	// Output:
	// {order:42}:fence order:{42}:name:token
	// remembered for 1h0m0s longer than the value
}

// Read-modify-write: no earlier holder can write between the read and the write.
func ExampleGet() {
	server := miniredis.NewMiniRedis()
	if err := server.Start(); err != nil {
		panic(err)
	}
	defer server.Close()
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer rdb.Close()

	ctx := context.Background()
	const paused, current = 1001, 1002 // Lock.Fence of two locks, one after the other
	rdb.Set(ctx, "stock", "7", 0)
	stock, err := fenced.Get(ctx, rdb, "stock", current)
	fmt.Println(stock, err)
	fmt.Println(errors.Is(fenced.Set(ctx, rdb, "stock", "6", paused, 0), fenced.ErrStale))
	// Output:
	// 7 <nil>
	// true
}
