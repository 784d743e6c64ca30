package main

import (
	"context"

	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
)

type rueidisClient struct{ l rueidislock.Locker }

// openRueidislock takes a majority of as many keys as there are nodes, all on the first server.
// TryNextAfter, how long one key may take, is what the others get per node: with its default of 20
// ms most tries fail under load.
func openRueidislock(s settings) (locker, error) {
	l, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption:   rueidis.ClientOption{InitAddress: s.Addrs[:1]},
		KeyMajority:    int32(len(s.Addrs)/2 + 1),
		KeyValidity:    s.TTL,
		ExtendInterval: s.TTL / 3,
		TryNextAfter:   nodeTimeout,
		NoLoopTracking: true,
	})
	if err != nil {
		return nil, err
	}
	return &rueidisClient{l}, nil
}

func (r *rueidisClient) lock(ctx context.Context, key string) (held, error) {
	_, cancel, err := r.l.WithContext(ctx, key)
	if err != nil {
		return nil, err
	}
	return rueidisHeld(cancel), nil
}

// keep is lock: it extends by itself.
func (r *rueidisClient) keep(ctx context.Context, key string) (held, error) { return r.lock(ctx, key) }

func (r *rueidisClient) close() { r.l.Close() }

// rueidisHeld returns when all its keys are deleted.
type rueidisHeld context.CancelFunc

func (h rueidisHeld) release() error {
	h()
	return nil
}
