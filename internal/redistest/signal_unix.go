//go:build unix

package redistest

import "syscall"

func (p *process) stop() error { return p.cmd.Process.Signal(syscall.SIGSTOP) }
func (p *process) cont() error { return p.cmd.Process.Signal(syscall.SIGCONT) }
