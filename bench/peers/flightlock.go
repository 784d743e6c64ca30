package main

import (
	"cmp"
	"context"
	"time"

	"github.com/flightlock/flightlock"
)

type flightClient struct {
	c   *flightlock.Client
	ttl time.Duration
}

func openFlightlock(s settings) (locker, error) {
	return openWith(s, flightlock.Options{NodeTimeout: cmp.Or(s.NodeTimeout, nodeTimeout)})
}

func openLingering(s settings) (locker, error) {
	return openWith(s, flightlock.Options{NodeTimeout: nodeTimeout, Linger: s.Linger})
}

// openAsync is for a caller that does not wait for its releases.
func openAsync(s settings) (locker, error) {
	l, err := openFlightlock(s)
	if err != nil {
		return nil, err
	}
	return asyncClient{l.(*flightClient)}, nil
}

func openWith(s settings, opts flightlock.Options) (locker, error) {
	var urls []string
	for _, a := range s.Addrs {
		urls = append(urls, "redis://"+a)
	}
	c, err := flightlock.Open(opts, urls...)
	if err != nil {
		return nil, err
	}
	// On three nodes that remember nothing this takes 750 ms, longer than the warm-up.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := c.Ready(ctx); err != nil {
		_ = c.Close(ctx)
		return nil, err
	}
	return &flightClient{c, s.TTL}, nil
}

func (f *flightClient) lock(ctx context.Context, key string) (held, error) {
	l, err := f.c.SingleFlightLock(ctx, key, f.ttl, nil)
	if err != nil {
		return nil, err
	}
	return flightHeld{l}, nil
}

func (f *flightClient) keep(ctx context.Context, key string) (held, error) {
	l, err := f.c.SingleFlightLock(ctx, key, f.ttl, nil)
	if err != nil {
		return nil, err
	}
	if err := l.AutoRefresh(ctx, flightlock.RefreshPolicy{}); err != nil {
		return nil, err
	}
	return flightHeld{l}, nil
}

func (f *flightClient) retained() (reused, recalled uint64) {
	s := f.c.Stats()
	return s.Reused, s.Recalled
}

func (f *flightClient) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = f.c.Close(ctx) // what it says was measured by then
}

type flightHeld struct{ l *flightlock.Lock }

func (h flightHeld) release() error { return h.l.Release(context.Background()) }

// asyncClient is a flightClient whose locks are released by ReleaseAsync.
type asyncClient struct{ *flightClient }

func (f asyncClient) lock(ctx context.Context, key string) (held, error) {
	h, err := f.flightClient.lock(ctx, key)
	if err != nil {
		return nil, err
	}
	return asyncHeld(h.(flightHeld)), nil
}

type asyncHeld struct{ l *flightlock.Lock }

func (h asyncHeld) release() error {
	h.l.ReleaseAsync()
	return nil
}
