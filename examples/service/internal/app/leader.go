package app

import (
	"context"
	"database/sql"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/flightlock/flightlock/examples/service/internal/variant"
)

const (
	leaderTTL  = 5 * time.Second // so long there is no leader after one was killed
	leaderBeat = 50 * time.Millisecond
)

// leader has one of all processes lead.
type leader struct {
	db      *sql.DB
	locks   variant.Locker
	prefix  string
	process string
	log     *slog.Logger
}

// run stands for election until ctx ends. A leader whose ctx ends gives its lock back, and the next one begins.
func (e *leader) run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := e.locks.Do(ctx, e.prefix+"leader", leaderTTL, e.lead); err != nil && ctx.Err() == nil {
			e.log.Warn("not leading", "err", err)
			pause(ctx, time.Second/2+rand.N(time.Second/2))
		}
	}
}

// lead is what the leader does: it writes down since when, and up to when, it was sure to be the only one.
//
// It is sure at a moment if, after that moment, the lock is still held. Err reads the clock, so it is right also when
// this process has just stood still for a while; ctx may end a little later.
func (e *leader) lead(ctx context.Context, l variant.Lock) error {
	from := time.Now().UnixNano()
	if err := l.Err(); err != nil {
		return err
	}
	res, err := e.db.ExecContext(ctx, `INSERT INTO leaders (process, fence, from_ns, until_ns) VALUES ($1, $2, $3, $3)`, e.process, l.Fence(), from)
	if err != nil {
		return err
	}
	row, err := res.LastInsertId()
	if err != nil {
		return err
	}
	e.log.Info("leading", "fence", l.Fence())
	defer e.log.Info("led", "fence", l.Fence())
	for {
		stop := !pause(ctx, leaderBeat)
		until := time.Now().UnixNano()
		if err := l.Err(); err != nil {
			return err
		}
		if err := e.beat(ctx, row, until); err != nil {
			return err
		}
		if stop { // to shut down; the lock is still held
			return nil
		}
	}
}

// beat writes down how long this process has led. It does so at the end as well, when ctx has ended.
func (e *leader) beat(ctx context.Context, row, until int64) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaderTTL)
	defer cancel()
	_, err := e.db.ExecContext(ctx, `UPDATE leaders SET until_ns = $1 WHERE rowid = $2`, until, row)
	return err
}

// pause waits, and reports whether ctx lasted.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
