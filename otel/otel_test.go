package otel_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/flightlock/flightlock/otel"
	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// traced runs test in virtual time with a Client whose spans are kept.
func traced(t *testing.T, o flightlock.Options, options []otel.Option,
	test func(t *testing.T, c *flightlock.Client, r *recorded)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &recorded{SpanRecorder: tracetest.NewSpanRecorder()}
		r.provider = sdk.NewTracerProvider(sdk.WithSpanProcessor(r))
		nodes := flightlocktest.Start(3)
		defer nodes.Close()
		o.Observers = append(o.Observers, otel.New(r.provider, options...))
		c, err := nodes.Client(o)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close(context.Background())
		r.nodes = nodes
		test(t, c, r)
	})
}

type recorded struct {
	*tracetest.SpanRecorder
	provider *sdk.TracerProvider
	nodes    *flightlocktest.Nodes // of the Client
}

// caller begins a span of the application.
func (r *recorded) caller(ctx context.Context, name string) context.Context {
	ctx, _ = r.provider.Tracer("test").Start(ctx, name)
	return ctx
}

// spans describes the spans that have ended: name, parent, links, status and attributes.
func (r *recorded) spans() (all []string) {
	names := map[string]string{}
	for _, s := range r.Started() {
		names[s.SpanContext().SpanID().String()] = s.Name()
	}
	for _, s := range r.Ended() {
		line := s.Name() + " in " + names[s.Parent().SpanID().String()]
		for _, l := range s.Links() {
			line += " after " + names[l.SpanContext.SpanID().String()]
		}
		for _, a := range s.Attributes() {
			if a.Key != "flightlock.fence" {
				line += fmt.Sprintf(" %s=%s", strings.TrimPrefix(string(a.Key), "flightlock."), a.Value.Emit())
			}
		}
		if s.Status().Code == codes.Error {
			line += fmt.Sprintf(" error, %d recorded", len(s.Events()))
		}
		all = append(all, line)
	}
	return all
}

func (r *recorded) want(t *testing.T, want ...string) {
	t.Helper()
	synctest.Wait()
	got := r.spans()
	for _, line := range want {
		if i := slices.Index(got, line); i >= 0 {
			got = slices.Delete(got, i, i+1)
		} else {
			t.Errorf("no span %q in %q", line, got)
		}
	}
	if len(got) > 0 {
		t.Errorf("also %q", got)
	}
	r.Reset()
}

// A wait and a hold are spans of their caller, and a hold has a link to the one that it follows.
func TestSpansOfAHandoff(t *testing.T) {
	class := func(string) string { return "orders" }
	traced(t, flightlock.Options{Class: class}, nil, func(t *testing.T, c *flightlock.Client, r *recorded) {
		first, err := c.SingleFlightLock(r.caller(t.Context(), "A"), "k", 10*time.Second, nil)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error)
		go func() {
			done <- c.Do(r.caller(t.Context(), "B"), "k", 10*time.Second, nil,
				func(context.Context, *flightlock.Lock) error { return nil })
		}()
		synctest.Wait()
		if err := errors.Join(first.Release(t.Context()), <-done); err != nil {
			t.Fatal(err)
		}
		r.want(t, "lock.wait in A class=orders outcome=acquired wait=remote",
			"lock.wait in B class=orders outcome=acquired wait=handoff",
			"lock.hold in A class=orders end=released", "lock.hold in B after lock.hold class=orders end=released")
	})
}

// Errors are recorded, and no text of them has the key.
func TestSpansOfErrors(t *testing.T) {
	traced(t, flightlock.Options{MaxWaiters: 1}, nil, func(t *testing.T, c *flightlock.Client, r *recorded) {
		ctx := r.caller(t.Context(), "A")
		_, err := c.TryLock(ctx, "secret", time.Second)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.TryLock(ctx, "secret", time.Second)
		time.Sleep(2 * time.Second) // it ends by its ttl
		l, err := c.TryLock(ctx, "lost secret", time.Second)
		if err != nil {
			t.Fatal(err)
		}
		_ = l.Context(ctx)
		time.Sleep(2 * time.Second)
		r.nodes.Down(true)
		_, _ = c.TryLock(ctx, "secret", time.Second)
		synctest.Wait()
		for _, s := range r.Ended() {
			texts := s.Status().Description
			for _, e := range s.Events() {
				texts += fmt.Sprint(e.Attributes)
			}
			if strings.Contains(texts, "secret") {
				t.Errorf("%s names the key: %s", s.Name(), texts)
			}
		}
		r.want(t, "lock.wait in A outcome=acquired wait=remote", "lock.hold in A end=ran_out",
			"lock.wait in A outcome=not_acquired wait=queue error, 1 recorded",
			"lock.wait in A outcome=acquired wait=remote", "lock.hold in A end=expired error, 1 recorded",
			"lock.wait in A outcome=unavailable wait=remote error, 1 recorded")
		r.nodes.Down(false)
		time.Sleep(5 * time.Second)
	})
}

// A load is a span of the caller that began it, and the parent of what the Loader does.
func TestSpansOfLoads(t *testing.T) {
	traced(t, flightlock.Options{}, []otel.Option{otel.Keys()},
		func(t *testing.T, c *flightlock.Client, r *recorded) {
			load := func(ctx context.Context, keys []string) (map[string]int, error) {
				_, span := r.provider.Tracer("test").Start(ctx, "SELECT")
				span.End()
				if keys[0] == "bad" {
					return nil, errors.New("no database")
				}
				return map[string]int{keys[0]: 1}, nil
			}
			f, err := fetch.New(c, fetch.Plain(
				func(context.Context, string) (int, bool, error) { return 0, false, nil },
				func(context.Context, string, int) error { return nil },
			), load, fetch.Options{Name: "users"})
			if err != nil {
				t.Fatal(err)
			}
			ctx := r.caller(t.Context(), "A")
			if _, err := f.Get(ctx, "1"); err != nil {
				t.Fatal(err)
			}
			lock := "key=users:1 "
			r.want(t, "SELECT in cache.load", "cache.load in A fetcher=users keys=1 key=[\"1\"] outcome=loaded",
				"lock.wait in A "+lock+"outcome=acquired wait=remote", "lock.hold in A "+lock+"end=released")
			if _, err := f.Get(r.caller(t.Context(), "B"), "bad"); err == nil {
				t.Fatal("no error")
			}
			lock = "key=users:bad "
			r.want(t, "SELECT in cache.load",
				"cache.load in B fetcher=users keys=1 key=[\"bad\"] outcome=failed error, 1 recorded",
				"lock.wait in B "+lock+"outcome=acquired wait=remote", "lock.hold in B "+lock+"end=released")
		})
}
