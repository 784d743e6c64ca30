package main

import (
	"syscall"
	"time"
)

// nanosleep sleeps for d, or less if a signal comes, without Go's timers.
func nanosleep(d time.Duration) {
	ts := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&ts, nil)
}
