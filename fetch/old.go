package fetch

import (
	"context"

	"github.com/flightlock/flightlock/internal/seam"
)

// LoadFrom makes a Loader of a function for one key that also gets the entry which it replaces, for instance to ask the
// origin whether it has changed since (an ETag, a version), and to return the old value if not. old.Fresh is Miss if
// there is none: after an invalidation, and once it has expired, so the Store has to serve stale values for a while.
// old.Age is how old it is, if the Store says so. It is called as by Each.
func LoadFrom[V any](load func(ctx context.Context, key string, old Entry[V]) (V, error)) Loader[V] {
	if load == nil {
		return nil
	}
	return func(ctx context.Context, keys []string) (map[string]V, error) {
		replaced, _ := ctx.Value(seam.OfOld{}).(map[string]Entry[V])
		return Each(func(ctx context.Context, key string) (V, error) { return load(ctx, key, replaced[key]) })(ctx, keys)
	}
}

// withOld is ctx for a load of runs, with what was found under their locks. It hides that of a load around this one.
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
