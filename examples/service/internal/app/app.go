// Package app is the service: what it is made of, and how it starts and ends.
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

// App is one process of the service.
type App struct {
	cfg      Config
	log      *slog.Logger
	listener net.Listener
	metrics  *prometheus.Registry
	took     *prometheus.HistogramVec

	db     *sql.DB
	rdb    *redis.Client // the cache
	locks  variant.Locker
	origin *origin

	items variant.Cache
	pages variant.Cache
	bank  *bank

	ready    atomic.Bool // /healthz says yes, unless
	draining atomic.Bool // it says no for good
	kinds    kinds
	spinner  spinner

	closers []func(context.Context) error // what has been opened, in that order
}

// Open makes the service and listens. Run serves.
func Open(ctx context.Context, cfg Config, log *slog.Logger) (*App, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	a := &App{cfg: cfg, log: log, metrics: prometheus.NewRegistry()}
	if err := a.open(ctx); err != nil {
		return nil, errors.Join(err, a.close())
	}
	return a, nil
}

// open fills in the fields. Whoever comes later uses what came before, and so is closed before it.
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
	a.onClose(a.pages.Close) // first of all: pages wait for items
	if a.bank, err = newBank(ctx, a.db, a.locks, a.cfg.Prefix, a.cfg.Accounts, think); err != nil {
		return err
	}
	a.listener, err = net.Listen("tcp", a.cfg.Addr)
	return err
}

// think stands for what a transfer takes time for: limits, fraud, another service.
func think(ctx context.Context) error {
	pause(ctx, 2*time.Millisecond)
	return ctx.Err()
}

// openCache sets up the cache's client so that a server that hangs costs a request what a look may take (see
// values.get), and no more: no second try, and connections for all who may be waiting for it at once. With the default
// of 10 per processor callers would wait for a connection, for a second longer than for an answer, and twice.
func openCache(url string) (*redis.Client, error) {
	o, err := redis.ParseURL(url)
	if err != nil {
		return nil, fmt.Errorf("the cache's url: %w", err)
	}
	o.ContextTimeoutEnabled = true
	o.DialerRetries = 1
	o.MaxRetries = -1
	o.PoolSize = 500
	o.DialTimeout = time.Second
	return redis.NewClient(o), nil
}

// Addr is where the service listens.
func (a *App) Addr() string { return a.listener.Addr().String() }

// Run serves until ctx ends, and then shuts down. An error is that of serving, or of what could not be ended in time.
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
	background.Go(func() {
		a.warmUp(ctx)
		background.Go(func() { a.newTicks().run(ctx) })
		background.Go(func() { a.newLeader().run(ctx) })
	})

	var failed error
	select {
	case <-ctx.Done():
	case failed = <-served:
		stop()
	}
	return errors.Join(failed, a.shutDown(server, &background))
}

// warmUp prepares for the first locks, so that no caller waits for that. It is no condition: a service that does not
// start while Redis is down makes two outages of one.
func (a *App) warmUp(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, a.cfg.Ready)
	defer cancel()
	if err := a.locks.Ready(ctx); err != nil {
		a.log.Warn("starting without locks", "err", err)
	}
	a.ready.Store(true)
	a.log.Info("ready")
}

// shutDown ends what runs, in the order in which one thing needs the other. Leader and ticks have been told to stop,
// and another process takes over, while requests still come.
func (a *App) shutDown(server *http.Server, background *sync.WaitGroup) error {
	a.draining.Store(true)
	a.log.Info("draining")
	time.Sleep(a.cfg.Drain) // until the load balancer has asked /healthz
	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.Grace)
	defer cancel()
	err := server.Shutdown(ctx) // the requests
	if err != nil {
		err = errors.Join(fmt.Errorf("requests go on: %w", err), server.Close())
	}
	background.Wait() // bounded by the locks' and the database's own times
	a.spinner.set(0)
	err = errors.Join(err, a.closeWith(ctx))
	a.log.Info("shut down", "err", err)
	return err
}

func (a *App) newTicks() *ticks {
	return &ticks{db: a.db, locks: a.locks, prefix: a.cfg.Prefix, process: a.cfg.Name, log: a.log}
}

func (a *App) newLeader() *leader {
	return &leader{db: a.db, locks: a.locks, prefix: a.cfg.Prefix, process: a.cfg.Name, log: a.log}
}

func (a *App) onClose(f func(context.Context) error) { a.closers = append(a.closers, f) }

// closeWith closes what has been opened, the latest first.
func (a *App) closeWith(ctx context.Context) error {
	var errs []error
	for i := len(a.closers) - 1; i >= 0; i-- {
		errs = append(errs, a.closers[i](ctx))
	}
	a.closers = nil
	return errors.Join(errs...)
}

func (a *App) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.Grace)
	defer cancel()
	return a.closeWith(ctx)
}
