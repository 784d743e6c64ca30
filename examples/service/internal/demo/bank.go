package demo

import (
	"cmp"
	"context"
	"database/sql"
	"slices"
	"time"

	_ "modernc.org/sqlite" // the driver
)

// This file reads what the processes have written into their database, and finds what must not be there. It
// trusts nobody's counters.

// records reads the database of the service.
type records struct{ db *sql.DB }

func openRecords(path string) (*records, error) {
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=busy_timeout(5000)&_pragma=query_only(true)")
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(1)
	return &records{db}, nil
}

func (r *records) close() error { return r.db.Close() }

// books is the bank at a moment: by account, the balance, and what the ledger says that it should have
// changed by.
type books struct {
	balance map[string]int64
	ledger  map[string]int64
	entries int64 // in the ledger
}

// readBooks reads all of it in one transaction.
func (r *records) readBooks(ctx context.Context) (b books, err error) {
	b = books{balance: map[string]int64{}, ledger: map[string]int64{}}
	tx, err := r.db.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return b, err
	}
	defer tx.Rollback()
	if err := sums(ctx, tx, b.balance, `SELECT id, balance FROM accounts`); err != nil {
		return b, err
	}
	err = sums(ctx, tx, b.ledger, `SELECT "to", amount FROM ledger UNION ALL SELECT "from", -amount FROM ledger`)
	if err != nil {
		return b, err
	}
	err = tx.QueryRowContext(ctx, `SELECT count(*) FROM ledger`).Scan(&b.entries)
	return b, err
}

// sums adds up the second column of a query by the first.
func sums(ctx context.Context, tx *sql.Tx, into map[string]int64, query string) error {
	rows, err := tx.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var id string
		var n int64
		if err := rows.Scan(&id, &n); err != nil {
			return err
		}
		into[id] += n
	}
	return rows.Err()
}

// moneyLost compares two moments: by how much the balances have moved apart from what the ledger says, over
// all accounts. An update that was overwritten shows here, whoever gained by it.
func moneyLost(before, after books) (lost int64) {
	for id, balance := range after.balance {
		moved := balance - before.balance[id]
		said := after.ledger[id] - before.ledger[id]
		lost += max(moved-said, said-moved)
	}
	return lost
}

// A span is a stretch of time for which somebody says that it leads.
type span struct {
	process     string
	from, until int64 // unix nanoseconds
}

// leaders returns who says that it led at any time in [from, until].
func (r *records) leaders(ctx context.Context, from, until time.Time) ([]span, error) {
	rows, err := r.db.QueryContext(ctx,
		`SELECT process, from_ns, until_ns FROM leaders WHERE until_ns >= $1 AND from_ns <= $2`,
		from.UnixNano(), until.UnixNano())
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var spans []span
	for rows.Next() {
		var s span
		if err := rows.Scan(&s.process, &s.from, &s.until); err != nil {
			return nil, err
		}
		spans = append(spans, s)
	}
	return spans, rows.Err()
}

// leadersAtOnce is the largest number of spans that share a moment.
func leadersAtOnce(spans []span) (most int) {
	type edge struct {
		at    int64
		begin bool
	}
	var edges []edge
	for _, s := range spans {
		edges = append(edges, edge{s.from, true}, edge{max(s.from, s.until), false})
	}
	slices.SortFunc(edges, func(a, b edge) int {
		switch {
		case a.at != b.at:
			return cmp.Compare(a.at, b.at)
		case a.begin == b.begin:
			return 0
		case a.begin: // a span that begins where another ends shares that moment with it
			return -1
		default:
			return 1
		}
	})
	now := 0
	for _, e := range edges {
		if e.begin {
			now++
			most = max(most, now)
		} else {
			now--
		}
	}
	return most
}

// leaderless is the longest time in [from, until] in which nobody says that it leads.
func leaderless(spans []span, from, until time.Time) time.Duration {
	spans = slices.Clone(spans)
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.from, b.from) })
	last, longest := from.UnixNano(), int64(0)
	for _, s := range spans {
		longest = max(longest, s.from-last)
		last = max(last, s.until)
	}
	return time.Duration(max(longest, until.UnixNano()-last))
}

// ticks counts the ticks in [first, end) that were started more than once, and those that were not started.
func (r *records) ticks(ctx context.Context, first, end int64) (twice, never int, err error) {
	rows, err := r.db.QueryContext(ctx,
		`SELECT tick, count(*) FROM runs WHERE tick >= $1 AND tick < $2 GROUP BY tick`, first, end)
	if err != nil {
		return 0, 0, err
	}
	defer rows.Close()
	never = int(max(0, end-first))
	for rows.Next() {
		var tick int64
		var n int
		if err := rows.Scan(&tick, &n); err != nil {
			return 0, 0, err
		}
		never--
		if n > 1 {
			twice++
		}
	}
	return twice, never, rows.Err()
}
