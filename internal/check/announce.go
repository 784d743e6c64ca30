package check

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	announceDelay    = 10 * time.Second // from the first lock to the first announcement
	announceInterval = time.Minute
	setLife          = 5 * time.Minute
)

// Announce announces the set of nodes that a client locks on until ctx ends, on connections that carry no
// lock traffic: some seconds from now, and every minute from then on. warn is called once for each set of
// another client with which a key may have two holders, for as long as that is in use: with its nodes, as
// that client calls them, and its name.
//
// It is when such a set is found for the second time that it is reported: see Config.readSets.
func (c *Config) Announce(ctx context.Context, warn func(nodes []string, by string)) {
	found := map[string]int{} // how many times in a row
	for pause := announceDelay; ; pause = announceInterval {
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
		now := map[string]int{}
		for _, o := range c.announceOnce(ctx) {
			if o.danger {
				id := fmt.Sprint(o.N, o.Nodes)
				if now[id] = found[id] + 1; now[id] == 2 {
					warn(o.Nodes, o.By)
				}
			}
		}
		found = now
	}
}

// announceOnce announces the set on all nodes that answer, and returns what others have announced there.
func (c *Config) announceOnce(ctx context.Context) []otherSet {
	ctx, stop := context.WithTimeout(ctx, timeout)
	defer stop()
	name, text := c.ownSet()
	c.announced.Store(name, nil)
	others, _ := c.otherSets(each(ctx, c.Run, len(c.Nodes), func(i int) (string, error) {
		if c.Nodes[i].Suspended() {
			return "", errSuspended
		}
		return announce(ctx, c.Clients[i], name, text, setLife)
	}))
	return others
}

var errSuspended = errors.New("suspended")
