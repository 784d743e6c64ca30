//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package main

import (
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// A terminal belongs to one process group at a time, the foreground, which alone reads from it and gets
// Ctrl-C. CMD is a group of its own, so it is given the terminal, and this process takes it back. Methods of
// a nil one do nothing.
type terminal struct {
	*os.File
	given atomic.Bool // CMD has it, or had it
}

// openTerminal opens the terminal that controls this process; nil if there is none.
func openTerminal() *terminal {
	f, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	return &terminal{File: f}
}

func (t *terminal) close() {
	if t != nil {
		_ = t.Close()
	}
}

// attributes has CMD started with the terminal, if this process has it, and CMD reads from it and writes to
// it. If it only does one of these, others of this process' group, as in a pipe, may need it: then it is
// given when CMD was stopped for want of it.
func (t *terminal) attributes(attr *syscall.SysProcAttr) *syscall.SysProcAttr {
	if t.inForeground() && isTerminal(os.Stdin) && isTerminal(os.Stdout) {
		attr.Foreground, attr.Ctty = true, int(t.Fd())
		t.given.Store(true)
	}
	return attr
}

// inForeground reports whether the terminal is this process' group's.
func (t *terminal) inForeground() bool {
	if t == nil {
		return false
	}
	group, err := foregroundOf(t.Fd())
	return err == nil && group == syscall.Getpgrp()
}

// give gives the terminal to a group, if it is this process'.
func (t *terminal) give(group int) bool {
	if !t.inForeground() || setForeground(t.Fd(), group) != nil {
		return false
	}
	t.given.Store(true)
	return true
}

// takeBack takes it back. The kernel stops a background process that does so, unless it ignores that signal.
func (t *terminal) takeBack() {
	if t != nil && t.given.Load() {
		signal.Ignore(syscall.SIGTTOU)
		_ = setForeground(t.Fd(), syscall.Getpgrp())
		signal.Reset(syscall.SIGTTOU)
	}
}

func isTerminal(f *os.File) bool {
	_, err := foregroundOf(f.Fd())
	return err == nil
}

// foregroundOf is tcgetpgrp of POSIX.
func foregroundOf(fd uintptr) (group int, err error) {
	var number int32
	err = control(fd, syscall.TIOCGPGRP, &number)
	return int(number), err
}

// setForeground is tcsetpgrp of POSIX.
func setForeground(fd uintptr, group int) error {
	number := int32(group)
	return control(fd, syscall.TIOCSPGRP, &number)
}

func control(fd, request uintptr, number *int32) error {
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, fd, request,
		uintptr(unsafe.Pointer(number))); errno != 0 {
		return errno
	}
	return nil
}
