// Package fenced writes Redis values on the condition that no later lock holder has written before.
//
// A lock cannot stop a holder that was paused, lost the lock, and continues with its write. Only
// the resource can, by remembering the largest fencing token that it has seen (Kleppmann, "How to
// do distributed locking", 2016). Here the resource is a plain string in Redis. Its token is stored
// in another key of the same hash slot, and one script compares and writes both.
//
//	lock, err := c.SingleFlightLock(ctx, "order:42", 10*time.Second, nil)
//	...
//	err = fenced.Set(ctx, rdb, "order:42", data, lock.Fence(), time.Hour)
//	if errors.Is(err, fenced.ErrStale) {
//		// a later holder has written: this value is out of date
//	}
//
// Values can be read with a plain GET. A holder that writes a value derived from the one it read
// (read-modify-write: a counter, a list) reads it with [Get]. All writers of a value must use this
// package. It works with any redis.Scripter that replies at once: a server, a Sentinel-managed master,
// a Cluster. A pipeline or transaction is an error, because its replies are not known before Exec. The
// values need not be stored on the lock nodes.
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

// ErrStale reports that a writer with a larger token has written, deleted or read (Get) the value
// before. Nothing was written.
var ErrStale = errors.New("a later lock holder has written")

// Keep is how much longer than its value a token is remembered: a writer that is delayed by more is
// no longer detected. The token of a value without a ttl has no ttl either, whatever is written later.
const Keep = time.Hour

//go:embed set.lua
var source string

var script = redis.NewScript(source)

// Set writes value to key with the given ttl (0: none; otherwise 1ms or more, in whole milliseconds),
// unless the key was read by Get, written or deleted with a token larger than fence: then nothing is
// written and the error is ErrStale. The same token may write again. value is of a type that go-redis
// accepts as an argument: a string, []byte, a number, an encoding.BinaryMarshaler.
//
// An empty key, a negative fence, a bad ttl or a redis.Pipeliner as rdb is an error, and nothing is sent; Get
// and Del do the same.
//
// fence is the result of Lock.Fence. The token 0, that of no lock, is older than any other: it
// writes only where no holder of a lock has written. So do not use it for a value that was loaded
// without a lock while the lock nodes are down: store that with SET NX, for a few seconds.
func Set(ctx context.Context, rdb redis.Scripter, key string, value any, fence int64,
	ttl time.Duration) error {
	if ttl < 0 || ttl > 0 && ttl < time.Millisecond {
		return fmt.Errorf("fenced: set %q: a ttl of %v: it must be 0 or at least 1ms", key, ttl)
	}
	_, err := run(ctx, rdb, "set", key, fence, ttl, value)
	return err
}

// Get reads key for a holder that will write a value derived from it. It fails with ErrStale if the
// key was read by Get, written or deleted with a token larger than fence, and with redis.Nil if
// there is no value.
//
// From then on writes with a smaller token are refused. After a plain GET, an earlier holder that
// was paused can write between this holder's read and its write: that write is acknowledged, and
// then lost.
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

// Del deletes key unless it was read by Get, written or deleted with a token larger than fence:
// then the error is ErrStale. The token stays for Keep at least, so that no earlier holder restores the
// value; if the value had no ttl before, for ever. The key need not exist.
func Del(ctx context.Context, rdb redis.Scripter, key string, fence int64) error {
	_, err := run(ctx, rdb, "del", key, fence, 0, "")
	return err
}

// run executes the script. For a get it returns the value, if there is one.
func run(ctx context.Context, rdb redis.Scripter, op, key string, fence int64, ttl time.Duration,
	value any) (*string, error) {
	if key == "" {
		return nil, fmt.Errorf("fenced: %s: the key is empty", op)
	}
	if fence < 0 {
		return nil, fmt.Errorf("fenced: %s %q: the token is %d, but tokens are not below 0", op, key, fence)
	}
	if _, queues := rdb.(redis.Pipeliner); queues { // it would look as if the token was not stale
		return nil, fmt.Errorf("fenced: %s %q: a %T has no reply before Exec: use its client", op, key, rdb)
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

// FenceKey returns the key that holds the token of key. It is in the same hash slot, so that one
// script may access both on a Cluster. The exception is a key that contains a } and no hash tag;
// such a key cannot be used on a Cluster.
//
// A key that contains braces may be the FenceKey of another key. If clients choose a part of the
// key, refuse braces in it: otherwise they can read tokens as values, and overwrite them.
func FenceKey(key string) string {
	if open := strings.IndexByte(key, '{'); open >= 0 && strings.IndexByte(key[open+1:], '}') > 0 {
		return key + ":token"
	}
	return "{" + key + "}:fence"
}
