// Package sqlfence is the recipe for fencing in a SQL database: each row that a lock protects
// stores the largest token that has written it, and every write is conditional on that token. A
// holder that was paused and has lost the lock without knowing it changes nothing.
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

// Schema stores the token in the row that it protects. 0 is below every token.
const Schema = `CREATE TABLE accounts (
	id      TEXT   PRIMARY KEY,
	balance BIGINT NOT NULL,
	fence   BIGINT NOT NULL DEFAULT 0
)`

// ErrStale reports that a later holder of the lock has written the row.
var ErrStale = errors.New("a later lock holder has written")

// Balance reads a row for a holder that will write a value derived from it, with SetBalanceAgain.
// From then on writes with a smaller token are refused. After a plain SELECT, an earlier holder
// that was paused can write between this holder's read and its write: that write is acknowledged,
// and then lost. (Transfer reads and writes in one statement.)
func Balance(ctx context.Context, db *sql.DB, id string, l *flightlock.Lock) (balance int64, err error) {
	err = db.QueryRowContext(ctx,
		`UPDATE accounts SET fence = $1 WHERE id = $2 AND fence <= $1 RETURNING balance`,
		l.Fence(), id).Scan(&balance)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, fmt.Errorf("account %q: %w", id, ErrStale)
	}
	return balance, err
}

// SetBalance writes a row once under a lock, with a value that does not depend on what was read:
// each token may write once. It returns ErrStale if there is no such row, or if the same or a
// larger token has written it.
func SetBalance(ctx context.Context, db *sql.DB, id string, balance int64, l *flightlock.Lock) error {
	res, err := db.ExecContext(ctx,
		`UPDATE accounts SET balance = $1, fence = $2 WHERE id = $3 AND fence < $2`,
		balance, l.Fence(), id)
	return written(res, err, id)
}

// SetBalanceAgain writes a row that is written several times under one lock: note the <=.
func SetBalanceAgain(ctx context.Context, db *sql.DB, id string, balance int64, l *flightlock.Lock) error {
	res, err := db.ExecContext(ctx,
		`UPDATE accounts SET balance = $1, fence = $2 WHERE id = $3 AND fence <= $2`,
		balance, l.Fence(), id)
	return written(res, err, id)
}

// Upsert inserts the row if it does not exist.
func Upsert(ctx context.Context, db *sql.DB, id string, balance int64, l *flightlock.Lock) error {
	res, err := db.ExecContext(ctx,
		`INSERT INTO accounts (id, balance, fence) VALUES ($1, $2, $3)
		ON CONFLICT (id) DO UPDATE SET balance = excluded.balance, fence = excluded.fence
		WHERE accounts.fence <= excluded.fence`,
		id, balance, l.Fence())
	return written(res, err, id)
}

// Transfer writes several rows, with decisions that depend on what was read: in one transaction,
// each write under its condition, all or none. l protects all of these rows, wherever they are
// written: tokens of different locks cannot be compared. Where each row has a lock of its own, each
// write needs the token of its row's lock (see bank.go in examples/service).
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

// written reports whether the condition held, as an error.
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
