package node

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/redis/go-redis/v9"
)

// Ready dials what the node's lanes do not have yet, so that the first requests do not wait for it,
// and says why not if that cannot be. Those of a Cluster have their scripts loaded besides; those
// of other nodes have with the first request, after the node has reported its epoch. It ends when
// all lanes have tried once, or with ctx.
func (n *Node) Ready(ctx context.Context) error {
	all, err := n.allServers(ctx)
	if err != nil {
		return err
	}
	if !n.begin() {
		return ErrClosed
	}
	done := make(chan error, 1)
	go func() { // ends with the exchanges
		defer n.wg.Done()
		var tries sync.WaitGroup
		var mu sync.Mutex
		var errs []error
		for _, s := range all {
			s.start.Do(s.run)
			for i := range s.lanes {
				tries.Go(func() {
					if err := s.lanes[i].ready(); err != nil {
						mu.Lock()
						defer mu.Unlock()
						errs = append(errs, err)
					}
				})
			}
		}
		tries.Wait()
		done <- errors.Join(errs...)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// allServers are those that may be asked: of a Cluster all masters.
func (n *Node) allServers(ctx context.Context) ([]*Server, error) {
	ro := n.router
	if ro == nil {
		return []*Server{n.server}, nil
	}
	masters, err := ro.masters(ctx)
	if err != nil {
		return nil, err
	}
	var all []*Server
	for _, m := range masters {
		all = append(all, ro.server(m))
	}
	return all, nil
}

// ready dials l's connection, unless there was one, or somebody is about to. Each of its steps has
// NodeTimeout, for others may wait behind.
func (l *lane) ready() error {
	s := l.s
	if state := s.suspended.Load(); state != nil {
		return state.err
	}
	if l.connected() || !l.claim() {
		return nil
	}
	defer l.rest()
	began := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), s.n.ExchangeTime())
	defer cancel()
	err := l.quick.Process(ctx, redis.NewCmd(ctx, "PING"))
	if conn.IsReply(err) && !conn.NotLoggedIn(err) && l.connected() { // that it refuses PING is an answer
		err = nil
	}
	s.heard(err, nil, began, time.Since(began))
	if err == nil && s.n.router != nil {
		err = l.load(ctx, s.loads.Load())
	}
	return err
}
