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
	leaderTTL  = 5 * time.Second // how long there is no leader when one is killed
	leaderBeat = 50 * time.Millisecond
)

// leader makes one of all processes the leader.
type leader struct {
	db      *sql.DB
	locks   variant.Locker
	prefix  string
	process string
	log     *slog.Logger
}

// run takes part in the election until ctx ends. Then a leader releases its lock, and another
// process leads at once.
func (e *leader) run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := e.locks.Do(ctx, e.prefix+"leader", leaderTTL, e.lead); err != nil && ctx.Err() == nil {
			e.log.Warn("not leading", "err", err)
			pause(ctx, time.Second/2+rand.N(time.Second/2))
		}
	}
}

// lead is the leader's work: it records the time during which it was certainly the only leader.
//
// It was the leader at a moment if the lock is still held after that moment. Err reads the clock,
// so it is right at once, even if this process was just paused; ctx may end a little later.
func (e *leader) lead(ctx context.Context, l variant.Lock) error {
	from := time.Now().UnixNano()
	if err := l.Err(); err != nil {
		return err
	}
	res, err := e.db.ExecContext(ctx,
		`INSERT INTO leaders (process, fence, from_ns, until_ns) VALUES ($1, $2, $3, $3)`,
		e.process, l.Fence(), from)
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
		if stop { // the process shuts down; the lock is still held
			return nil
		}
	}
}

// beat records until when this process has led. It does so once more when ctx has ended.
func (e *leader) beat(ctx context.Context, row, until int64) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaderTTL)
	defer cancel()
	_, err := e.db.ExecContext(ctx, `UPDATE leaders SET until_ns = $1 WHERE rowid = $2`, until, row)
	return err
}

// pause waits for d, and reports whether ctx lasted.
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
