//go:build !linux

package main

import "time"

// nanosleep sleeps for d. Package syscall has no finer sleep here.
func nanosleep(d time.Duration) { time.Sleep(d) }
