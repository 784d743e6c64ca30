// Package fenced writes Redis values on the condition that no later lock holder has written
// before.
//
// A lock cannot stop a holder that was paused, lost the lock, and goes on with its write:
// only the resource can, by remembering the largest fencing token that it has seen
// (Kleppmann, "How to do distributed locking", 2016). Here the resource is a plain string
// in Redis. Its token stands beside it, in a key of the same hash slot, and one script
// compares and writes both.
//
//	lock, err := c.SingleFlightLock(ctx, "user:42", 10*time.Second, nil)
//	...
//	err = fenced.Set(ctx, rdb, "user:42", data, lock.Fence(), time.Hour)
//	if errors.Is(err, fenced.ErrStale) {
//		// a later holder has written: this value is out of date
//	}
//
// Values are read as ever, with GET. All that write a value must do it through this
// package. It works with any redis.Scripter: a server, a Sentinel-managed master, a
// Cluster; the value need not live where the locks do.
package fenced

import (
	"context"
	_ "embed" // the script is part of the binary
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// ErrStale says that a writer with a larger token was there before. Nothing was written.
var ErrStale = errors.New("a later lock holder has written")

// Keep is how much longer than its value a token is remembered: a writer that was delayed
// by more is not recognised any more. A value without a ttl has a token without one.
const Keep = time.Hour

//go:embed set.lua
var source string

var script = redis.NewScript(source)

// Set makes value the value of key for ttl, 0 for good, unless it was written or deleted
// with a token larger than fence. The same token may write again. Otherwise nothing happens
// and the error is ErrStale.
//
// fence is Lock.Fence. 0, that of no lock at all, is older than any: it writes only where
// no holder of a lock has written.
func Set(ctx context.Context, rdb redis.Scripter, key string, value any, fence int64, ttl time.Duration) error {
	if ttl < 0 || ttl > 0 && ttl < time.Millisecond {
		return fmt.Errorf("fenced: set %q: a ttl of %v: it must be 0 or at least 1ms", key, ttl)
	}
	return run(ctx, rdb, "set", key, fence, ttl, value)
}

// Del deletes key unless it was written or deleted with a token larger than fence; then the
// error is ErrStale. The token stays for Keep, so that no earlier holder brings the value
// back. There need be no value.
func Del(ctx context.Context, rdb redis.Scripter, key string, fence int64) error {
	return run(ctx, rdb, "del", key, fence, 0, "")
}

func run(ctx context.Context, rdb redis.Scripter, op, key string, fence int64, ttl time.Duration, value any) error {
	if key == "" {
		return fmt.Errorf("fenced: %s: the key is empty", op)
	}
	if fence < 0 {
		return fmt.Errorf("fenced: %s %q: the token is %d, but tokens are not below 0", op, key, fence)
	}
	reply, err := script.Run(ctx, rdb, []string{key, FenceKey(key)},
		strconv.FormatInt(fence, 10), op, ttl.Milliseconds(), Keep.Milliseconds(), value).Result()
	if err != nil {
		return fmt.Errorf("fenced: %s %q: %w", op, key, err)
	}
	if known, larger := reply.(string); larger {
		return fmt.Errorf("fenced: %s %q with token %d: %w: its token is %s", op, key, fence, ErrStale, known)
	}
	return nil
}

// FenceKey is where the token of key stands: in the same hash slot, so that one script may
// touch both on a Cluster. Only a key that has a } and no hash tag has no such place; such
// a key cannot be used on a Cluster.
func FenceKey(key string) string {
	if open := strings.IndexByte(key, '{'); open >= 0 && strings.IndexByte(key[open+1:], '}') > 0 {
		return key + ":token"
	}
	return "{" + key + "}:fence"
}
