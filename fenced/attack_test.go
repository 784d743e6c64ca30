package fenced_test

import (
	"errors"
	"testing"
	"time"

	"github.com/flightlock/flightlock/fenced"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// However far a write gets that the server refuses in the middle, it leaves no value that an older
// token may overwrite afterwards.
func TestARefusedWriteLeavesNoValueWithoutItsToken(t *testing.T) {
	s := redistest.StartServer(t)
	admin := s.Client(t)
	app := s.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "x" })
	ctx := t.Context()
	for name, rights := range map[string][]string{
		"the token may not be written": {"~k", "%R~{k}:fence", "+@all"},
		"nor read":                     {"~k", "+@all"},
		"the value may not be written": {"%R~k", "~{k}:fence", "+@all"},
		"no PTTL":                      {"~*", "+@all", "-pttl"},
		"no SET":                       {"~*", "+@all", "-set"},
	} {
		admin.FlushAll(ctx)
		admin.ACLSetUser(ctx, "app", "reset", "on", "nopass", "~*", "+@all")
		if err := fenced.Set(ctx, app, "k", "five", 5, time.Minute); err != nil {
			t.Fatal(err)
		}
		admin.ACLSetUser(ctx, "app", append([]string{"resetkeys", "-@all"}, rights...)...)
		if err := fenced.Set(ctx, app, "k", "seven", 7, time.Minute); err == nil {
			t.Errorf("%s: the write succeeds", name)
		}
		admin.ACLSetUser(ctx, "app", "~*", "+@all")
		seven := admin.Get(ctx, "k").Val() == "seven"
		err := fenced.Set(ctx, app, "k", "six", 6, time.Minute)
		if seven && !errors.Is(err, fenced.ErrStale) {
			t.Errorf("%s: the value of token 7 was overwritten with token 6: %v", name, err)
		}
	}
}
