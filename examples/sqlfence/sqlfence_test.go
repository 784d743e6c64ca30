package sqlfence

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/flightlock/flightlock"
	"github.com/redis/go-redis/v9"
	_ "modernc.org/sqlite"
)

func open(t *testing.T) (*sql.DB, *flightlock.Client) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "accounts.db")
	db, err := sql.Open("sqlite", "file:"+file+"?_pragma=busy_timeout(10000)&_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	if _, err := db.Exec(Schema); err != nil {
		t.Fatal(err)
	}
	m := miniredis.RunT(t)
	m.ClockTTL(true)
	rdb := redis.NewClient(&redis.Options{Addr: m.Addr()})
	t.Cleanup(func() { rdb.Close() })
	c, err := flightlock.New(flightlock.Options{NodeTimeout: 5 * time.Second}, rdb)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(context.Background()) })
	return db, c
}

// twoHolders gives the lock of a holder that was paused until its ttl had passed, and that
// of the holder after it.
func twoHolders(t *testing.T, c *flightlock.Client) (paused, current *flightlock.Lock) {
	t.Helper()
	paused, err := c.SingleFlightLock(t.Context(), "accounts", 20*time.Millisecond, nil)
	if err != nil {
		t.Fatal(err)
	}
	<-paused.Context(t.Context()).Done()
	current, err = c.SingleFlightLock(t.Context(), "accounts", time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = current.Release(context.Background()) }) // or Close would wait for it
	return paused, current
}

func balance(t *testing.T, db *sql.DB, id string) (b int64) {
	t.Helper()
	if err := db.QueryRow(`SELECT balance FROM accounts WHERE id = $1`, id).Scan(&b); err != nil {
		t.Fatal(err)
	}
	return b
}

// What a paused holder writes after its successor has no effect, by whichever statement.
func TestAPausedHolderChangesNothing(t *testing.T) {
	for name, write := range map[string]func(context.Context, *sql.DB, string, int64, *flightlock.Lock) error{
		"SetBalance": SetBalance, "SetBalanceAgain": SetBalanceAgain, "Upsert": Upsert,
		"Transfer": func(ctx context.Context, db *sql.DB, id string, n int64, l *flightlock.Lock) error {
			return Transfer(ctx, db, "other", id, n-balance(t, db, id), l)
		},
	} {
		t.Run(name, func(t *testing.T) {
			db, c := open(t)
			paused, current := twoHolders(t, c)
			if _, err := db.Exec(`INSERT INTO accounts (id, balance) VALUES ('a', 10), ('other', 1000)`); err != nil {
				t.Fatal(err)
			}
			if err := write(t.Context(), db, "a", 20, current); err != nil {
				t.Error(err)
			}
			if err := write(t.Context(), db, "a", 30, paused); !errors.Is(err, ErrStale) {
				t.Errorf("got %v", err)
			}
			if b := balance(t, db, "a"); b != 20 {
				t.Errorf("the balance is %d", b)
			}
			again := write(t.Context(), db, "a", 40, current)
			if want := name == "SetBalance"; errors.Is(again, ErrStale) != want {
				t.Errorf("a second write under the same lock: %v", again)
			}
		})
	}
}

// Upsert makes a row, and then obeys its token.
func TestUpsertMakesTheRow(t *testing.T) {
	db, c := open(t)
	paused, current := twoHolders(t, c)
	if err := Upsert(t.Context(), db, "new", 7, current); err != nil {
		t.Error(err)
	}
	if err := Upsert(t.Context(), db, "new", 8, paused); !errors.Is(err, ErrStale) ||
		balance(t, db, "new") != 7 {
		t.Errorf("got %v, %d", err, balance(t, db, "new"))
	}
}

// A transfer of which one half is refused changes nothing.
func TestTransferIsAllOrNothing(t *testing.T) {
	db, c := open(t)
	paused, current := twoHolders(t, c)
	if _, err := db.Exec(`INSERT INTO accounts (id, balance) VALUES ('a', 10), ('b', 10)`); err != nil {
		t.Fatal(err)
	}
	if err := SetBalance(t.Context(), db, "b", 50, current); err != nil {
		t.Fatal(err)
	}
	if err := Transfer(t.Context(), db, "a", "b", 5, paused); !errors.Is(err, ErrStale) {
		t.Errorf("got %v", err)
	}
	if a, b := balance(t, db, "a"), balance(t, db, "b"); a != 10 || b != 50 {
		t.Errorf("%d and %d", a, b)
	}
}

// Read, think, write under the lock, by many at once: no update is lost.
func TestNoUpdateIsLost(t *testing.T) {
	db, c := open(t)
	if _, err := db.Exec(`INSERT INTO accounts (id, balance) VALUES ('a', 0)`); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			err := c.Do(t.Context(), "accounts", 10*time.Second, nil,
				func(ctx context.Context, l *flightlock.Lock) error {
					b, err := Balance(ctx, db, "a", l)
					if err != nil {
						return err
					}
					return SetBalanceAgain(ctx, db, "a", b+1, l)
				})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if b := balance(t, db, "a"); b != 50 {
		t.Errorf("the balance is %d", b)
	}
}

// Read, think, write, by one who is paused before its write while the next one reads: what was acknowledged
// is not overwritten, by whichever of the two it was written.
func TestNobodyWritesBetweenReadAndWrite(t *testing.T) {
	db, c := open(t)
	paused, current := twoHolders(t, c)
	if _, err := db.Exec(`INSERT INTO accounts (id, balance) VALUES ('a', 10)`); err != nil {
		t.Fatal(err)
	}
	b, err := Balance(t.Context(), db, "a", current)
	if err != nil || b != 10 {
		t.Fatal(b, err)
	}
	want := int64(11)
	if err := SetBalance(t.Context(), db, "a", 15, paused); err == nil { // which has read 10, too
		want = 16
	} else if !errors.Is(err, ErrStale) {
		t.Error(err)
	}
	if err := SetBalanceAgain(t.Context(), db, "a", b+1, current); err != nil {
		t.Error(err)
	}
	if b := balance(t, db, "a"); b != want {
		t.Errorf("the balance is %d, but %d was acknowledged", b, want)
	}
}
