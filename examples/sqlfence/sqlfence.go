// Package sqlfence is the recipe for fencing in a SQL database: each row that a lock
// protects carries the largest token that has written it, and every write is conditional on
// it. A holder that was paused and has lost the lock without knowing changes nothing.
//
// The tests run the statements on SQLite; PostgreSQL has the same syntax.
package sqlfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/flightlock/flightlock"
)

// Schema has the token beside what it protects. 0 is below every token.
const Schema = `CREATE TABLE accounts (
	id      TEXT   PRIMARY KEY,
	balance BIGINT NOT NULL,
	fence   BIGINT NOT NULL DEFAULT 0
)`

// ErrStale says that a later holder of the lock has written the row.
var ErrStale = errors.New("a later lock holder has written")

// Balance reads for a holder that will write what follows from it, with SetBalanceAgain. From then on a smaller
// token writes nothing. After a plain SELECT an earlier holder, which was paused, may write between this holder's
// read and its write: that write is acknowledged, and then lost. (Transfer reads and writes in one statement.)
func Balance(ctx context.Context, db *sql.DB, id string, l *flightlock.Lock) (balance int64, err error) {
	err = db.QueryRowContext(ctx,
		`UPDATE accounts SET fence = $1 WHERE id = $2 AND fence <= $1 RETURNING balance`,
		l.Fence(), id).Scan(&balance)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, fmt.Errorf("account %q: %w", id, ErrStale)
	}
	return balance, err
}

// SetBalance is for a lock under which a row is written once, and not on what was read: each token may write once.
// There is no row, or somebody with the same or a larger token was there: ErrStale.
func SetBalance(ctx context.Context, db *sql.DB, id string, balance int64, l *flightlock.Lock) error {
	res, err := db.ExecContext(ctx,
		`UPDATE accounts SET balance = $1, fence = $2 WHERE id = $3 AND fence < $2`,
		balance, l.Fence(), id)
	return written(res, err, id)
}

// SetBalanceAgain is for a lock under which a row is written several times: note the <=.
func SetBalanceAgain(ctx context.Context, db *sql.DB, id string, balance int64, l *flightlock.Lock) error {
	res, err := db.ExecContext(ctx,
		`UPDATE accounts SET balance = $1, fence = $2 WHERE id = $3 AND fence <= $2`,
		balance, l.Fence(), id)
	return written(res, err, id)
}

// Upsert makes the row if there is none.
func Upsert(ctx context.Context, db *sql.DB, id string, balance int64, l *flightlock.Lock) error {
	res, err := db.ExecContext(ctx,
		`INSERT INTO accounts (id, balance, fence) VALUES ($1, $2, $3)
		ON CONFLICT (id) DO UPDATE SET balance = excluded.balance, fence = excluded.fence
		WHERE accounts.fence <= excluded.fence`,
		id, balance, l.Fence())
	return written(res, err, id)
}

// Transfer is for several rows, and for decisions that depend on what was read: in one
// transaction, each write on its condition, all or none.
func Transfer(ctx context.Context, db *sql.DB, from, to string, amount int64, l *flightlock.Lock) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	for _, move := range []struct {
		id     string
		amount int64
	}{{from, -amount}, {to, amount}} {
		res, err := tx.ExecContext(ctx,
			`UPDATE accounts SET balance = balance + $1, fence = $2 WHERE id = $3 AND fence <= $2`,
			move.amount, l.Fence(), move.id)
		if err := written(res, err, move.id); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// written says whether the condition held.
func written(res sql.Result, err error, id string) error {
	if err != nil {
		return err
	}
	n, err := res.RowsAffected()
	if err == nil && n == 0 {
		return fmt.Errorf("account %q: %w", id, ErrStale)
	}
	return err
}
