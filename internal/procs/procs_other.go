//go:build !linux

package procs

import "os/exec"

// dieWithParent does nothing: only Linux has a parent-death signal.
func dieWithParent(*exec.Cmd) {}

// isStopped trusts that a SIGSTOP that was sent has taken effect.
func isStopped(int) bool { return true }
