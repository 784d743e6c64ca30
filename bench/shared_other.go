//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package main

import "errors"

// This file stands in where the standard library cannot map a file: everything but -procs works there.

var errNoSharedMemory = errors.New("-procs: not on this system, for the check needs memory that processes " +
	"share")

func createShared() (*register, string, error) { return nil, "", errNoSharedMemory }

func openShared(string) (*register, error) { return nil, errNoSharedMemory }
