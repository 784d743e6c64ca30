//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package main

import (
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// This file puts a register into a file that several processes map into memory.

// createShared makes the file, mapped. Remove it once every process has opened it: the mapping stays.
func createShared() (r *register, path string, err error) {
	f, err := os.CreateTemp("", "flightlock-bench-*")
	if err != nil {
		return nil, "", fmt.Errorf("the check's shared file: %w", err)
	}
	defer f.Close()
	if err := f.Truncate(regWords * 8); err != nil {
		os.Remove(f.Name())
		return nil, "", fmt.Errorf("the check's shared file: %w", err)
	}
	r, err = mapRegister(f)
	if err != nil {
		os.Remove(f.Name())
	}
	return r, f.Name(), err
}

// openShared maps the file that another process made.
func openShared(path string) (*register, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("the check's shared file: %w", err)
	}
	defer f.Close()
	return mapRegister(f)
}

// mapRegister maps f for the rest of the process's life.
func mapRegister(f *os.File) (*register, error) {
	data, err := syscall.Mmap(int(f.Fd()), 0, regWords*8, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mapping the check's shared file: %w", err)
	}
	// A mapping begins at a page, so the words are aligned as atomics need it.
	return &register{words: unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(&data[0])), regWords)}, nil
}
