package rediscache_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/seam"
	"github.com/flightlock/flightlock/rediscache"
)

// metered is a Client with metrics, which reads what one Fetcher counts.
type metered struct {
	seam.Client
	name string
	read func() seam.Counts
}

func (m *metered) Meter(name string, read func() seam.Counts) (seam.Meter, func(seam.Counts)) {
	m.name, m.read = name, read
	return nil, func(seam.Counts) {}
}

// What Stats counts is in the metrics of the Client, under the Name of the Cache.
func TestMetrics(t *testing.T) {
	var m metered
	of := seam.Of
	defer func() { seam.Of = of }()
	seam.Of = func(client any) seam.Client {
		m.Client = of(client)
		return &m
	}
	bubble(t, func(t *testing.T, w *world) {
		load := func(ctx context.Context, keys []string) (map[string]string, error) {
			if keys[0] == "none" {
				return nil, nil
			}
			return map[string]string{keys[0]: keys[0]}, nil
		}
		c := w.cacheWith(w.rdb, load, rediscache.Options[string]{
			Name: "items", Version: "v1", NotFoundFor: time.Hour, MaxValue: 8, Local: time.Second,
		})
		w.values.Mini.Set(c.Key("b"), "no entry")
		for _, key := range []string{"none", "none", "a long key", "a", "a", "b"} {
			if _, err := c.Get(t.Context(), key); err != nil && !errors.Is(err, rediscache.ErrNotFound) {
				t.Error(err)
			}
			time.Sleep(10 * time.Millisecond) // the bubble's time: until its run is over
		}
		w.values.Down(true)
		if err := c.Invalidate(t.Context(), "a"); err == nil {
			t.Error("no error")
		}
		s, n := c.Stats(), m.read()
		if m.name != "items:v1" || !n.Cached || n.LocalHits != 1 || n.NotFound != 1 || n.TooLong != 1 || n.Undecodable == 0 ||
			n.Repeating != 1 || n.Loads != 4 || n.Misses != s.Misses {
			t.Errorf("%s: %+v", m.name, n)
		}
		if s.LocalHits != n.LocalHits || s.NotFound != n.NotFound || s.TooLong != n.TooLong ||
			s.Undecodable != n.Undecodable || s.Repeating != n.Repeating {
			t.Errorf("%+v", s)
		}
		w.values.Down(false)
		time.Sleep(5 * time.Second) // it is repeated
	})
}
