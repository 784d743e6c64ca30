package app

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/examples/service/internal/variant"
)

// Many transfers between few accounts, in two processes: none is lost, and none that was answered is missing.
func TestNoTransferIsLost(t *testing.T) {
	w := newWorld(t, 3)
	procs := w.two()
	var paid atomic.Int64
	together(60, func(i int) {
		status, body := procs[i%2].post(fmt.Sprintf("/transfer?from=a%d&to=a%d&amount=%d", i%3, (i+1)%3, 1+i))
		if status != http.StatusOK {
			t.Errorf("%d %q", status, body)
			return
		}
		paid.Add(1)
	})
	w.reconcile(procs[0], paid.Load())
}

// What cannot be transferred is refused, and changes nothing.
func TestTransfersThatAreRefused(t *testing.T) {
	w := newWorld(t, 1)
	p := w.start("p1")
	for query, want := range map[string]int{
		"from=a1&to=a1&amount=5":        http.StatusBadRequest,
		"from=a1&to=&amount=5":          http.StatusBadRequest,
		"from=a1&to=a2&amount=-5":       http.StatusBadRequest,
		"from=a1&to=a2":                 http.StatusBadRequest,
		"from=a1&to=nobody&amount=5":    http.StatusNotFound,
		"from=a1&to=a2&amount=90000000": http.StatusConflict,
	} {
		if status, body := p.post("/transfer?" + query); status != want {
			t.Errorf("%s: %d %q, want %d", query, status, body, want)
		}
	}
	w.reconcile(p, 0)
	w.nodes[0].Kill()
	if status, body := p.post("/transfer?from=a1&to=a2&amount=5"); status != http.StatusServiceUnavailable {
		t.Errorf("without a node: %d %q", status, body)
	}
	if s := p.stats(); s.Errors["nolock"] != 1 {
		t.Errorf("%+v", s)
	}
}

// A holder that was stopped between its read and its write, for so long that another has taken over, changes
// nothing: whether the other has written already, or has only read.
func TestAStoppedHolderMovesNoMoney(t *testing.T) {
	for name, stopsBefore := range map[string]func(other *bank) error{
		"the other has written": func(other *bank) error {
			return other.transfer(context.Background(), "a1", "a2", 50)
		},
		"the other has read": func(other *bank) error {
			other.work = func(context.Context) error { return errStopped }
			if err := other.transfer(context.Background(), "a1", "a2", 50); !errors.Is(err, errStopped) {
				return fmt.Errorf("the other: %w", err)
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			db, err := OpenDB(t.Context(), t.TempDir()+"/bank.db")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { db.Close() })
			tokens := &onlyTokens{}
			other, err := newBank(t.Context(), db, tokens, "", 3, think)
			if err != nil {
				t.Fatal(err)
			}
			stopped := &bank{db: db, locks: tokens, work: func(context.Context) error { return stopsBefore(other) }}
			if err := stopped.transfer(t.Context(), "a1", "a2", 7); !errors.Is(err, errOvertaken) {
				t.Errorf("got %v", err)
			}
			balances, ledger := readBank(t, db)
			if moved := balances["a2"] - 1_000_000; moved != ledger["a2"] || moved == 7 {
				t.Errorf("%d moved, the ledger says %d", moved, ledger["a2"])
			}
		})
	}
}

var errStopped = errors.New("stopped here")

// onlyTokens hands out rising tokens and excludes nobody, as for holders that do not know that they have lost
// their locks.
type onlyTokens struct {
	variant.Locker
	last atomic.Int64
}

type token int64

func (n token) Fence() int64 { return int64(n) }
func (token) Err() error     { return nil }

func (o *onlyTokens) Do(ctx context.Context, _ string, _ time.Duration,
	fn func(context.Context, variant.Lock) error) error {
	return fn(ctx, token(o.last.Add(1)))
}
