package testkit

import (
	"sync"
	"testing"
)

// Together runs subtests at once, however many tests may run in parallel: those that wait, most of the time,
// take no other test's place. The caller defers wait.
func Together(t *testing.T) (run func(name string, test func(t *testing.T)), wait func()) {
	var wg sync.WaitGroup
	return func(name string, test func(t *testing.T)) {
		wg.Go(func() { t.Run(name, test) })
	}, wg.Wait
}
