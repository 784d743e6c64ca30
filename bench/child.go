package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"

	"github.com/flightlock/flightlock/internal/procs"
)

// This file is the far end of -procs: a process that runs a localCrew for its parent. They talk
// over the child's stdin and stdout, a line of JSON for each request and one for each reply. The
// child ends when its stdin does, so it cannot outlive its parent, however that ended.

// childEnv, set to anything, makes the program a child.
const childEnv = "FLIGHTLOCK_BENCH_CHILD"

// The requests.
const (
	opSetup   = "setup"
	opPrepare = "prepare"
	opRun     = "run"
)

type request struct {
	Op    string     `json:"op"`
	Setup *crewSetup `json:"setup,omitempty"` // of opSetup
	Job   *job       `json:"job,omitempty"`   // of opPrepare
	At    time.Time  `json:"at,omitzero"`     // of opRun: when to begin
}

type reply struct {
	Error   string   `json:"error,omitempty"`
	Outcome *outcome `json:"outcome,omitempty"` // of opRun
}

// childMain serves until in ends, and returns the exit code. A job in progress ends then, too.
func childMain(in io.Reader, out io.Writer) int {
	// An interrupt at the terminal reaches the whole group of processes. The parent receives it too,
	// and ends this one in order.
	signal.Ignore(os.Interrupt)
	var c child
	defer c.close()
	if procs.Serve(in, out, 5*time.Second, c.serve) != nil {
		return exitFailed
	}
	return exitOK
}

// child is the crew, once a setup has come.
type child struct{ crew *localCrew }

func (c *child) serve(ctx context.Context, r request) reply {
	var rep reply
	if err := c.do(ctx, r, &rep); err != nil {
		rep.Error = err.Error()
	}
	return rep
}

func (c *child) do(ctx context.Context, r request, rep *reply) (err error) {
	switch {
	case r.Op == opSetup && r.Setup != nil && c.crew == nil:
		reg, err := openShared(r.Setup.Register)
		if err != nil {
			return err
		}
		c.crew, err = newLocalCrew(*r.Setup, openClient, reg)
		return err
	case r.Op == opPrepare && r.Job != nil && c.crew != nil:
		return c.crew.prepare(ctx, *r.Job)
	case r.Op == opRun && c.crew != nil:
		rep.Outcome, err = c.crew.run(ctx, r.At)
		return err
	}
	return fmt.Errorf("unexpected request %q", r.Op)
}

func (c *child) close() {
	if c.crew != nil {
		c.crew.close()
	}
}
