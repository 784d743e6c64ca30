package procs

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"syscall"
)

// dieWithParent makes the kernel kill the process when this one dies.
func dieWithParent(cmd *exec.Cmd) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
}

// isStopped reports whether SIGSTOP has taken effect.
func isStopped(pid int) bool {
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return false
	}
	for _, thread := range threads { // on a busy machine one may still be in a system call, and write
		if state := stateIn(fmt.Sprintf("/proc/%d/task/%s/stat", pid, thread.Name())); state != 'T' && state != 0 {
			return false
		}
	}
	return State(pid) == 'T'
}

// State is the state letter of a process in proc(5), of any process; 0 if there is none. 'Z' is a
// process that has ended and that its parent has not reaped.
func State(pid int) byte { return stateIn(fmt.Sprintf("/proc/%d/stat", pid)) }

func stateIn(file string) byte {
	stat, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	// The letter follows the command name, which is in parentheses and may hold anything,
	// parentheses too.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) == 0 {
		return 0
	}
	return fields[0][0]
}
