// Package app is the service: what it consists of, how it starts and how it shuts down.
package app

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/examples/service/internal/variant"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/redis/go-redis/v9"
)

// App is one process of the service. Open fills it in; only the fields of the last group change
// after that.
type App struct {
	cfg      Config
	log      *slog.Logger
	metrics  *prometheus.Registry
	took     *prometheus.HistogramVec
	listener net.Listener

	db     *sql.DB
	rdb    *redis.Client // the cache
	origin *origin
	locks  variant.Locker
	items  variant.Cache
	pages  variant.Cache
	bank   *bank

	closers []func(context.Context) error // one for each thing that is open, in the order of opening

	ready    atomic.Bool // locks can be had, or Config.Ready is over
	draining atomic.Bool // the process shuts down
	kinds    kinds
	spinner  spinner
}

// Open creates the service and listens. Run serves requests.
func Open(ctx context.Context, cfg Config, log *slog.Logger) (*App, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	a := &App{cfg: cfg, log: log, metrics: prometheus.NewRegistry()}
	if err := a.open(ctx); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cfg.Grace)
		defer cancel()
		return nil, errors.Join(err, a.close(ctx))
	}
	return a, nil
}

// open creates the parts, each after those that it uses. They are closed in the reverse order.
func (a *App) open(ctx context.Context) (err error) {
	if err := a.metrics.Register(collectors.NewGoCollector()); err != nil {
		return err
	}
	if a.took, err = newTook(a.metrics); err != nil {
		return err
	}
	if a.db, err = OpenDB(ctx, a.cfg.DB); err != nil {
		return err
	}
	a.onClose(func(context.Context) error { return a.db.Close() })

	if a.rdb, err = openCache(a.cfg.Cache); err != nil {
		return err
	}
	a.onClose(func(context.Context) error { return a.rdb.Close() })

	a.origin = newOrigin(a.cfg.Origin, a.cfg.OriginToken)
	a.onClose(func(context.Context) error { a.origin.close(); return nil })

	a.locks, err = variant.New(a.cfg.With, variant.Env{
		Nodes: strings.Split(a.cfg.Redis, ","), Cache: a.rdb, Log: a.log, Registerer: a.metrics,
		NodeTimeout: a.cfg.NodeTimeout,
	})
	if err != nil {
		return err
	}
	a.onClose(a.locks.Close)

	if a.items, err = newItems(a.locks, a.origin, a.cfg.Fresh); err != nil {
		return err
	}
	a.onClose(a.items.Close)

	if a.pages, err = newPages(a.locks, a.items, a.cfg.Prefix, a.cfg.Fresh); err != nil {
		return err
	}
	a.onClose(a.pages.Close)

	if a.bank, err = newBank(ctx, a.db, a.locks, a.cfg.Prefix, a.cfg.Accounts, think); err != nil {
		return err
	}
	a.listener, err = net.Listen("tcp", a.cfg.Addr)
	return err
}

// openCache creates the cache's client. A server that hangs costs a request what one lookup may
// take (variant/values.go) and no more: there is no second attempt, and there are connections
// for all requests that may wait for it at once. With the default of 10 per processor requests
// would wait for a connection, a second longer than for an answer, and twice.
func openCache(url string) (*redis.Client, error) {
	o, err := redis.ParseURL(url)
	if err != nil {
		return nil, fmt.Errorf("url of the cache: %w", err)
	}
	o.ContextTimeoutEnabled = true
	o.DialerRetries = 1
	o.MaxRetries = -1
	o.PoolSize = 500
	o.DialTimeout = time.Second
	return redis.NewClient(o), nil
}

// Addr is the address on which the service listens.
func (a *App) Addr() string { return a.listener.Addr().String() }

// Run serves until ctx ends, then shuts down. Its error is that of serving, and what could not
// be ended in time.
func (a *App) Run(ctx context.Context) error {
	a.spinner.set(a.cfg.Spin)
	server := &http.Server{
		Handler:           a.handler(),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      a.cfg.Timeout + 10*time.Second,
		IdleTimeout:       2 * time.Minute,
		ErrorLog:          slog.NewLogLogger(a.log.Handler(), slog.LevelWarn),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(a.listener) }()
	a.log.Info("listening", "addr", a.Addr(), "with", a.cfg.With)

	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var background sync.WaitGroup
	background.Go(func() { a.warmUp(ctx) })
	background.Go(func() { a.newTicks().run(ctx) })
	background.Go(func() { a.newLeader().run(ctx) })

	var failed error
	select {
	case <-ctx.Done():
	case failed = <-served:
		stop()
	}
	return errors.Join(failed, a.shutDown(server, &background))
}

// warmUp prepares for locking, so that the first requests do not wait for connections. It is
// not a condition: a service that does not start while Redis is down makes two outages of one.
func (a *App) warmUp(ctx context.Context) {
	bounded, cancel := context.WithTimeout(ctx, a.cfg.Ready)
	defer cancel()
	err := a.locks.Ready(bounded)
	if ctx.Err() != nil {
		return // the process shuts down before it was ready: it takes no traffic
	}
	if err != nil {
		a.log.Warn("starting without locks", "err", err)
	}
	a.ready.Store(true)
	a.log.Info("ready")
}

// shutDown ends requests first, then what they use. The ctx of the job and the leader has
// ended, so another process takes over from them while this one still serves.
func (a *App) shutDown(server *http.Server, background *sync.WaitGroup) error {
	a.log.Info("draining")
	a.draining.Store(true)
	time.Sleep(a.cfg.Drain) // the load balancer sees /healthz fail, and sends nothing more

	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.Grace)
	defer cancel()
	err := server.Shutdown(ctx)
	if err != nil {
		err = errors.Join(fmt.Errorf("requests go on: %w", err), server.Close())
	}
	background.Wait() // the timeouts of locks and database bound it
	a.spinner.set(0)
	err = errors.Join(err, a.close(ctx))
	a.log.Info("shut down", "err", err)
	return err
}

func (a *App) onClose(f func(context.Context) error) { a.closers = append(a.closers, f) }

// close closes the parts, the last one first. So pages end before the items that they wait for,
// and the caches before the locks: what is being loaded is finished and stored.
func (a *App) close(ctx context.Context) error {
	var errs []error
	for i := len(a.closers) - 1; i >= 0; i-- {
		errs = append(errs, a.closers[i](ctx))
	}
	return errors.Join(errs...)
}

func (a *App) newTicks() *ticks {
	return &ticks{db: a.db, locks: a.locks, prefix: a.cfg.Prefix, process: a.cfg.Name, log: a.log}
}

func (a *App) newLeader() *leader {
	return &leader{db: a.db, locks: a.locks, prefix: a.cfg.Prefix, process: a.cfg.Name, log: a.log}
}

// think stands for the work of a transfer: checks of limits, a call of another service.
func think(ctx context.Context) error {
	pause(ctx, 2*time.Millisecond)
	return ctx.Err()
}
