package lua_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// Whatever command of its own acquire may not run, with a bucket that is missing: it fails, and as
// soon as the command is allowed again the bucket begins at the node's clock, not where a failed
// vote has left it.
func TestARefusedCommandLeavesNoCounterBelowTheClock(t *testing.T) {
	ctx := context.Background()
	s := redistest.StartServer(t)
	admin := s.Client(t)
	for _, command := range []string{"set", "get", "incrby", "time", "pttl", "del", "pexpire"} {
		admin.FlushAll(ctx)
		admin.ACLSetUser(ctx, "app", "reset", "on", "nopass", "~*", "&*", "+@all", "-"+command)
		app := s.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "x" })
		acquire := func(owner string) (any, error) {
			return app.Eval(ctx, lua.Acquire.Source, []string{key, bucket}, owner, minute, 1).Result()
		}
		_, _ = acquire("first")
		admin.ACLSetUser(ctx, "app", "+@all")
		admin.Del(ctx, key) // its ttl would end it, or its release
		began := time.Now().Add(-time.Second)
		got, err := acquire("second")
		if err != nil {
			t.Fatal(err)
		}
		if c, _ := got.(int64); c < began.UnixMicro() {
			t.Errorf("once without %s, the next token is %v, far below the clock", strings.ToUpper(command), got)
		}
	}
}
