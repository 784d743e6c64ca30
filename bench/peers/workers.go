package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/procs"
	"golang.org/x/sync/errgroup"
)

// This file is the near end of a bout: it starts the workers and speaks with them.

// worker is one process. One goroutine at a time uses it.
type worker struct{ *procs.Child }

// startIdle starts n workers without a task. They end with stopWorkers.
func startIdle(n int) (workers []*worker, err error) {
	for range n {
		w, err := startWorker()
		if err != nil {
			stopWorkers(workers)
			return nil, err
		}
		workers = append(workers, w)
	}
	return workers, nil
}

// startWorkers starts n workers with one task, and returns when all are warm. They end with stopWorkers.
func startWorkers(ctx context.Context, n int, t task) (workers []*worker, err error) {
	if workers, err = startIdle(n); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			stopWorkers(workers)
		}
	}()
	g, ctx := errgroup.WithContext(ctx)
	for i, w := range workers {
		own := t
		own.Number, own.Procs = i, n
		g.Go(func() error {
			_, err := w.call(ctx, request{Op: opSetup, Task: &own})
			return err
		})
	}
	return workers, g.Wait()
}

func startWorker() (*worker, error) {
	cmd, err := procs.Self(workerEnv + "=1")
	if err != nil {
		return nil, err
	}
	child, err := procs.StartChild(cmd)
	if err != nil {
		return nil, fmt.Errorf("starting a worker: %w", err)
	}
	return &worker{child}, nil
}

// callAll sends one request to all workers at once.
func callAll(ctx context.Context, workers []*worker, r request) ([]reply, error) {
	replies := make([]reply, len(workers))
	g, ctx := errgroup.WithContext(ctx)
	for i, w := range workers {
		g.Go(func() (err error) {
			replies[i], err = w.call(ctx, r)
			return err
		})
	}
	return replies, g.Wait()
}

// call sends a request and waits for its reply. When ctx ends first, so does the worker.
func (w *worker) call(ctx context.Context, r request) (rep reply, err error) {
	if err := w.Call(ctx, r, &rep); err != nil {
		return rep, fmt.Errorf("%q: %w", r.Op, err)
	}
	if rep.Error != "" {
		return rep, errors.New(rep.Error)
	}
	return rep, nil
}

// stopWorkers lets the workers end by themselves, and kills those that take more than 3 seconds: a
// rival's waiter that nobody will ever wake. What they were to measure has been measured.
func stopWorkers(workers []*worker) {
	var wg sync.WaitGroup
	for _, w := range workers {
		wg.Go(func() { _ = w.End(3 * time.Second) })
	}
	wg.Wait()
}
