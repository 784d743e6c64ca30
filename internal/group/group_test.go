package group

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Wait returns when the goroutines have ended, or with ctx.
func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Group
		for _, d := range []time.Duration{time.Second, 3 * time.Second} {
			g.Go(func() { time.Sleep(d) })
		}
		g.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		if err := g.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after 2s: %v", err)
		}
		began := time.Now()
		if err := g.Wait(t.Context()); err != nil || time.Since(began) != time.Second {
			t.Errorf("%v after %v more", err, time.Since(began))
		}
	})
}

// A goroutine whose Go has succeeded is waited for; one whose Go was refused never runs, however Go
// and Close meet.
func TestGoDuringClose(t *testing.T) {
	for range 200 {
		var g Group
		var begun, ran atomic.Int64
		for range 4 {
			go func() {
				for g.Go(func() { ran.Add(1) }) {
					begun.Add(1)
				}
			}()
		}
		g.Close()
		if g.Go(func() { t.Error("it ran after Close") }) {
			t.Error("Go after Close")
		}
		if err := g.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		after := ran.Load()
		if g.Wait(t.Context()) != nil || ran.Load() != after {
			t.Errorf("%d goroutines ran, %d of them after Wait", ran.Load(), ran.Load()-after)
		}
	}
}
