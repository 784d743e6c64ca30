package redistest

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"syscall"
)

// dieWithParent makes the kernel kill the process when we die, however we die: a test
// binary that panics or runs into its timeout runs no cleanup.
func dieWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}

// isStopped reports whether SIGSTOP has taken effect. kill(2) returns before it has.
func isStopped(pid int) bool { return stateOf(pid) == 'T' }

// stateOf is the process's state letter in proc(5), 0 if there is no such process.
func stateOf(pid int) byte {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// The letter follows the command name, which is in parentheses and may hold
	// anything, parentheses too.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) == 0 {
		return 0
	}
	return fields[0][0]
}
