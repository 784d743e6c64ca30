package app

import (
	"time"

	"github.com/flightlock/flightlock/examples/service/internal/variant"
)

// newItems is the cache of the hot endpoint: a miss is one load of the origin.
func newItems(locks variant.Locker, o *origin, fresh time.Duration) (variant.Cache, error) {
	return locks.NewCache("items", o.load, variant.CacheOptions{
		Fresh:       fresh,
		LoadTimeout: 5 * time.Second,
		MaxLoads:    128, // what the origin can take from one process
	})
}

func itemKey(prefix, id string) string { return prefix + "item:" + id }
