// Package otel makes OpenTelemetry spans of what Clients of package flightlock do:
//
//	lock.wait    from the call that wants a lock until its caller has it, or an error
//	lock.hold    from then on until the lock is released, or over. Its parent is that of the wait; a lock that was
//	             handed over within the process has a link to the hold that it followed
//	cache.load   a call of the Loader of package fetch, which gets the span in its ctx
//
// A span has the caller's span as its parent. Attributes, where they apply: flightlock.outcome, flightlock.wait (what
// a caller has waited for: remote, queue or handoff), flightlock.class (Options.Class), flightlock.fence,
// flightlock.end (how the lock has ended), flightlock.fetcher (its name), flightlock.keys (how many are loaded). An
// error is recorded, and is the status of the span, except where a Fetcher waits for another process: that others load
// is no error. Without the option Keys, neither an attribute nor the text of an error contains a key, which may be
// personal data; but the error of a Loader is recorded as it is.
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
		WaitStarted: t.waitStarted, WaitEnded: t.waitEnded,
		HoldStarted: t.holdStarted, HoldEnded: t.holdEnded,
		LoadStarted: t.loadStarted, LoadEnded: t.loadEnded,
	}
}

type tracing struct {
	tracer trace.Tracer
	keys   bool
}

// spanKey is that of the span of a wait or a hold in its ctx. It is found there by its tracing: several Observers may
// make spans.
type spanKey struct{ t *tracing }

// start begins a span. The ctx that it returns has it for end.
func (t *tracing) start(ctx context.Context, name string, options ...trace.SpanStartOption) context.Context {
	ctx, span := t.tracer.Start(ctx, name, append(options, trace.WithSpanKind(trace.SpanKindInternal))...)
	return context.WithValue(ctx, spanKey{t}, span)
}

// span is the span that start has put into ctx. A ctx without one has a span that does nothing.
func (t *tracing) span(ctx context.Context) trace.Span {
	if span, ok := ctx.Value(spanKey{t}).(trace.Span); ok {
		return span
	}
	return trace.SpanFromContext(context.Background())
}

func (t *tracing) waitStarted(ctx context.Context, w flightlock.WaitInfo) context.Context {
	return t.start(ctx, "lock.wait", trace.WithAttributes(t.lock(w.Key, w.Class)...))
}

func (t *tracing) waitEnded(ctx context.Context, w flightlock.WaitInfo) {
	err := w.Err
	if w.Fetcher && errors.Is(err, flightlock.ErrNotAcquired) {
		err = nil
	}
	t.end(ctx, err, attribute.String("flightlock.outcome", string(w.Outcome)),
		attribute.String("flightlock.wait", string(w.For)))
}

func (t *tracing) holdStarted(ctx context.Context, h flightlock.HoldInfo) context.Context {
	options := []trace.SpanStartOption{
		trace.WithAttributes(append(t.lock(h.Key, h.Class), attribute.Int64("flightlock.fence", h.Fence))...),
	}
	if h.Previous != nil {
		options = append(options, trace.WithLinks(trace.Link{SpanContext: t.span(h.Previous).SpanContext()}))
	}
	return t.start(ctx, "lock.hold", options...)
}

func (t *tracing) holdEnded(ctx context.Context, h flightlock.HoldInfo) {
	err := h.Err
	if h.End == flightlock.EndRanOut { // as intended
		err = nil
	}
	t.end(ctx, err, attribute.String("flightlock.end", string(h.End)))
}

// lock gives the attributes of a lock.
func (t *tracing) lock(key, class string) (all []attribute.KeyValue) {
	if t.keys {
		all = append(all, attribute.String("flightlock.key", key))
	}
	if class != "" {
		all = append(all, attribute.String("flightlock.class", class))
	}
	return all
}

func (t *tracing) loadStarted(ctx context.Context, l flightlock.LoadInfo) context.Context {
	all := []attribute.KeyValue{attribute.String("flightlock.fetcher", l.Fetcher),
		attribute.Int("flightlock.keys", len(l.Keys))}
	if t.keys {
		all = append(all, attribute.StringSlice("flightlock.key", l.Keys))
	}
	return t.start(ctx, "cache.load", trace.WithAttributes(all...))
}

func (t *tracing) loadEnded(ctx context.Context, l flightlock.LoadInfo) {
	t.end(ctx, l.Err, attribute.String("flightlock.outcome", string(l.Outcome)))
}

// end ends the span of ctx; err is recorded.
func (t *tracing) end(ctx context.Context, err error, attributes ...attribute.KeyValue) {
	span := t.span(ctx)
	span.SetAttributes(attributes...)
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
