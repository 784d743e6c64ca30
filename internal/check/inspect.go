package check

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/lua"
)

// Seen is what a node knows of a lock.
type Seen struct {
	Owner   string        // "": none
	TTL     time.Duration // below 0 if unknown, or if there is no owner
	Counter int64         // of its tokens; 0 if there is none
	Waiting []string      // the contenders, in order
	Err     error         // why nothing is known
}

// Inspect reads what each node knows of the lock of key, which has its prefix, with the arguments of
// lua/inspect.lua. It ends with ctx.
func (c *Config) Inspect(ctx context.Context, key string, args ...any) []Seen {
	all := make([]Seen, len(c.Nodes))
	for i, r := range each(ctx, c.Run, len(c.Nodes), func(i int) (any, error) {
		return node.Eval(ctx, c.Clients[i], lua.Inspect, node.KeysOf(key), args...)
	}) {
		all[i], r.err = parseSeen(r.v, r.err)
		all[i].Err = r.err
	}
	return all
}

// parseSeen reads the reply of lua/inspect.lua.
func parseSeen(got any, err error) (s Seen, _ error) {
	if err != nil {
		return s, err
	}
	texts, _ := got.([]any)
	if len(texts) < 3 {
		return s, fmt.Errorf("unexpected reply %v to inspect", got)
	}
	s.Owner, _ = texts[0].(string)
	ttl, _ := texts[1].(int64)
	counter, _ := texts[2].(string)
	s.TTL = clock.Mul(ttl, time.Millisecond)
	s.Counter, err = strconv.ParseInt(counter, 10, 64)
	for _, text := range texts[3:] {
		contender, _ := text.(string)
		s.Waiting = append(s.Waiting, contender)
	}
	return s, err
}
