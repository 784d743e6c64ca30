package flightlock_test

import (
	"testing"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

func TestMain(m *testing.M) {
	if redistest.Raced {
		redistest.SayWhatIsLeftOut("many rounds, keys and combinations", "go test .")
	}
	testkit.Main(m)
}

// inBubble runs f in virtual time, with a Client that has the default Options and its n nodes.
func inBubble(t *testing.T, n int, f func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode)) {
	t.Helper()
	testkit.Bubble(t, n, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		f(t, lockkit.New(t, flightlock.Options{}, clients...), nodes)
	})
}
