package main

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/histogram"
)

// keyLoad is goroutines that lock and release a key of their own each, until stop. What they do is
// counted in one stretch after the other: measure begins one and returns it when it is over.
// Between stretches nothing is counted.
type keyLoad struct {
	c       *flightlock.Client
	current atomic.Pointer[stretch] // nil: nothing is counted
	cancel  context.CancelFunc
	done    sync.WaitGroup
}

// stretch is what a keyLoad did meanwhile. A lock belongs to the stretch in which it was released.
type stretch struct {
	length      time.Duration
	took        histogram.Histogram // locks with their release
	unavailable atomic.Uint64       // too few nodes answered in time
}

// startKeyLoad starts it. Any error but ErrUnavailable fails the benchmark.
func startKeyLoad(b *testing.B, c *flightlock.Client, goroutines int) *keyLoad {
	ctx, cancel := context.WithCancel(context.Background())
	l := &keyLoad{c: c, cancel: cancel}
	for g := range goroutines {
		key := keyEach(g)
		l.done.Go(func() {
			for ctx.Err() == nil {
				if err := l.once(ctx, key); err != nil && ctx.Err() == nil {
					b.Error(err)
					return
				}
			}
		})
	}
	return l
}

func (l *keyLoad) once(ctx context.Context, key string) error {
	began := time.Now()
	err := lockAndRelease(ctx, l.c, key)
	took, s := time.Since(began), l.current.Load()
	late := errors.Is(err, flightlock.ErrUnavailable)
	switch {
	case err != nil && !late:
		return err
	case s == nil:
	case late:
		s.unavailable.Add(1)
	default:
		s.took.Record(took)
	}
	return nil
}

func (l *keyLoad) measure(d time.Duration) *stretch {
	s := &stretch{}
	began := time.Now()
	l.current.Store(s)
	time.Sleep(d)
	l.current.Store(nil)
	s.length = time.Since(began)
	return s
}

func (l *keyLoad) stop() {
	l.cancel()
	l.done.Wait()
}

func (s *stretch) perSecond() float64 { return float64(s.took.Count()) / s.length.Seconds() }

// late is the share of locks that failed because too few nodes answered in time.
func (s *stretch) late() float64 {
	n := s.unavailable.Load()
	return ratio(n, n+s.took.Count())
}
