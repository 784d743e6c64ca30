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

var (
	errNoAccount = errors.New("no such account")
	errFunds     = errors.New("not enough on the account")
	// errOvertaken reports that a later holder of the lock has read or written the row. Nothing
	// was changed, and the caller may try again.
	errOvertaken = errors.New("overtaken by a later lock holder")
)

// accountTTL is how long an account stays locked when a process is killed in a transfer.
const accountTTL = 5 * time.Second

// bank moves money between accounts. It reads balances in one transaction, works, and writes them
// in another, so each account has a lock. The lock keeps other processes away. The fencing token,
// compared in SQL, stops a process that was paused and has lost its lock without knowing.
//
// A transfer that needs no work in between needs no lock either: one transaction can read and
// write. And a client that got no answer cannot know whether its transfer was done: a real bank has
// it send an id, with which the ledger recognizes the second request.
type bank struct {
	db     *sql.DB
	locks  variant.Locker
	prefix string
	work   func(ctx context.Context) error
}

// newBank creates those of the n accounts that are missing. work runs between reading and writing.
func newBank(ctx context.Context, db *sql.DB, locks variant.Locker, prefix string, n int,
	work func(context.Context) error) (*bank, error) {
	err := inTx(ctx, db, func(tx *sql.Tx) error {
		for i := range n {
			_, err := tx.ExecContext(ctx,
				`INSERT OR IGNORE INTO accounts (id, balance) VALUES ($1, $2)`,
				fmt.Sprintf("a%d", i), 1_000_000)
			if err != nil {
				return err
			}
		}
		return nil
	})
	return &bank{db: db, locks: locks, prefix: prefix, work: work}, err
}

// transfer locks both accounts, in the order of their names: if two transfers each held the lock
// that the other one wants, both would wait until their deadlines.
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
		return nil // also when a lock was lost since: the tokens had been compared by then
	}
	return err
}

func (b *bank) key(account string) string { return b.prefix + "account:" + account }

// move transfers under the locks. Each row is read and written with the token of its own lock:
// tokens of different locks cannot be compared.
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
		_, err := tx.ExecContext(ctx,
			`INSERT INTO ledger (id, "from", "to", amount) VALUES ($1, $2, $3, $4)`,
			rand.Text(), from, to, amount)
		return err
	})
}

// read writes its token to the row, so that no earlier lock holder can write the row from then on.
// After a plain SELECT, an earlier holder that was paused could still write before this one does,
// and its transfer would be lost.
func read(ctx context.Context, tx *sql.Tx, id string, token int64) (balance int64, err error) {
	err = tx.QueryRowContext(ctx,
		`UPDATE accounts SET fence = $1 WHERE id = $2 AND fence <= $1 RETURNING balance`,
		token, id).Scan(&balance)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, absent(ctx, tx, id)
	}
	return balance, err
}

// write changes the row unless it has a larger token.
func write(ctx context.Context, tx *sql.Tx, id string, token, balance int64) error {
	ok, err := affected(tx.ExecContext(ctx,
		`UPDATE accounts SET balance = $1, fence = $2 WHERE id = $3 AND fence <= $2`,
		balance, token, id))
	if err == nil && !ok {
		return absent(ctx, tx, id)
	}
	return err
}

// absent says why an UPDATE found no row.
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
