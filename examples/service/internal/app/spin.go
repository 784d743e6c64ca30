package app

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// maxSpin limits the goroutines per processor.
const maxSpin = 64

// spinner keeps the processors busy, for the demo.
type spinner struct {
	mu   sync.Mutex   // keeps two calls of set apart
	stop *atomic.Bool // of those that spin now; guarded by mu
	busy sync.WaitGroup
}

// set stops the goroutines that spin, and then starts n per processor.
func (s *spinner) set(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stop != nil {
		s.stop.Store(true)
		s.busy.Wait()
	}
	stop := &atomic.Bool{}
	s.stop = stop
	for range n * runtime.GOMAXPROCS(0) {
		s.busy.Go(func() {
			for !stop.Load() {
			}
		})
	}
}
