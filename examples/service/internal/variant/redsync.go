package variant

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-redsync/redsync/v4"
	syncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
)

// withRedsync locks by redsync as its README shows it, with the default options of both libraries.
type withRedsync struct {
	env   Env
	nodes []*redis.Client
	rs    *redsync.Redsync
}

func newRedsync(env Env) (*withRedsync, error) {
	r := &withRedsync{env: env}
	var pools []syncredis.Pool
	for _, url := range env.Nodes {
		o, err := redis.ParseURL(url)
		if err != nil {
			return nil, errors.Join(err, r.Close(context.Background()))
		}
		node := redis.NewClient(o)
		r.nodes = append(r.nodes, node)
		pools = append(pools, goredis.NewPool(node))
	}
	r.rs = redsync.New(pools...)
	return r, nil
}

func (r *withRedsync) Ready(ctx context.Context) error {
	for _, node := range r.nodes {
		if err := node.Ping(ctx).Err(); err != nil {
			return err
		}
	}
	return nil
}

func (r *withRedsync) Close(context.Context) error {
	var errs []error
	for _, node := range r.nodes {
		errs = append(errs, node.Close())
	}
	return errors.Join(errs...)
}

// Do extends the mutex by its default expiry of 8 s, for as long as fn runs.
func (r *withRedsync) Do(ctx context.Context, key string, _ time.Duration, fn func(context.Context, Lock) error) error {
	m := r.rs.NewMutex("lock:" + key)
	if err := m.LockContext(ctx); err != nil {
		return fmt.Errorf("%w on %q: %w", ErrNoLock, key, err)
	}
	held := &mutex{}
	held.until.Store(m.Until().UnixNano())
	ctx, cancel := context.WithCancelCause(ctx)
	var extending sync.WaitGroup
	extending.Go(func() { held.extend(ctx, cancel, m) })
	err := fn(ctx, held)
	cancel(nil)
	extending.Wait()
	return errors.Join(err, unlock(m))
}

// unlock lets the next one in, also when ctx has ended.
func unlock(m *redsync.Mutex) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if ok, err := m.UnlockContext(ctx); !ok || err != nil {
		return fmt.Errorf("%w: unlock %q: %w", ErrLost, m.Name(), errors.Join(err, errUnlock))
	}
	return nil
}

var errUnlock = errors.New("not unlocked")

// mutex is a redsync.Mutex that is being extended by one goroutine, and asked for by another.
type mutex struct{ until atomic.Int64 } // in unix nanoseconds

func (*mutex) Fence() int64 { return 0 } // redsync has no tokens

func (m *mutex) Err() error {
	if time.Now().UnixNano() >= m.until.Load() {
		return ErrLost
	}
	return nil
}

// extend goes on until ctx ends, and ends it when the lock is lost.
func (m *mutex) extend(ctx context.Context, lost context.CancelCauseFunc, rm *redsync.Mutex) {
	tick := time.NewTicker(defaultExpiry / 3)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if ok, err := rm.ExtendContext(ctx); !ok || err != nil && m.Err() != nil {
			lost(fmt.Errorf("%w: extend %q: %w", ErrLost, rm.Name(), errors.Join(err, ErrLost)))
			return
		}
		m.until.Store(rm.Until().UnixNano())
	}
}

const defaultExpiry = 8 * time.Second // of redsync

// locked is a cache in Redis, loaded under a mutex, with a second look at the cache when the mutex is there.
type locked struct {
	r      *withRedsync
	values values
	load   Load
	opts   CacheOptions
	log    *slog.Logger
	counts counts
}

func (r *withRedsync) NewCache(name string, load Load, opts CacheOptions) (Cache, error) {
	return &locked{r: r, values: values{r.env.Cache, opts.Fresh}, load: load, opts: opts, log: r.env.Log.With("cache", name)}, nil
}

func (l *locked) Fetch(ctx context.Context, key string) (_ string, err error) {
	if value, found := l.counts.get(ctx, l.values, key); found {
		return value, nil
	}
	m := l.r.rs.NewMutex("lock:" + key)
	if err := m.LockContext(ctx); err != nil {
		return "", fmt.Errorf("%w on %q: %w", ErrNoLock, key, err)
	}
	defer func() {
		if err := unlock(m); err != nil {
			l.log.Debug("after a load", "err", err)
		}
	}()
	if value, found := l.counts.get(ctx, l.values, key); found { // somebody loaded it while we waited
		return value, nil
	}
	ctx, cancel := context.WithTimeout(ctx, l.opts.LoadTimeout)
	defer cancel()
	l.counts.loads.Add(1)
	value, err := l.load(ctx, key, someLock)
	if err == nil {
		l.counts.set(ctx, l.values, l.log, key, value)
	}
	return value, err
}

// someLock stands for the token where there is a lock without one.
const someLock = 1

func (l *locked) Stats() Stats { return l.counts.read() }

func (l *locked) Close(context.Context) error { return nil } // loads are on the goroutines of requests, which have ended
