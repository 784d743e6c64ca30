package variant

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A variant that cannot be made is nil, also as an interface: whoever checks it is not misled.
func TestNoLockerWithAnError(t *testing.T) {
	for _, name := range append([]string{"no such name"}, Flightlock, Redsync) {
		l, err := New(name, Env{
			Nodes: []string{"no url"}, Log: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry(),
		})
		if err == nil || l != nil {
			t.Errorf("%s: %v, %v", name, l, err)
		}
	}
}

// A function that panics leaves neither its mutex nor the goroutine that extends it.
func TestRedsyncUnlocksAfterAPanic(t *testing.T) {
	m := miniredis.RunT(t)
	l, err := New(Redsync, Env{Nodes: []string{"redis://" + m.Addr()}})
	if err != nil {
		t.Fatal(err)
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was lost")
			}
		}()
		_ = l.Do(t.Context(), "k", time.Second, func(context.Context, Lock) error { panic("on purpose") })
	}()
	if m.Exists("lock:k") {
		t.Error("the key is still locked")
	}
	if err := l.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
