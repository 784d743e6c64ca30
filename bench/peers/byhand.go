package main

import (
	"context"

	"golang.org/x/sync/singleflight"
)

// byHand is the lock that people write around x/sync singleflight: of all callers in a process that
// want a key, one asks Redis. When it has the lock the others are woken, find that it is not
// theirs, and try again.
type byHand struct {
	*redsyncClient
	group singleflight.Group
}

func openByHand(s settings) (locker, error) {
	return &byHand{redsyncClient: newFailFast(s)}, nil
}

func (b *byHand) lock(ctx context.Context, key string) (held, error) {
	for ctx.Err() == nil {
		var mine held
		_, _, _ = b.group.Do(key, func() (any, error) { // a failed caller gets the error; the next one tries again
			h, err := b.redsyncClient.lock(ctx, key)
			mine = h
			return nil, err
		})
		if mine != nil {
			return mine, nil
		}
	}
	return nil, ctx.Err()
}
