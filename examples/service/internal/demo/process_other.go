//go:build !linux

package demo

import "os/exec"

// dieWithParent does nothing: there is no such wish outside Linux.
func dieWithParent(*exec.Cmd) {}
