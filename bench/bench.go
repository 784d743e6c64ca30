package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/flightlock/flightlock/internal/progress"
	"golang.org/x/sync/errgroup"
)

// bench is one run: the nodes, the crews that load them, and the register that checks them.
type bench struct {
	cfg   config
	nodes *nodes
	crews []crew
	reg   *register
	bar   *progress.Bar
	jobs  int // so far: each has a key of its own
}

// runBench runs all phases and reports. An error means that the run could not be completed; what
// the checks found is in the report.
func runBench(ctx context.Context, cfg config, bar *progress.Bar) (rep *report, err error) {
	n, err := startNodes(ctx, cfg.redis)
	if err != nil {
		return nil, err
	}
	defer n.close()
	// Clean-up and the end of the crews come also after an interrupt, so not with ctx. What
	// was measured is worth more than a clean server: a node may have died meanwhile.
	defer func() {
		if dirt := n.cleanUp(context.WithoutCancel(ctx)); dirt != nil {
			fmt.Fprintln(os.Stderr, "bench: not cleaned up:", dirt)
		}
	}()

	b := &bench{cfg: cfg, nodes: n, bar: bar}
	defer func() { err = errors.Join(err, b.closeCrews()) }()
	if err := b.startCrews(ctx); err != nil {
		return nil, err
	}
	rep, err = b.phases(ctx)
	if ctx.Err() != nil {
		return nil, errors.New("interrupted")
	}
	return rep, err
}

func (b *bench) setup() crewSetup {
	s := crewSetup{Clients: b.cfg.clients, Polling: b.cfg.polling, Linger: b.cfg.linger,
		Embedded: len(b.nodes.embedded) > 0, Prefix: b.nodes.prefix}
	if s.CacheURL = b.cfg.cacheURL; s.CacheURL == "" && b.cfg.procs > 0 {
		s.CacheURL = b.nodes.urls[0]
	}
	return s
}

// startCrews starts the one crew of this process, or the processes.
func (b *bench) startCrews(ctx context.Context) error {
	if b.cfg.procs > 0 {
		return b.startChildren(ctx)
	}
	b.reg = newRegister()
	c, err := newLocalCrew(b.setup(), b.cfg.open, b.reg)
	if err != nil {
		return err
	}
	b.crews = []crew{c}
	return nil
}

func (b *bench) closeCrews() error {
	var g errgroup.Group
	for _, c := range b.crews {
		g.Go(c.close)
	}
	return g.Wait()
}

// startDelay is how far ahead a job's start is set, so that the processes learn of it in time and
// start together.
const startDelay = 50 * time.Millisecond

// do runs one job in all crews at once, and meanwhile beside it, if that is not nil. It returns
// what they did, and the longest time without a holder in each part.
func (b *bench) do(ctx context.Context, j job,
	meanwhile func(ctx context.Context, start time.Time) error) (*outcome, []time.Duration, error) {
	b.jobs++
	j.Key = fmt.Sprintf("key:%d", b.jobs)
	b.reg.reset()
	if err := b.all(ctx, func(ctx context.Context, c crew, _ int) error {
		return c.prepare(ctx, j)
	}); err != nil {
		return nil, nil, err
	}
	outs := make([]*outcome, len(b.crews))
	start := time.Now()
	if b.cfg.procs > 0 {
		start = start.Add(startDelay)
	}
	b.reg.startGaps(start)
	g, gctx := errgroup.WithContext(ctx)
	if meanwhile != nil {
		g.Go(func() error { return meanwhile(gctx, start) })
	}
	g.Go(func() error {
		return b.all(gctx, func(ctx context.Context, c crew, i int) (err error) {
			outs[i], err = c.run(ctx, start)
			return err
		})
	})
	if err := g.Wait(); err != nil {
		return nil, nil, err
	}
	gaps := b.reg.endGaps(start.Add(j.Part*time.Duration(j.Parts)), j.Parts)
	sum := newOutcome(j.Parts)
	for _, o := range outs {
		sum.merge(o)
	}
	return sum, gaps, nil
}

// all calls f for every crew at once.
func (b *bench) all(ctx context.Context, f func(context.Context, crew, int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	for i, c := range b.crews {
		g.Go(func() error { return f(ctx, c, i) })
	}
	return g.Wait()
}
