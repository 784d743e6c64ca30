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

	"golang.org/x/sync/errgroup"
)

// This file is the near end of a bout: it starts the workers and speaks with them.

// worker is one process. One goroutine at a time uses it.
type worker struct {
	cmd *exec.Cmd
	in  io.WriteCloser // its stdin: closing it ends the process
	enc *json.Encoder
	dec *json.Decoder
}

// startCrew starts n workers with one task, and returns when all are warm. They end with stopCrew.
func startCrew(ctx context.Context, n int, t task) (crew []*worker, err error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			stopCrew(crew)
		}
	}()
	for range n {
		w, err := startWorker(exe)
		if err != nil {
			return crew, err
		}
		crew = append(crew, w)
	}
	_, err = callAll(ctx, crew, request{Op: opSetup, Task: &t})
	return crew, err
}

func startWorker(exe string) (*worker, error) {
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), workerEnv+"=1")
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
		return nil, fmt.Errorf("starting a worker: %w", err)
	}
	return &worker{cmd, in, json.NewEncoder(in), json.NewDecoder(out)}, nil
}

// callAll sends one request to all workers at once.
func callAll(ctx context.Context, crew []*worker, r request) ([]reply, error) {
	replies := make([]reply, len(crew))
	g, ctx := errgroup.WithContext(ctx)
	for i, w := range crew {
		g.Go(func() (err error) {
			replies[i], err = w.call(ctx, r)
			return err
		})
	}
	return replies, g.Wait()
}

// call sends a request and waits for its reply. When ctx ends first, so does the worker.
func (w *worker) call(ctx context.Context, r request) (rep reply, err error) {
	stop := context.AfterFunc(ctx, func() { _ = w.cmd.Process.Kill() })
	defer stop()
	if err = w.enc.Encode(r); err == nil {
		err = w.dec.Decode(&rep)
	}
	switch {
	case ctx.Err() != nil:
		return rep, context.Cause(ctx)
	case errors.Is(err, io.EOF):
		return rep, fmt.Errorf("a worker ended without an answer to %q", r.Op)
	case err != nil:
		return rep, err
	case rep.Error != "":
		return rep, errors.New(rep.Error)
	}
	return rep, nil
}

// stopCrew lets the workers end by themselves, and kills those that take more than 3 seconds: a rival's waiter that nobody
// will ever wake. What they were to measure has been measured.
func stopCrew(crew []*worker) {
	for _, w := range crew {
		_ = w.in.Close()
	}
	for _, w := range crew {
		kill := time.AfterFunc(3*time.Second, func() { _ = w.cmd.Process.Kill() })
		_ = w.cmd.Wait()
		kill.Stop()
	}
}
