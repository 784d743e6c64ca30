//go:build linux

package main

import (
	"os"
	"time"
	"unsafe"

	"github.com/flightlock/flightlock/internal/clocktest"
	"golang.org/x/sys/unix"
)

// The machine of a process sleeps: the process is stopped, and finds, when it continues, that its
// monotonic clock has stood still meanwhile, and its wall clock has not. The machine of the tests
// cannot suspend and resume by itself. So such a process reads its clocks through package
// clocktest, from memory that it shares with the harness, which moves them before the process
// continues: it runs no instruction with the clocks as they were.

// clocksFile is the descriptor of that memory in the process: the first after stderr.
const clocksFile = 3

// newClocks makes memory for clocks, and the file through which a process shares it.
func newClocks() (*clocktest.Clocks, *os.File, error) {
	fd, err := unix.MemfdCreate("clocks", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, nil, err
	}
	file := os.NewFile(uintptr(fd), "clocks")
	if err := file.Truncate(int64(unsafe.Sizeof(clocktest.Clocks{}))); err != nil {
		return nil, nil, err
	}
	clocks, err := sharedClocks(fd)
	return clocks, file, err
}

// sharedClocks are those in a file. They stay until the process ends.
func sharedClocks(fd int) (*clocktest.Clocks, error) {
	memory, err := unix.Mmap(fd, 0, int(unsafe.Sizeof(clocktest.Clocks{})), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return (*clocktest.Clocks)(unsafe.Pointer(unsafe.SliceData(memory))), nil
}

// slept makes the process's monotonic clock stand still for so long, and its wall clock too if
// nothing shows the sleep: as after a pause of a virtual machine whose clock was not set after
// that.
func (p *process) slept(d time.Duration, untold bool) {
	p.clocks.Monotonic.Add(int64(-d))
	if untold {
		p.clocks.Wall.Add(int64(-d))
	}
}
