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

// cpuTime is the processor time of this process, of its children that have ended, and of those that run.
func cpuTime(children []int) (total time.Duration) {
	for _, who := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var u syscall.Rusage
		if syscall.Getrusage(who, &u) == nil {
			total += time.Duration(u.Utime.Nano() + u.Stime.Nano())
		}
	}
	for _, pid := range children {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue // it has just ended
		}
		// The fields behind the name, which is in parentheses, are numbered from 3; 14 and 15 are user and system time.
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		for i := 14 - 3; i <= 15-3 && i < len(fields); i++ {
			if n, err := strconv.ParseInt(string(fields[i]), 10, 64); err == nil {
				total += time.Duration(n) * clockTick
			}
		}
	}
	return total
}
