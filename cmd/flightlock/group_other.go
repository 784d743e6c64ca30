//go:build !darwin && !dragonfly && !freebsd && !linux && !netbsd && !openbsd

package main

import (
	"errors"
	"os"
	"runtime"
)

// A group cannot be made here: there are no process groups whose end could be awaited.
type group struct{ processes }

// supported is why CMD is not run here.
func supported() error {
	return errors.New("run is not supported on " + runtime.GOOS +
		": it needs the process groups of Unix, to end a command with all its processes before its lock is lost")
}

func startGroup(string, []string, []string) (*group, error) { return nil, supported() }

func (*group) exitCode() int { return 0 }

func receiveSignals() <-chan os.Signal { return nil }

func ends(os.Signal) int { return 0 }
