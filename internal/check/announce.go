package check

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

const (
	announceDelay    = 10 * time.Second // from the first lock to the first announcement
	announceInterval = time.Minute
	setLife          = 5 * time.Minute
)

// Announcer announces the set of nodes that a client locks on, for as long as the client lives:
// some seconds after its first lock, and every minute from then on, on connections that carry no
// lock traffic. The zero value is ready for use.
type Announcer struct {
	begun atomic.Bool

	mu     sync.Mutex // guards what follows
	timer  *time.Timer
	closed bool
	found  map[string]int // how many times in a row a dangerous other set was found
}

// Danger is a set of nodes of other clients with which a key may have two holders.
type Danger struct {
	Nodes []string // as the other client calls them
	By    string   // the other client
}

// Started reports whether Start was called. Every lock calls it; it does not allocate.
func (a *Announcer) Started() bool { return a.begun.Load() }

// Start starts the announcements; it is called by the first lock, and later calls do nothing.
// within starts a goroutine with a ctx that ends with the client; warn is called once for each
// danger while it lasts, with no mutex held.
func (a *Announcer) Start(c *Config, within func(func(context.Context)), warn func(Danger)) {
	if !a.begun.CompareAndSwap(false, true) {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.closed {
		a.timer = time.AfterFunc(announceDelay, func() { within(func(ctx context.Context) { a.announce(ctx, c, warn) }) })
	}
}

// Stop ends the announcements.
func (a *Announcer) Stop() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	if a.timer != nil {
		a.timer.Stop()
	}
}

// announce announces the set on all nodes that answer, checks what others have announced there, and
// schedules the next announcement.
func (a *Announcer) announce(ctx context.Context, c *Config, warn func(Danger)) {
	ctx, stop := context.WithTimeout(ctx, Timeout)
	defer stop()
	name, text := c.ownSet()
	c.announced.Store(name, nil)
	others, _ := c.otherSets(c.eachNode(func(i int) (string, error) {
		if c.Nodes[i].Suspended() {
			return "", errSuspended
		}
		return await(ctx, c.Run, func() (string, error) { return announce(ctx, c.Clients[i], name, text, setLife) })
	}))
	for _, d := range a.news(others) {
		warn(d)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.closed {
		a.timer.Reset(announceInterval)
	}
}

var errSuspended = errors.New("suspended")

// news returns the dangerous sets to report now: each set once while it is in use, when it is found
// for the second time (see Config.read).
func (a *Announcer) news(others []otherSet) (dangers []Danger) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := map[string]int{}
	for _, o := range others {
		if !o.danger {
			continue
		}
		id := fmt.Sprint(o.N, o.Nodes)
		now[id] = a.found[id] + 1
		if now[id] == 2 {
			dangers = append(dangers, Danger{o.Nodes, o.By})
		}
	}
	a.found = now
	return dangers
}

// eachNode calls f for all nodes at once.
func (c *Config) eachNode(f func(i int) (string, error)) []announced {
	all := make([]announced, len(c.Nodes))
	var wg sync.WaitGroup
	for i := range all {
		wg.Go(func() { all[i].text, all[i].err = f(i) })
	}
	wg.Wait()
	return all
}
