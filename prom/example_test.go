package prom_test

import (
	"context"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/flightlock/flightlock/prom"
	"github.com/prometheus/client_golang/prometheus"
)

// A program usually has prometheus.DefaultRegisterer, which promhttp.Handler serves.
func ExampleNew() {
	ctx := context.Background()
	nodes := flightlocktest.Start(1) // in place of Redis
	defer nodes.Close()
	reg := prometheus.NewRegistry()
	metrics, err := prom.New(reg)
	if err != nil {
		fmt.Println(err)
		return
	}
	c, err := nodes.Client(flightlock.Options{Observers: []*flightlock.Observer{metrics}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close(ctx)
	_ = c.Do(ctx, "order:42", 10*time.Second, nil, func(context.Context, *flightlock.Lock) error { return nil })
	families, _ := reg.Gather()
	for _, f := range families {
		if f.GetName() == "flightlock_acquired_total" {
			fmt.Println(f.GetName(), f.GetMetric()[0].GetCounter().GetValue())
		}
	}
	// Output: flightlock_acquired_total 1
}
