package flightlocktest_test

import (
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/redis/go-redis/v9"
)

// Scripts of the user's have as much room as without this package, and those that are loaded are known.
func TestOtherScriptsOfTheProcess(t *testing.T) {
	nodes := flightlocktest.Start(1)
	defer nodes.Close()
	m := miniredis.RunT(t)
	c := redis.NewClient(&redis.Options{Addr: m.Addr()})
	defer c.Close()
	for name, text := range map[string]string{
		"recursion": "local function f(n) if n == 0 then return 0 end local x = f(n - 1) return x + 1 end return " +
			"f(100)",
		"unpack": "local l = {} for i = 1, 2000 do l[i] = 'k' .. i end return redis.call('DEL', unpack(l))",
	} {
		if err := c.Eval(t.Context(), text, nil).Err(); err != nil {
			t.Errorf("%s: %.200v", name, err)
		}
	}
	node, script := nodes.Redis(0), redis.NewScript("return 1")
	script.Load(t.Context(), node)
	if known := script.Exists(t.Context(), node).Val(); len(known) != 1 || !known[0] {
		t.Errorf("EXISTS: %v", known)
	}
	if err := script.EvalShaRO(t.Context(), node, nil).Err(); err != nil {
		t.Errorf("EVALSHA_RO: %v", err)
	}
}
