package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// This file measures what waiting and holding cost.

// runWaiters holds a key that many goroutines want, and looks at the memory of the process.
func runWaiters(l locker, t task) (*result, error) {
	key := t.Prefix + ":held"
	h, err := l.lock(context.Background(), key)
	if err != nil {
		return nil, err
	}
	before := memory()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var wg sync.WaitGroup
	for range t.Load.Goroutines {
		wg.Go(func() {
			for ctx.Err() == nil {
				if got, err := l.lock(ctx, key); err == nil {
					_ = got.release()
				}
			}
		})
	}
	m := readMeter()
	time.Sleep(t.Load.Window)
	res := m.result()
	n := float64(t.Load.Goroutines)
	res.Extra["bytes_waiter"] = max(0, (memory()-before)/n)
	res.Extra["cpu_percent"] = 100 * res.CPU.Seconds() / res.Elapsed.Seconds()
	cancel()
	err = h.release()
	wg.Wait()
	res.Locks = 1
	return res, err
}

// memory is what heap and stacks hold.
func memory() float64 {
	runtime.GC()
	runtime.GC() // what finalizers and pools held
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc + m.StackInuse)
}

// runHolding takes Keys locks, has them refreshed, and looks at what that costs for a window. None
// may be lost.
func runHolding(l locker, t task) (*result, error) {
	k, ok := l.(keeper)
	if !ok {
		return nil, fmt.Errorf("%s refreshes no locks by itself", t.Rival)
	}
	names := keyNames(t.Prefix, t.Load.Keys)
	before, goroutines := memory(), runtime.NumGoroutine()
	locks, err := keepAll(k, names)
	if err != nil {
		return nil, err
	}
	n := float64(len(names))
	extra := map[string]float64{
		"bytes_lock": (memory() - before) / n, "goroutines_lock": float64(runtime.NumGoroutine()-goroutines) / n,
	}
	m := readMeter()
	time.Sleep(t.Load.Window)
	res := m.result()
	res.Locks = uint64(len(names))
	for k, v := range extra {
		res.Extra[k] = v
	}
	res.Extra["cpu_percent"] = 100 * res.CPU.Seconds() / res.Elapsed.Seconds()
	for _, h := range locks {
		if f, ok := h.(flightHeld); ok && f.l.Err() != nil {
			res.Failures++
			res.FirstError = f.l.Err().Error()
		}
	}
	return res, nil // the end of the process ends the locks; the servers are flushed
}

// keepAll takes the locks with a few goroutines, as fast as the servers allow.
func keepAll(k keeper, names []string) ([]held, error) {
	ctx, cancel := context.WithCancelCause(context.Background())
	_ = cancel // a lock may live by its ctx, so it ends with the process, or with the first error
	locks := make([]held, len(names))
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(names)) && ctx.Err() == nil; i = next.Add(1) - 1 {
				var err error
				if locks[i], err = k.keep(ctx, names[i]); err != nil {
					cancel(err)
				}
			}
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, errors.Join(errors.New("taking the locks"), err)
	}
	return locks, nil
}
