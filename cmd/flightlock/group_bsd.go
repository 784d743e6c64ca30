//go:build darwin || dragonfly || freebsd || netbsd || openbsd

package main

import "syscall"

// dieWithParent does nothing: only Linux has a signal for that. CMD outlives a kill -9 of this process.
func dieWithParent(*syscall.SysProcAttr) {}
