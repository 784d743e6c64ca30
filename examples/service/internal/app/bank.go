package app

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock/examples/service/internal/variant"
)

// The ways in which a transfer can fail that are nobody's fault.
var (
	errNoAccount = errors.New("there is no such account")
	errFunds     = errors.New("not enough on the account")
	errOvertaken = errors.New("a later holder of the lock was here") // nothing has happened; it may be tried again
)

const accountTTL = 5 * time.Second

// bank moves money. Balances are read and written in two transactions with some work in between, so each account
// has a lock. The lock keeps others away; the token, compared in SQL, keeps out one that was
// stopped for a while and does not know yet that its lock has ended.
type bank struct {
	db     *sql.DB
	locks  variant.Locker
	prefix string
	work   func(ctx context.Context) error // between the two
}

// newBank has n accounts, and makes those that are not there. work is done between reading and writing.
func newBank(ctx context.Context, db *sql.DB, locks variant.Locker, prefix string, n int, work func(context.Context) error) (*bank, error) {
	err := inTx(ctx, db, func(tx *sql.Tx) error {
		for i := range n {
			if _, err := tx.ExecContext(ctx, `INSERT OR IGNORE INTO accounts (id, balance) VALUES ($1, $2)`, fmt.Sprintf("a%d", i), 1_000_000); err != nil {
				return err
			}
		}
		return nil
	})
	return &bank{db: db, locks: locks, prefix: prefix, work: work}, err
}

// transfer locks both accounts, always in the order of their names: two transfers that lock each other's first
// account would wait until their deadlines.
func (b *bank) transfer(ctx context.Context, from, to string, amount int64) error {
	first, second := min(from, to), max(from, to)
	committed := false
	err := b.locks.Do(ctx, b.key(first), accountTTL, func(ctx context.Context, l1 variant.Lock) error {
		return b.locks.Do(ctx, b.key(second), accountTTL, func(ctx context.Context, l2 variant.Lock) error {
			tokens := map[string]int64{first: l1.Fence(), second: l2.Fence()}
			err := b.move(ctx, from, to, amount, tokens)
			committed = err == nil
			return err
		})
	})
	if committed {
		return nil // a lock that was lost after that has harmed nobody
	}
	return err
}

func (b *bank) key(account string) string { return b.prefix + "account:" + account }

// move is what is done under the locks.
func (b *bank) move(ctx context.Context, from, to string, amount int64, tokens map[string]int64) error {
	balances := map[string]int64{}
	err := inTx(ctx, b.db, func(tx *sql.Tx) (err error) {
		for id, token := range tokens {
			if balances[id], err = read(ctx, tx, id, token); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if balances[from] < amount {
		return fmt.Errorf("%q has %d: %w", from, balances[from], errFunds)
	}
	if err := b.work(ctx); err != nil {
		return err
	}
	balances[from] -= amount
	balances[to] += amount
	return inTx(ctx, b.db, func(tx *sql.Tx) error {
		for id, token := range tokens {
			if err := write(ctx, tx, id, token, balances[id]); err != nil {
				return err
			}
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO ledger (id, "from", "to", amount) VALUES ($1, $2, $3, $4)`, rand.Text(), from, to, amount)
		return err
	})
}

// read leaves its token with the balance, so that from now on no earlier holder writes it. With a plain SELECT, one
// that was stopped might write between this read and the write that follows from it, and its money would be gone.
func read(ctx context.Context, tx *sql.Tx, id string, token int64) (balance int64, err error) {
	err = tx.QueryRowContext(ctx, `UPDATE accounts SET fence = $1 WHERE id = $2 AND fence <= $1 RETURNING balance`, token, id).Scan(&balance)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, absent(ctx, tx, id)
	}
	return balance, err
}

func write(ctx context.Context, tx *sql.Tx, id string, token, balance int64) error {
	res, err := tx.ExecContext(ctx, `UPDATE accounts SET balance = $1, fence = $2 WHERE id = $3 AND fence <= $2`, balance, token, id)
	if err != nil {
		return err
	}
	n, err := res.RowsAffected()
	if err == nil && n == 0 {
		return absent(ctx, tx, id)
	}
	return err
}

// absent says why no row was touched.
func absent(ctx context.Context, tx *sql.Tx, id string) error {
	var found int
	err := tx.QueryRowContext(ctx, `SELECT 1 FROM accounts WHERE id = $1`, id).Scan(&found)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return fmt.Errorf("%q: %w", id, errNoAccount)
	case err != nil:
		return err
	}
	return fmt.Errorf("account %q: %w", id, errOvertaken)
}
