package rediscache_test

import (
	"testing"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/rediscache"
)

// A server whose memory is full, and that evicts nothing, refuses writes and executes deletions. So values can be
// invalidated there: an entry that is missing has no stamp either.
func TestInvalidateOnAFullServer(t *testing.T) {
	t.Parallel()
	s, locks := redistest.StartServer(t, "--maxmemory-policy", "noeviction"), redistest.StartServer(t)
	cache, o := realCache(t, s.Client(t, honouring), locks.Addr(), rediscache.Options[string]{})
	ctx := t.Context()
	want := func(key, value string) {
		t.Helper()
		if v, err := cache.Get(ctx, key); v != value || err != nil {
			t.Errorf("%q, %v; want %q", v, err, value)
		}
	}
	keys := []string{"a", "b"}
	for _, key := range keys {
		want(key, key+"@0")
	}
	s.Do(t, "CONFIG", "SET", "maxmemory", "1")
	o.version.Add(1)
	if err := cache.Invalidate(ctx, keys...); err != nil {
		t.Error(err)
	}
	for _, key := range keys {
		want(key, key+"@1")
	}
	s.Do(t, "CONFIG", "SET", "maxmemory", "0")
	for range 2 {
		want("a", "a@1")
	}
	if got := cache.Stats(); got.Hits != 1 || got.Repeating != 0 {
		t.Errorf("%+v", got)
	}
}
