package main

import (
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// This file is what the loads ask of the operating system. The bench runs where redis-server does: on Unix.

func pid() int { return os.Getpid() }

// cpuTime is what this process has used so far, in user and system mode.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// preciseSleep gives the calling goroutine a thread to sleep on, until done is called.
func preciseSleep() (until func(time.Time), done func()) {
	runtime.LockOSThread()
	return func(t time.Time) {
		for d := time.Until(t); d > 0; d = time.Until(t) {
			nanosleep(d)
		}
	}, runtime.UnlockOSThread
}

// finerTimers makes the timers of this process, which is all but idle, good to a tenth of a
// millisecond until stop is called: an idle Go scheduler waits in whole milliseconds, so a thread
// wakes it up more often.
func finerTimers() (stop func()) {
	var stopped atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		until, done := preciseSleep()
		defer done()
		for !stopped.Load() {
			until(time.Now().Add(30 * time.Microsecond))
			runtime.Gosched()
		}
	})
	return func() {
		stopped.Store(true)
		wg.Wait()
	}
}
