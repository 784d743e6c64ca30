package flightlock

import (
	"context"
	"errors"
	"testing"
)

// Where lookups need permits, a LookupMany has one, and gives it back: however it ends. One is enough for those inside.
func TestLookupsOfManyWithPermits(t *testing.T) {
	f := plainFetcher(t)
	p := &f.permits
	used := func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.used
	}
	p.begun = true // and it is crowded: the next lookup needs a permit
	p.crowded.Store(true)
	calls := 0
	f.src.LookupMany = func(ctx context.Context, keys []string) (map[string]Found[int], error) {
		calls++
		if n := used(); n != 1 {
			t.Errorf("%d permits in use", n)
		}
		switch keys[0] {
		case "outer":
			return f.lookupsWithPermit(ctx, []string{"inner"})
		case "panics":
			panic("mine")
		}
		return map[string]Found[int]{keys[0]: {Value: 7, Fresh: Fresh}}, nil
	}
	lookUp := func(ctx context.Context, key string) (found map[string]Found[int], err error) {
		defer func() { _ = recover() }()
		p.crowded.Store(true) // again
		return f.lookupsWithPermit(ctx, []string{key})
	}
	if found, err := lookUp(t.Context(), "outer"); found["inner"].Value != 7 || err != nil {
		t.Errorf("%v, %v", found, err)
	}
	_, _ = lookUp(t.Context(), "panics")
	if n := used(); n != 0 || calls != 3 {
		t.Errorf("%d permits in use after %d calls", n, calls)
	}
	p.used = p.limit
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := lookUp(ctx, "late"); !errors.Is(err, context.Canceled) || calls != 3 {
		t.Errorf("%v; %d calls", err, calls)
	}
	p.used = 0
}
