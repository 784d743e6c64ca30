package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"sync/atomic"
)

// profiles are what -profile makes of one run in one process: CPU, allocations and the heap,
// mutexes, and blocking. The latter two slow the run down, so figures taken with profiles say
// nothing.
type profiles struct {
	name func(kind string) string
	cpu  *os.File
}

// profiledRuns numbers the runs of this process: go tool pprof adds up what several files have.
var profiledRuns atomic.Int64

func startProfiles(dir, rival string) (*profiles, error) {
	run := profiledRuns.Add(1)
	p := &profiles{name: func(kind string) string {
		return filepath.Join(dir, fmt.Sprintf("%s-%d-%d.%s.prof", rival, pid(), run, kind))
	}}
	f, err := os.Create(p.name("cpu"))
	if err != nil {
		return nil, err
	}
	p.cpu = f
	runtime.SetMutexProfileFraction(100)
	runtime.SetBlockProfileRate(100_000)
	return p, pprof.StartCPUProfile(f)
}

func (p *profiles) stop() error {
	pprof.StopCPUProfile()
	err := p.cpu.Close()
	for _, kind := range []string{"allocs", "mutex", "block"} { // allocs has the heap in use as well
		f, e := os.Create(p.name(kind))
		if e != nil {
			return errors.Join(err, e)
		}
		err = errors.Join(err, pprof.Lookup(kind).WriteTo(f, 0), f.Close())
	}
	return err
}
