package app

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"time"

	"github.com/flightlock/flightlock/examples/service/internal/variant"
)

const (
	ticksTTL = 5 * time.Second
	maxTicks = 60 // of those that were missed, so many are made up for
)

// ticks starts a job once per second, in one of all processes.
//
// What has been started stands in the database, and is looked at under the lock: a lock alone says that nobody is at
// it, not that nobody has been. So a tick that fell into an outage is made up for, and one process more or
// less changes nothing. All ticks have one lock, for tokens of different locks cannot be compared.
type ticks struct {
	db      *sql.DB
	locks   variant.Locker
	prefix  string
	process string
	log     *slog.Logger
}

// run goes on until ctx ends.
func (t *ticks) run(ctx context.Context) {
	for {
		now := time.Now()
		timer := time.NewTimer(now.Truncate(time.Second).Add(time.Second).Sub(now))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		if err := t.due(ctx, time.Now().Unix()); err != nil && ctx.Err() == nil {
			t.log.Warn("ticks wait", "err", err) // the next round makes up for it
		}
	}
}

// due starts what has not been started up to now.
func (t *ticks) due(ctx context.Context, now int64) error {
	ctx, cancel := context.WithTimeout(ctx, ticksTTL)
	defer cancel()
	last, err := t.last(ctx, now)
	if err != nil || last >= now {
		return err // mostly another process was faster, and this one needs no lock to see it
	}
	return t.locks.Do(ctx, t.prefix+"ticks", ticksTTL, func(ctx context.Context, l variant.Lock) error {
		last, err := t.last(ctx, now) // somebody may have been at it while we waited
		if err != nil {
			return err
		}
		for tick := max(last+1, now-maxTicks); tick <= now; tick++ {
			if err := t.start(ctx, tick, l.Fence()); err != nil {
				return err
			}
		}
		return nil
	})
}

// last is the tick that was started last; the one before now if there was none at all.
func (t *ticks) last(ctx context.Context, now int64) (last int64, err error) {
	err = t.db.QueryRowContext(ctx, `SELECT COALESCE(MAX(tick), $1) FROM runs`, now-1).Scan(&last)
	return last, err
}

// start is the step that must not happen twice, so it compares the token: who was stopped between its look and
// here, and has lost the lock since, starts nothing.
func (t *ticks) start(ctx context.Context, tick, token int64) error {
	res, err := t.db.ExecContext(ctx, `INSERT INTO runs (tick, process, fence, at)
		SELECT $1, $2, $3, $4 WHERE NOT EXISTS (SELECT 1 FROM runs WHERE fence > $3)`, tick, t.process, token, time.Now().UnixNano())
	if err != nil {
		return err
	}
	n, err := res.RowsAffected()
	if err == nil && n == 0 {
		return errors.Join(errOvertaken, err)
	}
	// Here the job would do its work, if need be beyond the lock.
	return err
}
