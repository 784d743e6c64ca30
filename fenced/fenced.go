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
// Values are read as ever, with GET; but who writes what follows from what it has read, a
// counter or a list, reads it with [Get]. All that write a value must do it through this
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
// no holder of a lock has written. So it is not for what was loaded without a lock while the locks'
// nodes are down: that is put where nothing is, by SET NX, for some seconds (see flightlock.Source.Store).
func Set(ctx context.Context, rdb redis.Scripter, key string, value any, fence int64, ttl time.Duration) error {
	if ttl < 0 || ttl > 0 && ttl < time.Millisecond {
		return fmt.Errorf("fenced: set %q: a ttl of %v: it must be 0 or at least 1ms", key, ttl)
	}
	_, err := run(ctx, rdb, "set", key, fence, ttl, value)
	return err
}

// Get reads key for a holder that will write what follows from it. It fails with ErrStale if
// the key was read so, written or deleted with a token larger than fence, and with redis.Nil
// if there is no value.
//
// From then on a smaller token writes nothing. A plain GET lets an earlier holder, which was
// paused, write between this holder's read and its write: that write is acknowledged, and then lost.
func Get(ctx context.Context, rdb redis.Scripter, key string, fence int64) (string, error) {
	value, err := run(ctx, rdb, "get", key, fence, 0, "")
	if err != nil {
		return "", err
	}
	if value == nil {
		return "", redis.Nil
	}
	return *value, nil
}

// Del deletes key unless it was written or deleted with a token larger than fence; then the
// error is ErrStale. The token stays for Keep, so that no earlier holder brings the value
// back. There need be no value.
func Del(ctx context.Context, rdb redis.Scripter, key string, fence int64) error {
	_, err := run(ctx, rdb, "del", key, fence, 0, "")
	return err
}

// run executes the script, and returns the value if that was asked for and there is one.
func run(ctx context.Context, rdb redis.Scripter, op, key string, fence int64, ttl time.Duration, value any) (*string, error) {
	if key == "" {
		return nil, fmt.Errorf("fenced: %s: the key is empty", op)
	}
	if fence < 0 {
		return nil, fmt.Errorf("fenced: %s %q: the token is %d, but tokens are not below 0", op, key, fence)
	}
	reply, err := script.Run(ctx, rdb, []string{key, FenceKey(key)},
		strconv.FormatInt(fence, 10), op, ttl.Milliseconds(), Keep.Milliseconds(), value).Result()
	if err != nil {
		return nil, fmt.Errorf("fenced: %s %q: %w", op, key, err)
	}
	switch reply := reply.(type) {
	case string:
		return nil, fmt.Errorf("fenced: %s %q with token %d: %w: its token is %s", op, key, fence, ErrStale, reply)
	case []any:
		if value, ok := reply[0].(string); ok {
			return &value, nil
		}
	}
	return nil, nil
}

// FenceKey is where the token of key stands: in the same hash slot, so that one script may
// touch both on a Cluster. Only a key that has a } and no hash tag has no such place; such
// a key cannot be used on a Cluster.
//
// A key that contains braces may be the FenceKey of another key. Where clients choose a part of the
// key, refuse braces in it: otherwise they can read tokens as values, and overwrite them.
func FenceKey(key string) string {
	if open := strings.IndexByte(key, '{'); open >= 0 && strings.IndexByte(key[open+1:], '}') > 0 {
		return key + ":token"
	}
	return "{" + key + "}:fence"
}
