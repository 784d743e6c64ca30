//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// staysMaster makes a master that gave its last slot away not become a replica of the one that got
// it.
var staysMaster = []string{"--cluster-allow-replica-migration", "no"}

// movingSlots moves the slots of all keys to the master that has none, all at once and key by key, so that
// a lock's key, its counter and its wants are apart for a while in one way or another; and then
// back.
func movingSlots(ctx context.Context, c *cell) error {
	ids, err := c.masterIDs(ctx)
	if err != nil {
		return err
	}
	const empty = 2
	home := map[int64]int{} // by slot
	for _, key := range c.keys() {
		slot, err := c.nodes[0].ClusterKeySlot(ctx, "lock:"+key).Result()
		if err != nil {
			return err
		}
		home[slot] = 0
		if slot >= 8192 {
			home[slot] = 1
		}
	}
	each := func(move func(slot int64, home int) error) error {
		errs := make(chan error, len(home))
		var wg sync.WaitGroup
		for slot, at := range home {
			wg.Go(func() { errs <- move(slot, at) })
		}
		wg.Wait()
		var all []error
		for range home {
			all = append(all, <-errs)
		}
		return errors.Join(all...)
	}
	if err := each(func(slot int64, at int) error { return c.moveSlot(ctx, ids, slot, at, empty) }); err != nil {
		return err
	}
	pause(ctx, c.ttl/2)
	return each(func(slot int64, at int) error { return c.moveSlot(ctx, ids, slot, empty, at) })
}

// keys are those that the processes share.
func (c *cell) keys() []string {
	keys := []string{hotKey, keptKey}
	for i := range longKeys {
		keys = append(keys, longKey(i))
	}
	for i := range ownKeys {
		keys = append(keys, ownKey(i))
	}
	return keys
}

// masterIDs are the names that the Cluster has for its masters.
func (c *cell) masterIDs(ctx context.Context) (ids []string, err error) {
	for _, n := range c.nodes {
		id, err := n.ClusterMyID(ctx).Result()
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, nil
}

// moveSlot moves a slot from one master to another as redis-cli does, but one key after the other, in any
// order and with pauses. A key that is on both would be an error (BUSYKEY).
func (c *cell) moveSlot(ctx context.Context, ids []string, slot int64, from, to int) error {
	source, target := c.nodes[from], c.nodes[to]
	err := errors.Join(
		target.Do(ctx, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[from]).Err(),
		source.Do(ctx, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[to]).Err())
	if err != nil {
		return err
	}
	for {
		pause(ctx, c.ttl/5+rand.N(c.ttl*2/5))
		keys, err := source.ClusterGetKeysInSlot(ctx, int(slot), 100).Result()
		switch {
		case err != nil:
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		case len(keys) == 0:
			return c.handOver(ctx, ids, slot, from, to)
		}
		key := keys[rand.IntN(len(keys))]
		err = source.Do(ctx, "MIGRATE", "127.0.0.1", c.servers[to].Port(), key, 0,
			(5 * time.Second).Milliseconds()).Err()
		if err != nil {
			return fmt.Errorf("MIGRATE %s: %w", key, err)
		}
	}
}

// handOver makes the target the slot's master: it is the first to know, otherwise both would
// redirect clients to each other.
func (c *cell) handOver(ctx context.Context, ids []string, slot int64, from, to int) error {
	told := []*redis.Client{c.nodes[to], c.nodes[from]}
	for i, n := range c.nodes {
		if i != from && i != to {
			told = append(told, n)
		}
	}
	for _, n := range told {
		if err := n.Do(ctx, "CLUSTER", "SETSLOT", slot, "NODE", ids[to]).Err(); err != nil {
			return err
		}
	}
	return nil
}
