package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/flightlock/flightlock"
)

// crew is the clients of one process: this one (localCrew), or a child at the other end of a pipe
// (childCrew). All crews get the same jobs at the same time: first prepare, everywhere; then run,
// everywhere.
type crew interface {
	prepare(ctx context.Context, j job) error                // open clients, warm up
	run(ctx context.Context, at time.Time) (*outcome, error) // begin at that time, by the wall clock
	close() error
}

// job is one measured stretch of work.
type job struct {
	Kind string   `json:"kind"` // one of the kinds below
	URLs []string `json:"urls"` // nodes to lock on
	Key  string   `json:"key"`

	Goroutines int           `json:"goroutines"` // per client, for the key
	Load       time.Duration `json:"load"`       // a stampede: what the origin takes
	Cached     bool          `json:"cached"`     // a stampede: the value is in the cache from the start
	OwnKeys    int           `json:"own_keys"`   // per client, each for a key of its own
	Work       time.Duration `json:"work"`       // under the lock of the key
	Parts      int           `json:"parts"`
	Part       time.Duration `json:"part"` // length of each; 0: the job ends when its work is done
	Warmup     time.Duration `json:"warmup"`
}

// The kinds of jobs: the ways through a stampede, and hammering.
const (
	kindUnprotected  = "unprotected"
	kindSingleflight = "singleflight per process"
	kindLock         = "SingleFlightLock + re-check"
	kindFetch        = "Fetch"
	kindByHand       = "by hand" // not in the programme
	kindHammer       = "hammer"
)

// crewSetup is what a crew must know before its first job.
type crewSetup struct {
	Proc     int           `json:"proc"`
	Clients  int           `json:"clients"`
	Polling  int           `json:"polling"`   // how many of them poll: the last ones
	Linger   time.Duration `json:"linger_ns"` // Options.Linger
	Embedded bool          `json:"embedded"`
	Prefix   string        `json:"prefix"` // of all keys
	Register string        `json:"register"`
	CacheURL string        `json:"cache_url"` // "": the cache is a map in this process; or sharedMemory
}

// localCrew runs jobs on clients in this process. One goroutine uses it.
type localCrew struct {
	crewSetup
	open  opener
	reg   *register
	cache cache

	urls    []string // what clients are connected to
	clients []locker
	hand    *setNXLoads // nil until a job needs it
	job     job
	tallies []*tally // one per client, of job
}

func newLocalCrew(s crewSetup, open opener, reg *register) (*localCrew, error) {
	cache, err := newCache(s.CacheURL, s.Prefix, reg)
	if err != nil {
		return nil, err
	}
	return &localCrew{crewSetup: s, open: open, reg: reg, cache: cache}, nil
}

// prepare connects to the job's nodes if that is not done yet, and warms up: by a lock for each
// client, so that no figure contains a connect or the loading of a script, and then by the load
// itself, as long as the job says.
func (c *localCrew) prepare(ctx context.Context, j job) error {
	c.job, c.tallies = j, nil
	for range c.Clients {
		c.tallies = append(c.tallies, new(tally))
	}
	if err := c.connect(ctx, j.URLs); err != nil {
		return err
	}
	if j.Kind == kindByHand && c.hand == nil {
		hand, err := newSetNXLoads(ctx, j.URLs[0], c.Prefix)
		if err != nil {
			return err
		}
		c.hand = hand
	}
	if j.Warmup > 0 {
		c.hammer(ctx, window{}, j.Warmup)
	}
	if j.Cached {
		return c.cache.store(ctx, j.Key)
	}
	return ctx.Err()
}

func (c *localCrew) run(ctx context.Context, at time.Time) (*outcome, error) {
	before := c.stats()
	if c.job.Kind == kindHammer {
		if err := sleep(ctx, time.Until(at)); err != nil {
			return nil, err
		}
		win := window{start: time.Now(), part: c.job.Part, parts: c.job.Parts}
		c.hammer(ctx, win, c.job.Part*time.Duration(c.job.Parts))
	} else if err := c.stampede(ctx, at); err != nil {
		return nil, err
	}
	return c.outcome(before, c.stats()), ctx.Err()
}

// outcome adds up the tallies, and what the clients counted between two looks at their Stats.
func (c *localCrew) outcome(before, after []flightlock.Stats) *outcome {
	out := newOutcome(c.job.Parts)
	for i, t := range c.tallies {
		out.addTally(t)
		co := clientOutcome{
			Proc: c.Proc, Polling: c.polls(i),
			Commands: after[i].Commands - before[i].Commands,
			Handoffs: after[i].Handoffs - before[i].Handoffs,
			Attempts: after[i].Attempts - before[i].Attempts,
		}
		for p := range c.job.Parts {
			co.Locks += t.parts[p].locks.Load()
			co.Held += time.Duration(t.parts[p].held.Load())
			co.LongestWait = max(co.LongestWait, t.parts[p].waits.Max())
		}
		out.Clients = append(out.Clients, co)
	}
	return out
}

func (c *localCrew) stats() (all []flightlock.Stats) {
	for _, cl := range c.clients {
		all = append(all, cl.stats())
	}
	return all
}

// connect opens clients on urls, unless the present ones are.
func (c *localCrew) connect(ctx context.Context, urls []string) error {
	if c.clients != nil && slices.Equal(c.urls, urls) {
		return nil
	}
	if err := c.closeClients(); err != nil {
		return err
	}
	c.urls = urls
	for i := range c.Clients {
		cl, err := c.open(urls, c.options(i))
		if err != nil {
			return fmt.Errorf("opening a client: %w", err)
		}
		c.clients = append(c.clients, cl)
		if err := c.firstLock(ctx, cl, i); err != nil {
			return fmt.Errorf("a first lock: %w", err)
		}
	}
	return nil
}

// options are the defaults, but for clients that poll, and for embedded nodes: they have no INFO
// server, which the quarantine needs, and they compete with the load for the same CPUs and take 0.2
// ms for a script, so that the default NodeTimeout would show when this machine is busy and not how
// the lock behaves.
func (c *localCrew) options(client int) flightlock.Options {
	o := flightlock.Options{KeyPrefix: c.Prefix, DisableNotify: c.polls(client), Linger: c.Linger}
	if c.Embedded {
		o.DisableQuarantine, o.NodeTimeout = true, time.Second
	}
	return o
}

// polls reports whether a client of this crew receives no notices.
func (c *localCrew) polls(client int) bool { return client >= c.Clients-c.Polling }

// firstLock proves that the nodes can be locked on at all, before thousands of goroutines try. That its
// release is not answered in time proves nothing: the machine may be busy. If releases are refused, the load
// shows it.
func (c *localCrew) firstLock(ctx context.Context, cl locker, client int) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	l, err := cl.lock(ctx, fmt.Sprintf("first:%d:%d", c.Proc, client), hammerTTL)
	if err != nil {
		return err
	}
	if err := l.Release(ctx); !errors.Is(err, flightlock.ErrUnavailable) {
		return err
	}
	return nil
}

func (c *localCrew) closeClients() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	errs := make([]error, len(c.clients))
	var wg sync.WaitGroup
	for i, cl := range c.clients {
		wg.Go(func() { errs[i] = cl.close(ctx) })
	}
	wg.Wait()
	c.clients = nil
	return errors.Join(errs...)
}

func (c *localCrew) close() error {
	if c.hand != nil {
		c.hand.close()
	}
	return errors.Join(c.closeClients(), c.cache.close())
}
