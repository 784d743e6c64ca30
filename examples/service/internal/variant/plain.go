package variant

import (
	"context"
	"log/slog"
	"sync/atomic"
)

// plain is what the caches of the variants without tokens have in common. When Redis fails, they
// load, and serve the value without storing it.
type plain struct {
	values values
	load   Load
	opts   CacheOptions
	log    *slog.Logger

	loads, unlocked, lookupErrors, storeFailures atomic.Uint64
}

// get is a lookup. A failure counts as a miss.
func (p *plain) get(ctx context.Context, key string) (value string, found bool) {
	value, found, err := p.values.get(ctx, key)
	if err != nil {
		p.lookupErrors.Add(1)
	}
	return value, found
}

// fill loads and stores.
func (p *plain) fill(ctx context.Context, key string, locked bool) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, p.opts.LoadTimeout)
	defer cancel()
	p.loads.Add(1)
	if !locked {
		p.unlocked.Add(1)
	}
	value, err := p.load(ctx, key)
	if err != nil {
		return "", err
	}
	if err := p.values.set(ctx, key, value); err != nil {
		p.storeFailures.Add(1)
		p.log.Debug("not stored", "key", key, "err", err)
	}
	return value, nil
}

// Invalidate deletes what is stored. A load that is under way stores its old value afterwards:
// nothing prevents that here.
func (p *plain) Invalidate(ctx context.Context, keys ...string) error {
	return p.values.delete(ctx, keys...)
}

// Stats reads the counters.
func (p *plain) Stats() Stats {
	return Stats{
		Loads: p.loads.Load(), Unlocked: p.unlocked.Load(),
		LookupErrors: p.lookupErrors.Load(), StoreFailures: p.storeFailures.Load(),
	}
}
