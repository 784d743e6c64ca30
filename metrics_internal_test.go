package flightlock

import (
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/flight"
	"github.com/prometheus/client_golang/prometheus"
)

// The cost of metrics for a handoff is one observation, without garbage.
func TestObservingAHandoffAllocatesNothing(t *testing.T) {
	m := newMetrics(&Client{}, prometheus.NewRegistry())
	waited := time.Duration(0)
	if n := testing.AllocsPerRun(1000, func() {
		waited += 7 * time.Microsecond
		m.acquired(waited, flight.Handed, nil)
	}); n >= 1 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkObservingAHandoff(b *testing.B) {
	m := newMetrics(&Client{}, prometheus.NewRegistry())
	b.ReportAllocs()
	for i := range b.N {
		m.acquired(time.Duration(i%1000)*time.Microsecond, flight.Handed, nil)
	}
}
