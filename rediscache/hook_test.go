package rediscache_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// panics is a hook of the user's that does for commands of one name.
type panics string

func (panics) DialHook(next redis.DialHook) redis.DialHook { return next }

func (name panics) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == string(name) {
			panic("a bug in a hook")
		}
		return next(ctx, cmd)
	}
}

func (name panics) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if cmds[0].Name() == string(name) {
			panic("a bug in a hook")
		}
		return next(ctx, cmds)
	}
}

// A hook of the client's that panics does not end the process where a goroutine of this package called it: the
// request has failed.
func TestAHookThatPanics(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = time.Millisecond
		for _, honours := range []bool{false, true} {
			rdb := w.values.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = honours })
			rdb.AddHook(panics("evalsha"))
			c := w.cacheOf(rdb, rediscache.Options[string]{})
			w.want("k", "k@0", c)
			if err := c.Invalidate(t.Context(), "k"); err == nil || !strings.Contains(err.Error(), "a bug in a hook") {
				t.Errorf("Invalidate: %v", err)
			}
			if n := c.Stats().Repeating; n != 1 {
				t.Errorf("%d invalidations are repeated", n)
			}
			time.Sleep(time.Second) // it is repeated, and fails again
		}
		rdb := w.values.Client(t)
		rdb.AddHook(panics("get"))
		w.want("k", "k@0", w.cacheOf(rdb, rediscache.Options[string]{}))
	})
}
