package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/flightlock/flightlock/internal/procs"
)

// This file is the near end of -procs: it starts the processes and makes each of them look like a crew.

// startChildren starts cfg.procs processes, spreads the clients over them, and shares the register
// with them.
func (b *bench) startChildren(ctx context.Context) error {
	reg, path, err := createShared()
	if err != nil {
		return err
	}
	defer os.Remove(path) // every child has mapped it by then
	b.reg = reg
	for i := range b.cfg.procs {
		s := b.setup()
		s.Proc, s.Register = i, path
		s.Clients, s.Polling = b.cfg.clientsOf(i)
		c, err := startChild(i)
		if err != nil {
			return err
		}
		b.crews = append(b.crews, c)
		if _, err := c.call(ctx, request{Op: opSetup, Setup: &s}); err != nil {
			return err
		}
	}
	return nil
}

// clientsOf says how many of the clients process i runs, and how many of these poll. The last of
// all clients poll.
func (cfg config) clientsOf(i int) (clients, polling int) {
	first, end := cfg.clients*i/cfg.procs, cfg.clients*(i+1)/cfg.procs
	return end - first, max(0, end-max(first, cfg.clients-cfg.polling))
}

// childCrew is a crew in another process. One goroutine uses it.
type childCrew struct {
	number int
	child  *procs.Child
}

func startChild(number int) (*childCrew, error) {
	cmd, err := procs.Self(childEnv + "=1")
	if err != nil {
		return nil, fmt.Errorf("-procs: finding this program to start it again: %w", err)
	}
	child, err := procs.StartChild(cmd)
	if err != nil {
		return nil, fmt.Errorf("-procs: starting process %d: %w", number, err)
	}
	return &childCrew{number, child}, nil
}

// call sends a request and waits for its reply. When ctx ends first, so does the child.
func (c *childCrew) call(ctx context.Context, r request) (rep reply, err error) {
	err = c.child.Call(ctx, r, &rep)
	switch {
	case ctx.Err() != nil:
		return rep, ctx.Err()
	case err != nil:
		return rep, fmt.Errorf("process %d, %q: %w", c.number, r.Op, err)
	case rep.Error != "":
		return rep, fmt.Errorf("process %d: %s", c.number, rep.Error)
	}
	return rep, nil
}

func (c *childCrew) prepare(ctx context.Context, j job) error {
	_, err := c.call(ctx, request{Op: opPrepare, Job: &j})
	return err
}

func (c *childCrew) run(ctx context.Context, at time.Time) (*outcome, error) {
	rep, err := c.call(ctx, request{Op: opRun, At: at})
	if err == nil && rep.Outcome == nil {
		err = fmt.Errorf("process %d ran and reported nothing", c.number)
	}
	return rep.Outcome, err
}

// close lets the child end by itself, and kills it if that takes more than 8 seconds.
func (c *childCrew) close() error {
	if err := c.child.End(8 * time.Second); err != nil {
		return fmt.Errorf("process %d: %w", c.number, err)
	}
	return nil
}
