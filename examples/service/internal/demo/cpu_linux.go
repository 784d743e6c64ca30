package demo

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"
)

// clockTick is the kernel's unit in /proc/pid/stat, USER_HZ.
const clockTick = time.Second / 100

// ownTime is the processor time of this process, and of its children that have ended.
func ownTime() (self, ended time.Duration) {
	of := func(who int) time.Duration {
		var u syscall.Rusage
		if syscall.Getrusage(who, &u) != nil {
			return 0
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	return of(syscall.RUSAGE_SELF), of(syscall.RUSAGE_CHILDREN)
}

// timeOf is the processor time of processes that run.
func timeOf(pids []int) (total time.Duration) {
	for _, pid := range pids {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue // it has just ended
		}
		// The fields behind the name, which is in parentheses, are numbered from 3; 14 and 15 are user and system
		// time.
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		for i := 14 - 3; i <= 15-3 && i < len(fields); i++ {
			if n, err := strconv.ParseInt(string(fields[i]), 10, 64); err == nil {
				total += time.Duration(n) * clockTick
			}
		}
	}
	return total
}
