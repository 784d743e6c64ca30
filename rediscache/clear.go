package rediscache

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
)

// perScan is how many keys one SCAN looks at, and how many are deleted together at most: other commands of
// the server wait for one of these.
const perScan = 200

// Clear deletes all entries of this Cache and its Version. It looks at all keys of the database (on a
// Cluster, of each master), 200 at a time, and then calls progress, if that is not nil, with the number of
// keys deleted so far. If it fails, or slots of a Cluster have moved meanwhile, call it again. Errors: the
// server's; ErrInvalid without Options.Name; ErrClosed.
func (c *Cache[V]) Clear(ctx context.Context, progress func(keys int)) error {
	if c.server.prefix == "" {
		return invalid("Options.Name", "empty", "Clear needs it to know which keys are the Cache's")
	}
	if c.finished.Load() {
		return errClosed
	}
	if progress == nil {
		progress = func(int) {}
	}
	defer c.tier.Clear()
	masters, err := c.server.clients(ctx)
	deleted := 0
	for i := 0; i < len(masters) && err == nil; i++ {
		deleted, err = c.clear(ctx, masters[i], deleted, progress)
	}
	if err != nil {
		return fmt.Errorf("flightlock: clear %q: some values may be left, call it again: %w", c.server.prefix,
			ofCaller(ctx, within(err)))
	}
	return nil
}

// clear deletes the entries of one master. A key that is there from the beginning of a SCAN to its end is
// returned by it, and a load that begins later may be stored.
func (c *Cache[V]) clear(ctx context.Context, on redis.Cmdable, deleted int,
	progress func(keys int)) (int, error) {
	s := c.server
	pattern := globs.Replace(s.prefix) + "*"
	for cursor := uint64(0); ; {
		full, err := do(ctx, s, s.writes, func(ctx context.Context) (full []string, err error) {
			full, cursor, err = on.Scan(ctx, cursor, pattern, perScan).Result()
			return full, err
		})
		if err != nil {
			return deleted, err
		}
		var keys []string
		for _, key := range full {
			if key = strings.TrimPrefix(key, s.prefix); c.checkKey(key) == nil { // else it is another Version's
				keys = append(keys, key)
			}
		}
		for some := range slices.Chunk(keys, perScan) {
			for _, err := range s.touch(ctx, clearScript, some) {
				return deleted, err
			}
			deleted += len(some)
			progress(deleted)
		}
		if cursor == 0 {
			return deleted, nil
		}
	}
}

// globs escapes what a pattern of SCAN would not take for itself.
var globs = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`)

// clients are those of the servers that have the entries.
func (s *server) clients(ctx context.Context) (all []redis.Cmdable, err error) {
	if s.cluster == nil {
		return []redis.Cmdable{s.rdb}, nil
	}
	var mu sync.Mutex // guards all
	err = s.cluster.ForEachMaster(ctx, func(_ context.Context, master *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, master)
		return nil
	})
	return all, err
}
