package redistest

import (
	"io"
	"sync"
	"testing"
)

// Shared is a server, or a cluster, of all tests of a package, which have keys of their own there. The first
// test that needs it starts it. TestMain closes it, after the last one.
type Shared[T io.Closer] struct {
	launch func() (T, error)

	once    sync.Once // guards what follows
	value   T
	err     error
	started bool
}

// NewShared is one that launch will start.
func NewShared[T io.Closer](launch func() (T, error)) *Shared[T] { return &Shared[T]{launch: launch} }

// SharedServer is a [Server] that is started with args.
func SharedServer(args ...string) *Shared[*Server] {
	return NewShared(func() (*Server, error) { return Launch(args...) })
}

// SharedCluster is a [Cluster] of so many masters.
func SharedCluster(masters int) *Shared[*Cluster] {
	return NewShared(func() (*Cluster, error) { return LaunchGrowingCluster(masters, 0) })
}

// Get is the server or cluster. It calls [Require].
func (s *Shared[T]) Get(tb testing.TB) T {
	tb.Helper()
	Require(tb)
	s.once.Do(func() {
		s.value, s.err = s.launch()
		s.started = s.err == nil
	})
	if s.err != nil {
		tb.Fatal(s.err)
	}
	return s.value
}

// Close ends it, if a test has started it. No test can start it afterwards.
func (s *Shared[T]) Close() (err error) {
	s.once.Do(func() {})
	if s.started {
		err = s.value.Close()
	}
	return err
}
