package demo

import (
	"os/exec"
	"syscall"
)

// dieWithParent makes the kernel kill the process when the demo dies, however it dies.
func dieWithParent(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
