package app

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// schema stores a fencing token beside everything that a lock protects. 0 is below every token.
//
// Ticks are not unique in runs, so that the demo can count those that were started twice. Make them
// unique in a service of your own: a constraint in the database is the strongest protection, and
// the lock then only saves work.
const schema = `
CREATE TABLE IF NOT EXISTS accounts
	(id TEXT PRIMARY KEY, balance INTEGER NOT NULL, fence INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS ledger
	(id TEXT PRIMARY KEY, "from" TEXT NOT NULL, "to" TEXT NOT NULL, amount INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS jobs
	(name TEXT PRIMARY KEY, last INTEGER NOT NULL, fence INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS runs
	(tick INTEGER NOT NULL, process TEXT NOT NULL, fence INTEGER NOT NULL, at INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS leaders
	(process TEXT NOT NULL, fence INTEGER NOT NULL, from_ns INTEGER NOT NULL, until_ns INTEGER NOT NULL);
`

// busyTimeout is how long SQLite waits for another process.
const busyTimeout = 5 * time.Second

// OpenDB opens the database that all processes share, and creates its tables if they are missing.
func OpenDB(ctx context.Context, file string) (*sql.DB, error) {
	// Transactions lock the file when they begin. One that reads first and writes later would
	// fail where another one writes in between. With synchronous(normal) a power failure may undo
	// the last transactions, tokens included: take synchronous(full) for real money.
	db, err := sql.Open("sqlite", fmt.Sprintf(
		"file:%s?_pragma=busy_timeout(%d)&_pragma=synchronous(normal)&_txlock=immediate",
		(&url.URL{Path: file}).EscapedPath(), busyTimeout.Milliseconds()))
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(1) // SQLite has one writer at a time: the others of this process wait here
	if err := create(ctx, db); err != nil {
		return nil, errors.Join(fmt.Errorf("database %s: %w", file, err), db.Close())
	}
	return db, nil
}

// create retries because SQLite does not wait for other processes while it switches to WAL.
func create(ctx context.Context, db *sql.DB) error {
	for end := time.Now().Add(busyTimeout); ; {
		_, err := db.ExecContext(ctx, "PRAGMA journal_mode = wal;"+schema)
		var failed *sqlite.Error
		busy := errors.As(err, &failed) && failed.Code()&0xff == sqlite3.SQLITE_BUSY
		if !busy || time.Now().After(end) || !pause(ctx, 10*time.Millisecond) {
			return err
		}
	}
}

// affected reports whether an UPDATE found a row for which its condition held.
func affected(res sql.Result, err error) (bool, error) {
	if err != nil {
		return false, err
	}
	n, err := res.RowsAffected()
	return n > 0, err
}

// inTx runs fn in a transaction: all of it takes effect, or nothing.
func inTx(ctx context.Context, db *sql.DB, fn func(*sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // after Commit it does nothing
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit()
}
