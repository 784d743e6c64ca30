package demo

import (
	"database/sql"
	"path/filepath"
	"testing"
	"time"
)

// testDatabase is the database of a service that was written by hand.
func testDatabase(t *testing.T, statements ...string) *records {
	t.Helper()
	path := filepath.Join(t.TempDir(), "bank.db")
	db, err := sql.Open("sqlite", "file:"+path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for _, s := range append([]string{
		`CREATE TABLE accounts (id TEXT PRIMARY KEY, balance INTEGER, fence INTEGER)`,
		`CREATE TABLE ledger (id TEXT, "from" TEXT, "to" TEXT, amount INTEGER)`,
		`CREATE TABLE runs (tick INTEGER, process TEXT, fence INTEGER, at INTEGER)`,
		`CREATE TABLE leaders (process TEXT, fence INTEGER, from_ns INTEGER, until_ns INTEGER)`,
		`INSERT INTO accounts VALUES ('a', 100, 0), ('b', 100, 0), ('c', 100, 0)`,
	}, statements...) {
		if _, err := db.Exec(s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
	r, err := openRecords(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.close() })
	return r
}

func mustBooks(t *testing.T, r *records) books {
	t.Helper()
	b, err := r.readBooks(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Two transfers from a, of 10 and of 5, of which the second has overwritten what the first has done to a: the
// money is there twice.
func TestALostUpdateIsCounted(t *testing.T) {
	before := mustBooks(t, testDatabase(t))
	both := `INSERT INTO ledger VALUES ('1', 'a', 'b', 10), ('2', 'a', 'c', 5)`
	after := mustBooks(t, testDatabase(t, both,
		`UPDATE accounts SET balance = 95 WHERE id = 'a'`,
		`UPDATE accounts SET balance = 110 WHERE id = 'b'`,
		`UPDATE accounts SET balance = 105 WHERE id = 'c'`))
	if lost := moneyLost(before, after); lost != 10 {
		t.Errorf("%d, want 10", lost)
	}
	if after.entries != 2 {
		t.Errorf("%d entries", after.entries)
	}
	well := mustBooks(t, testDatabase(t, both,
		`UPDATE accounts SET balance = 85 WHERE id = 'a'`,
		`UPDATE accounts SET balance = 110 WHERE id = 'b'`,
		`UPDATE accounts SET balance = 105 WHERE id = 'c'`))
	if lost := moneyLost(before, well); lost != 0 {
		t.Errorf("%d, but nothing is lost", lost)
	}
	// Lost updates that cancel each other out in the sum of all balances.
	swapped := mustBooks(t, testDatabase(t,
		`UPDATE accounts SET balance = 90 WHERE id = 'a'`,
		`UPDATE accounts SET balance = 110 WHERE id = 'b'`))
	if lost := moneyLost(before, swapped); lost != 20 {
		t.Errorf("%d, want 20", lost)
	}
}

// A transfer that was answered 200 and is not in the ledger is counted.
func TestATransferThatIsNotInTheLedgerIsCounted(t *testing.T) {
	r := testDatabase(t, `INSERT INTO ledger VALUES ('1', 'a', 'b', 0)`)
	s := &stage{records: r, paid: 3}
	var row Row
	if err := s.count(t.Context(), &row); err != nil {
		t.Fatal(err)
	}
	if row.Unpaid != 2 {
		t.Errorf("%d, want 2", row.Unpaid)
	}
	// More entries than answers are no loss: callers did not wait for them.
	s = &stage{records: r, paid: 0}
	row = Row{}
	if err := s.count(t.Context(), &row); err != nil || row.Unpaid != 0 {
		t.Error(row.Unpaid, err)
	}
}

func TestTicksTwiceAndNotAtAllAreCounted(t *testing.T) {
	r := testDatabase(t, `INSERT INTO runs VALUES
		(10, 'p1', 1, 0), (11, 'p1', 2, 0), (11, 'p2', 3, 0), (13, 'p2', 4, 0), (20, 'p1', 5, 0), (20, 'p1', 5, 0)`)
	twice, never, err := r.ticks(t.Context(), 10, 15)
	if err != nil || twice != 1 || never != 2 { // 11; 12 and 14
		t.Error(twice, never, err)
	}
	if twice, never, err = r.ticks(t.Context(), 10, 11); err != nil || twice != 0 || never != 0 {
		t.Error(twice, never, err)
	}
}

func TestLeadersAtOnceAreCounted(t *testing.T) {
	r := testDatabase(t, `INSERT INTO leaders VALUES
		('p1', 1, 1000, 2000), ('p2', 2, 1999, 3000), ('p3', 3, 3001, 4000), ('p1', 4, 4100, 4000)`)
	for _, c := range []struct{ from, until, want int64 }{
		{0, 9000, 2}, {1500, 1600, 1}, {1500, 2500, 2}, {3001, 9000, 1}, {3500, 3600, 1}, {5000, 6000, 0},
	} {
		spans, err := r.leaders(t.Context(), time.Unix(0, c.from), time.Unix(0, c.until))
		if err != nil {
			t.Fatal(err)
		}
		if got := leadersAtOnce(spans); int64(got) != c.want {
			t.Errorf("%d to %d: %d leaders, want %d", c.from, c.until, got, c.want)
		}
	}
	spans, err := r.leaders(t.Context(), time.Unix(0, 500), time.Unix(0, 9000))
	if err != nil {
		t.Fatal(err)
	}
	if got := leaderless(spans, time.Unix(0, 500), time.Unix(0, 9000)); got != 5000 {
		t.Errorf("without a leader for %d, want 5000: 4000 to 9000", got) // the one at 4100 led for no time
	}
}
