package variant

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-redsync/redsync/v4"
	syncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
)

// withRedsync locks with redsync as its README shows, with the default options of both libraries.
type withRedsync struct {
	env   Env
	nodes []*redis.Client
	rs    *redsync.Redsync
}

func newRedsync(env Env) (Locker, error) {
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
	var errs []error
	for _, node := range r.nodes {
		errs = append(errs, node.Ping(ctx).Err())
	}
	return errors.Join(errs...)
}

func (r *withRedsync) Close(context.Context) error {
	var errs []error
	for _, node := range r.nodes {
		errs = append(errs, node.Close())
	}
	return errors.Join(errs...)
}

// lock locks a new mutex on key.
func (r *withRedsync) lock(ctx context.Context, key string) (*redsync.Mutex, error) {
	m := r.rs.NewMutex("lock:" + key)
	if err := m.LockContext(ctx); err != nil {
		return nil, fmt.Errorf("%w on %q: %w", ErrNoLock, key, err)
	}
	return m, nil
}

var errUnlock = errors.New("not unlocked")

// unlock works with a ctx that has ended, too.
func unlock(ctx context.Context, m *redsync.Mutex) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if ok, err := m.UnlockContext(ctx); !ok || err != nil {
		return fmt.Errorf("%w: %q: %w", ErrLost, m.Name(), errors.Join(errUnlock, err))
	}
	return nil
}

// Do extends the mutex for as long as fn runs. The ttl is redsync's default.
func (r *withRedsync) Do(ctx context.Context, key string, _ time.Duration,
	fn func(context.Context, Lock) error) (err error) {
	m, err := r.lock(ctx, key)
	if err != nil {
		return err
	}
	held := &extended{}
	held.until.Store(m.Until().UnixNano())
	ctx, cancel := context.WithCancelCause(ctx)
	var extending sync.WaitGroup
	extending.Go(func() { held.extend(ctx, cancel, m) })
	defer func() { // if fn panics, too: the mutex would be extended for ever
		cancel(nil)
		extending.Wait()
		err = errors.Join(err, unlock(ctx, m))
	}()
	return fn(ctx, held)
}

// redsyncExpiry is the default of redsync.
const redsyncExpiry = 8 * time.Second

// extended is a mutex that one goroutine extends while others ask for its state.
type extended struct{ until atomic.Int64 } // unix nanoseconds

func (*extended) Fence() int64 { return 0 } // redsync has no tokens

func (e *extended) Err() error {
	if time.Now().UnixNano() >= e.until.Load() {
		return ErrLost
	}
	return nil
}

// extend returns when ctx ends, or when the lock is lost; then it ends ctx.
func (e *extended) extend(ctx context.Context, end context.CancelCauseFunc, m *redsync.Mutex) {
	tick := time.NewTicker(redsyncExpiry / 3)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if ok, err := m.ExtendContext(ctx); !ok || err != nil {
			end(fmt.Errorf("%w: extend %q: %w", ErrLost, m.Name(), errors.Join(redsync.ErrExtendFailed, err)))
			return
		}
		e.until.Store(m.Until().UnixNano())
	}
}

// locked is a cache in Redis that is loaded under a mutex.
type locked struct {
	plain
	r *withRedsync
}

func (r *withRedsync) NewCache(name string, load Load, opts CacheOptions) (Cache, error) {
	return &locked{r: r, plain: plain{
		values: values{r.env.Cache, opts.Fresh}, load: load, opts: opts, log: r.env.Log.With("cache", name),
	}}, nil
}

func (l *locked) Fetch(ctx context.Context, key string) (string, error) {
	if value, found := l.get(ctx, key); found {
		return value, nil
	}
	m, err := l.r.lock(ctx, key)
	if err != nil {
		return "", err
	}
	defer func() {
		if err := unlock(ctx, m); err != nil {
			l.log.Debug("after a load", "err", err)
		}
	}()
	if value, found := l.get(ctx, key); found { // another caller has loaded it meanwhile
		return value, nil
	}
	return l.fill(ctx, key, true)
}

// Close has nothing to wait for: loads run on the goroutines of requests.
func (l *locked) Close(context.Context) error { return nil }
