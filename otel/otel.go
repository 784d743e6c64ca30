// Package otel makes OpenTelemetry spans of what Clients of package flightlock do:
//
//	lock.wait    from the call that wants a lock until its caller has it, or an error
//	lock.hold    from then on until the lock is released, or over. Its parent is that of the wait; a lock
//	             that was handed over within the process has a link to the hold that it followed
//	cache.load   a call of the Loader of package fetch, which gets the span in its ctx
//
// A span has the caller's span as its parent. Attributes, where they apply: flightlock.outcome,
// flightlock.wait (what a caller has waited for: remote, queue or handoff), flightlock.class (Options.Class),
// flightlock.fence, flightlock.end (how the lock has ended), flightlock.fetcher (its name), flightlock.keys
// (how many are loaded). An error is recorded, and is the status of the span, except where a Fetcher waits
// for another process: that others load is no error. Without the option Keys, neither an attribute nor the
// text of an error contains a key, which may be personal data; but the error of a Loader is recorded as it
// is.
package otel

import (
	"context"
	"errors"
	"fmt"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
)

// An Option changes what New makes.
type Option func(*tracing)

// Keys adds the attribute flightlock.key: the key of the lock, or of a load the keys.
func Keys() Option { return func(t *tracing) { t.keys = true } }

// New returns an Observer, for Options.Observers, that makes the spans with p, for instance
// otel.GetTracerProvider().
func New(p trace.TracerProvider, options ...Option) *flightlock.Observer {
	t := &tracing{tracer: p.Tracer("github.com/flightlock/flightlock/otel")}
	for _, o := range options {
		o(t)
	}
	return &flightlock.Observer{
		Of:      flightlock.EventWait | flightlock.EventHold | flightlock.EventLoad,
		Started: t.started,
		Ended:   t.ended,
	}
}

type tracing struct {
	tracer trace.Tracer
	keys   bool
}

// spanKey is that of a span in its ctx. It is found there by its tracing: several Observers may
// make spans.
type spanKey struct{ t *tracing }

// span is the span that started has put into ctx. A ctx without one has a span that does nothing.
func (t *tracing) span(ctx context.Context) trace.Span {
	if span, ok := ctx.Value(spanKey{t}).(trace.Span); ok {
		return span
	}
	return trace.SpanFromContext(context.Background())
}

var names = map[flightlock.EventKind]string{
	flightlock.EventWait: "lock.wait", flightlock.EventHold: "lock.hold", flightlock.EventLoad: "cache.load",
}

// started begins a span. The ctx that it returns has it for ended.
func (t *tracing) started(ctx context.Context, e flightlock.Event) context.Context {
	var all []attribute.KeyValue
	if e.Class != "" {
		all = append(all, attribute.String("flightlock.class", e.Class))
	}
	options := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindInternal)}
	if e.Kind == flightlock.EventLoad {
		all = append(all, attribute.String("flightlock.fetcher", e.Fetcher),
			attribute.Int("flightlock.keys", len(e.Keys)))
		if t.keys {
			all = append(all, attribute.StringSlice("flightlock.key", e.Keys))
		}
	} else if t.keys {
		all = append(all, attribute.String("flightlock.key", e.Key))
	}
	if e.Kind == flightlock.EventHold {
		all = append(all, attribute.Int64("flightlock.fence", e.Fence))
	}
	if e.Previous != nil {
		options = append(options, trace.WithLinks(trace.Link{SpanContext: t.span(e.Previous).SpanContext()}))
	}
	ctx, span := t.tracer.Start(ctx, names[e.Kind], append(options, trace.WithAttributes(all...))...)
	return context.WithValue(ctx, spanKey{t}, span)
}

// ended ends the span of ctx.
func (t *tracing) ended(ctx context.Context, e flightlock.Event) {
	span, err := t.span(ctx), e.Err
	switch e.Kind {
	case flightlock.EventWait:
		span.SetAttributes(attribute.String("flightlock.outcome", string(e.Outcome)),
			attribute.String("flightlock.wait", string(e.Cause)))
		if e.OfFetcher && errors.Is(err, flightlock.ErrNotAcquired) {
			err = nil
		}
	case flightlock.EventHold:
		span.SetAttributes(attribute.String("flightlock.end", string(e.Outcome)))
		if e.Outcome == flightlock.EndRanOut { // as intended
			err = nil
		}
	case flightlock.EventLoad:
		span.SetAttributes(attribute.String("flightlock.outcome", string(e.Outcome)))
	}
	if err != nil {
		if !t.keys {
			err = withoutKey(err)
		}
		span.RecordError(err)
		span.SetStatus(codes.Error, err.Error())
	}
	span.End()
}

var sentinels = []error{flightlock.ErrLockLost, flightlock.ErrNotHeld, flightlock.ErrUnavailable,
	flightlock.ErrNotAcquired, flightlock.ErrTooManyWaiters, flightlock.ErrClosed}

// withoutKey is err without the keys that this library has put into its text.
func withoutKey(err error) error {
	var (
		q    *flightlock.QuorumError
		p    *flightlock.PanicError
		keys fetch.KeyErrors
	)
	switch {
	case errors.As(err, &keys):
		return fmt.Errorf("%d keys failed, one of them with: %w", len(keys), one(keys))
	case errors.As(err, &p):
		return p
	case errors.As(err, &q):
		nameless := *q
		nameless.Key = ""
		return &nameless
	}
	for _, sentinel := range sentinels {
		if errors.Is(err, sentinel) {
			return sentinel
		}
	}
	return err
}

func one(keys fetch.KeyErrors) error {
	for _, err := range keys {
		return err
	}
	return nil
}
