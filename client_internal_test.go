package flightlock

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// The name of an epoch fits into what a server reads from a dump as a short string, for a thousand
// years of two names a second.
func TestNamesOfMemoriesAreShort(t *testing.T) {
	c := &Client{id: "#01234567-89ab-cdef-0123-456789abcdef-"}
	c.epochs.Store(7e10)
	first, second := c.epochName(), c.epochName()
	if len(first) > lua.MaxName || first == second || first[:17] != "0123456789abcdefm" {
		t.Errorf("%s, then %s", first, second)
	}
}

// There is a quarantine for any MaxTTL and DriftFactor that are accepted, and no earlier lock
// outlives it. Whether there is one does not depend on its length.
func TestAQuarantineIsLongerThanAnyLock(t *testing.T) {
	var nodes []redis.UniversalClient // which receive no requests
	for i := range 3 {
		c := redis.NewClient(&redis.Options{Addr: fmt.Sprint("127.0.0.1:", i+1)})
		defer c.Close()
		nodes = append(nodes, c)
	}
	for _, maxTTL := range []time.Duration{minTTL, time.Minute, longestTTL} {
		for _, drift := range []float64{math.SmallestNonzeroFloat64, 0.01, math.Nextafter(0.5, 0)} {
			c, err := New(Options{MaxTTL: maxTTL, DriftFactor: drift}, nodes...)
			testkit.Must(t, err)
			if limit := c.quarantineTime(); !c.guarded() || limit < maxTTL || limit > 36*time.Hour+2*time.Millisecond {
				t.Errorf("MaxTTL %v, DriftFactor %v: guarded is %v, for %v", maxTTL, drift, c.guarded(), limit)
			}
			if v := c.quorum.Validity(minTTL); v < 3*time.Millisecond || v >= minTTL {
				t.Errorf("DriftFactor %v: a ttl of %v is valid for %v", drift, minTTL, v)
			}
			testkit.Must(t, c.Close(t.Context()))
		}
	}
}
