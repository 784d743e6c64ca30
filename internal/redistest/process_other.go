//go:build !linux

package redistest

import "os/exec"

// dieWithParent does nothing: only Linux has a parent-death signal.
func dieWithParent(*exec.Cmd) {}

// isStopped takes it on trust that a SIGSTOP that was sent has taken effect.
func isStopped(int) bool { return true }
