package app

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"

	_ "modernc.org/sqlite" // the driver
)

// schema has a token beside whatever a lock protects. 0 is below every token.
const schema = `
CREATE TABLE IF NOT EXISTS accounts (id TEXT PRIMARY KEY, balance INTEGER NOT NULL, fence INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS ledger   (id TEXT PRIMARY KEY, "from" TEXT NOT NULL, "to" TEXT NOT NULL, amount INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS runs     (tick INTEGER NOT NULL, process TEXT NOT NULL, fence INTEGER NOT NULL, at INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS leaders  (process TEXT NOT NULL, fence INTEGER NOT NULL, from_ns INTEGER NOT NULL, until_ns INTEGER NOT NULL);
`

// OpenDB opens the database that all processes share, and makes its tables if they are not there.
func OpenDB(ctx context.Context, file string) (*sql.DB, error) {
	// Transactions begin by locking the file: one that first reads and then writes would fail beside another.
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: file}).EscapedPath()+
		"?_pragma=busy_timeout(5000)&_pragma=journal_mode(wal)&_pragma=synchronous(normal)&_txlock=immediate")
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(1)
	if _, err := db.ExecContext(ctx, schema); err != nil {
		return nil, errors.Join(fmt.Errorf("database %s: %w", file, err), db.Close())
	}
	return db, nil
}

// inTx runs fn in a transaction: all of it, or nothing.
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
