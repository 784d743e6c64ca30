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
	maxTicks = 60 // how many ticks are made up for at most: older ones are skipped
)

// ticks starts a job once per second, in one of all processes.
//
// The lock alone cannot do that. It says that no other process starts a tick now, not that none
// has done so before. So the database has the last tick that was started, which is read and
// written under the lock. A tick that was due while Redis was down is started later. All ticks
// share one lock, and so their tokens can be compared.
//
// A simpler design was rejected: one TryLock per tick, on a key of its own that is never
// released. A process that shuts down releases it, so that a later one starts the tick again.
type ticks struct {
	db      *sql.DB
	locks   variant.Locker
	prefix  string
	process string
	log     *slog.Logger
}

// run returns when ctx ends.
func (t *ticks) run(ctx context.Context) {
	for {
		now := time.Now()
		if !pause(ctx, now.Truncate(time.Second).Add(time.Second).Sub(now)) {
			return
		}
		if err := t.due(ctx, time.Now().Unix()); err != nil && ctx.Err() == nil {
			t.log.Warn("no tick", "err", err) // it is started in a later round
		}
	}
}

// due starts all ticks up to now that were not started.
func (t *ticks) due(ctx context.Context, now int64) error {
	ctx, cancel := context.WithTimeout(ctx, ticksTTL)
	defer cancel()
	last, err := t.last(ctx, now)
	if err != nil || last >= now {
		return err // another process was faster: no need for the lock
	}
	return t.locks.Do(ctx, t.prefix+"ticks", ticksTTL, func(ctx context.Context, l variant.Lock) error {
		last, err := t.read(ctx, now, l.Fence()) // another process may have held the lock meanwhile
		if err != nil {
			return err
		}
		for tick := max(last+1, now-maxTicks+1); tick <= now; tick++ {
			if err := t.start(ctx, tick, l.Fence()); err != nil {
				return err
			}
		}
		return nil
	})
}

// last is the latest tick that was started, or the one before now if there is none.
func (t *ticks) last(ctx context.Context, now int64) (last int64, err error) {
	err = t.db.QueryRowContext(ctx, `SELECT last FROM jobs WHERE name = 'ticks'`).Scan(&last)
	if errors.Is(err, sql.ErrNoRows) {
		return now - 1, nil
	}
	return last, err
}

// read is last under the lock. It writes the token, so that no earlier lock holder can start a
// tick from then on: one that was paused after it had read could do so, and this process would
// start the same tick.
func (t *ticks) read(ctx context.Context, now, token int64) (last int64, err error) {
	err = t.db.QueryRowContext(ctx,
		`INSERT INTO jobs (name, last, fence) VALUES ('ticks', $1, $2)
		ON CONFLICT (name) DO UPDATE SET fence = excluded.fence WHERE jobs.fence <= excluded.fence
		RETURNING last`,
		now-1, token).Scan(&last)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, errOvertaken
	}
	return last, err
}

// start records that the tick was started. This must not happen twice, so it compares the token.
//
// The job itself is the row in runs. Work that is not in this database begins after the
// transaction: if it began inside and the commit failed, another process would do it again. Then a
// process that dies in between has recorded the tick and done nothing. If that must not happen,
// record the tick as due here, and as done after the work, which is to be idempotent.
func (t *ticks) start(ctx context.Context, tick, token int64) error {
	return inTx(ctx, t.db, func(tx *sql.Tx) error {
		ok, err := affected(tx.ExecContext(ctx,
			`UPDATE jobs SET last = $1, fence = $2 WHERE name = 'ticks' AND fence <= $2`,
			tick, token))
		if err != nil {
			return err
		}
		if !ok {
			return errOvertaken
		}
		_, err = tx.ExecContext(ctx,
			`INSERT INTO runs (tick, process, fence, at) VALUES ($1, $2, $3, $4)`,
			tick, t.process, token, time.Now().UnixNano())
		return err
	})
}
