package flightlock_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
)

// odd is a Registerer that behaves as the test says.
type odd struct{ register, unregister func() }

func (o odd) Register(prometheus.Collector) error  { o.register(); return nil }
func (o odd) MustRegister(...prometheus.Collector) { o.register() }
func (o odd) Unregister(prometheus.Collector) bool { o.unregister(); return true }

// A Registerer that panics is an error of New and of Close, and does not end the process; one that
// hangs delays New for some seconds, and Close until its ctx ends. A lock never waits for it.
func TestARegistererThatPanicsOrHangs(t *testing.T) {
	fine, panics := func() {}, func() { panic("no metrics today") }
	bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		open := func(r prometheus.Registerer) (*flightlock.Client, error) {
			return flightlock.New(flightlock.Options{Nodes: clients, Registerer: r})
		}
		_, err := open(odd{panics, fine})
		wantInvalid(t, err, "Options.Registerer", "no metrics today")

		c, err := open(odd{fine, panics})
		if err != nil {
			t.Fatal(err)
		}
		mustRelease(t, mustLock(t, c, "k", time.Second))
		if err := c.Close(t.Context()); err == nil || !strings.Contains(err.Error(), "no metrics today") {
			t.Errorf("Close: %v", err)
		}

		gate := make(chan struct{})
		hangs := func() { <-gate }
		began, unregistered := time.Now(), false
		_, err = open(odd{hangs, func() { unregistered = true }})
		wantInvalid(t, err, "Options.Registerer")
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("New took %v", took)
		}
		c, err = open(odd{fine, hangs})
		if err != nil {
			t.Fatal(err)
		}
		mustRelease(t, mustLock(t, c, "k", time.Second))
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		began = time.Now()
		if err := c.Close(ctx); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "Registerer") {
			t.Errorf("Close: %v", err)
		}
		if took := time.Since(began); took > 4*time.Second {
			t.Errorf("Close took %v", took)
		}
		close(gate)
		synctest.Wait()
		if !unregistered {
			t.Error("what was registered too late is registered still")
		}
	})
}

// A Registerer that calls runtime.Goexit, as one does that belongs to a test which fails, is an error of New and of
// Close at once. Neither waits for what has ended.
func TestARegistererThatCallsGoexit(t *testing.T) {
	fine, exits := func() {}, runtime.Goexit
	bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		began := time.Now()
		_, err := flightlock.New(flightlock.Options{Nodes: clients, Registerer: odd{exits, fine}})
		wantInvalid(t, err, "Options.Registerer", "Goexit")
		c, err := flightlock.New(flightlock.Options{Nodes: clients, Registerer: odd{fine, exits}})
		if err != nil {
			t.Fatal(err)
		}
		closed := make(chan error, 1)
		go func() { closed <- c.Close(context.Background()) }()
		select {
		case err := <-closed:
			if err == nil || !strings.Contains(err.Error(), "Goexit") {
				t.Errorf("Close: %v", err)
			}
		case <-time.After(time.Minute):
			t.Fatal("Close has not returned")
		}
		if took := time.Since(began); took > 0 {
			t.Errorf("that took %v", took)
		}
	})
}
