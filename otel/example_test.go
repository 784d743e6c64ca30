package otel_test

import (
	"context"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/flightlock/flightlock/otel"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// A program sets up a TracerProvider as for its other spans; this one keeps them in memory.
func ExampleNew() {
	ctx := context.Background()
	nodes := flightlocktest.Start(1) // in place of Redis
	defer nodes.Close()
	spans := tracetest.NewInMemoryExporter()
	provider := sdk.NewTracerProvider(sdk.WithSyncer(spans))
	c, err := nodes.Client(flightlock.Options{
		Observers: []*flightlock.Observer{otel.New(provider, otel.Keys())},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	_ = c.Do(ctx, "order:42", 10*time.Second, nil, func(context.Context, *flightlock.Lock) error { return nil })
	_ = c.Close(ctx)
	for _, s := range spans.GetSpans() {
		fmt.Println(s.Name, s.Attributes[0].Value.AsString())
	}
	// Output:
	// lock.wait order:42
	// lock.hold order:42
}
