package fetch

import (
	"context"

	"github.com/flightlock/flightlock/internal/seam"
)

// LoadFrom is Each for a function that also gets the entry which it replaces: to ask the origin whether the
// value has changed (an ETag, a version), and return the old one if not. old.Fresh is Miss if there is none,
// as after an invalidation.
func LoadFrom[V any](load func(ctx context.Context, key string, old Entry[V]) (V, error)) Loader[V] {
	if load == nil {
		return nil
	}
	return func(ctx context.Context, keys []string) (map[string]V, error) {
		replaced, _ := ctx.Value(seam.OfOld{}).(map[string]Entry[V])
		return Each(func(ctx context.Context, key string) (V, error) {
			return load(ctx, key, replaced[key])
		})(ctx, keys)
	}
}

// withOld is ctx for a load of runs, with what was found under their locks. It hides that of a load around
// this one.
func withOld[V any](ctx context.Context, runs []*run[V]) context.Context {
	var replaced map[string]Entry[V]
	for _, r := range runs {
		if e := r.Data.loaded; e.Fresh == Stale && !e.Absent {
			if replaced == nil {
				replaced = map[string]Entry[V]{}
			}
			replaced[r.Key()] = e
		}
	}
	return context.WithValue(ctx, seam.OfOld{}, replaced)
}
