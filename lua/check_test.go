package lua_test

import (
	"maps"
	"regexp"
	"slices"
	"testing"

	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// Check tries the commands that the lock scripts use: a right that only one of them needs must not
// be missed.
func TestTheCheckTriesEveryCommand(t *testing.T) {
	commands := func(call, source string) map[string]bool {
		found := map[string]bool{}
		for _, m := range regexp.MustCompile(call+`\('([A-Z]+)'`).FindAllStringSubmatch(source, -1) {
			found[m[1]] = true
		}
		return found
	}
	tried := commands("try", lua.Check.Source)
	used := map[string]bool{}
	for _, s := range append([]lua.Script{lua.Sets}, lua.All...) {
		maps.Copy(used, commands(`redis\.p?call`, s.Source))
	}
	delete(used, "INFO")
	delete(used, "OBJECT")  // the scripts work without, and boot.lua finds out
	delete(used, "PUBLISH") // Check tries these by themselves: locks work without
	delete(used, "SPUBLISH")
	if !maps.Equal(tried, used) {
		t.Errorf("check.lua tries %v, the scripts use %v", slices.Sorted(maps.Keys(tried)),
			slices.Sorted(maps.Keys(used)))
	}
}

// The check finds nothing wrong where everything is right, and leaves nothing.
func TestCheckLeavesNothing(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		if failed := s.must(lua.Check, []string{"lock:x", "flightlock:{x}:check:x"}).([]any); len(failed) != 0 {
			t.Errorf("failed: %v", failed)
		}
		if n := s.DBSize(t.Context()).Val(); n != 0 {
			t.Errorf("%d keys left", n)
		}
	})
}

// Where one command is refused, the check reports that one and no other, and still leaves nothing for long,
// even without PEXPIRE, or without DEL (for want of which the key may be of a type that others refuse).
func TestCheckReportsTheRefusedCommandOnly(t *testing.T) {
	t.Parallel()
	ctx, s := t.Context(), server(t)
	admin := s.Client(t)
	app := s.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "x" })
	for _, m := range regexp.MustCompile(`try\('([A-Z]+)'`).FindAllStringSubmatch(lua.Check.Source, -1) {
		command := m[1]
		for _, denied := range [][]string{{command}, {command, "PEXPIRE"}, {command, "DEL"}} {
			admin.FlushAll(ctx)
			rights := []string{"reset", "on", "nopass", "~*", "&*", "+@all"}
			for _, name := range denied {
				rights = append(rights, "-"+name)
			}
			if err := admin.ACLSetUser(ctx, "app", rights...).Err(); err != nil {
				t.Fatal(err)
			}
			failed, err := app.Eval(ctx, lua.Check.Source, []string{"lock:x", "flightlock:{x}:check:x"}).StringSlice()
			if err != nil {
				t.Fatal(err)
			}
			for i := 0; i < len(failed); i += 2 {
				if !slices.Contains(denied, failed[i]) && (len(denied) == 1 || denied[1] != "DEL") {
					t.Errorf("without %v: %s: %s", denied, failed[i], failed[i+1])
				}
			}
			for _, k := range admin.Keys(ctx, "*").Val() {
				if admin.TTL(ctx, k).Val() < 0 {
					t.Errorf("without %v: %s is left for ever", denied, k)
				}
			}
		}
	}
}
