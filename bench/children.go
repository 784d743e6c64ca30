package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// This file is the near end of -procs: it starts the processes and makes each of them look like a crew.

// startChildren starts cfg.procs processes, spreads the clients over them, and shares the register with them.
func (b *bench) startChildren(ctx context.Context) error {
	reg, path, err := createShared()
	if err != nil {
		return err
	}
	defer os.Remove(path) // every child has mapped it by then
	b.reg = reg
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("-procs: finding this program to start it again: %w", err)
	}
	for i := range b.cfg.procs {
		s := b.setup()
		s.Proc, s.Register = i, path
		s.Clients, s.Polling = b.cfg.clientsOf(i)
		c, err := startChild(exe, i)
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

// clientsOf says how many of the clients process i runs, and how many of these poll. The last of all clients poll.
func (cfg config) clientsOf(i int) (clients, polling int) {
	first, end := cfg.clients*i/cfg.procs, cfg.clients*(i+1)/cfg.procs
	return end - first, max(0, end-max(first, cfg.clients-cfg.polling))
}

// childCrew is a crew in another process. One goroutine uses it.
type childCrew struct {
	number int
	cmd    *exec.Cmd
	in     io.WriteCloser // its stdin: closing it ends the child
	enc    *json.Encoder
	dec    *json.Decoder
}

func startChild(exe string, number int) (*childCrew, error) {
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childEnv+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("-procs: starting process %d: %w", number, err)
	}
	return &childCrew{number, cmd, in, json.NewEncoder(in), json.NewDecoder(out)}, nil
}

// call sends a request and waits for its reply. When ctx ends first, so does the child.
func (c *childCrew) call(ctx context.Context, r request) (rep reply, err error) {
	stop := context.AfterFunc(ctx, func() { c.in.Close() })
	defer stop()
	if err = c.enc.Encode(r); err == nil {
		err = c.dec.Decode(&rep)
	}
	switch {
	case ctx.Err() != nil:
		return rep, ctx.Err()
	case errors.Is(err, io.EOF):
		return rep, fmt.Errorf("process %d ended without an answer to %q", c.number, r.Op)
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
	c.in.Close()
	kill := time.AfterFunc(8*time.Second, func() { c.cmd.Process.Kill() })
	defer kill.Stop()
	if err := c.cmd.Wait(); err != nil {
		return fmt.Errorf("process %d: %w", c.number, err)
	}
	return nil
}
