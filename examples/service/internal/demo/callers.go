package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/flightlock/flightlock/internal/histogram"
)

// This file is the load: callers who come at a fixed rate, however long the answers take (an open loop). A
// latency counts from when its request was due, so that a service that stands still for a second is charged
// with all who came in that second, and not with one.

// call is one request that is due.
type call struct {
	kind callKind
	hot  bool // for one of the hottest keys
	path string
}

type callKind uint8

const (
	itemCall callKind = iota
	pageCall
	transferCall
)

// mix says who asks for what: most of all /item, some /page, a few transfers. Keys are drawn by Zipf's law,
// the hottest with some tenth of all calls.
type mix struct {
	accounts int
	rnd      *rand.Rand
	items    *rand.Zipf
	pages    *rand.Zipf
}

const (
	zipfS    = 1.1
	hotKeys  = 20 // the hottest so many keys count as hot
	allPages = 200
	// Of a thousand calls.
	pageShare     = 80
	transferShare = 20
)

func newMix(items, accounts int, seed uint64) *mix {
	rnd := rand.New(rand.NewPCG(seed, seed))
	return &mix{accounts: accounts, rnd: rnd,
		items: rand.NewZipf(rnd, zipfS, 1, uint64(items-1)), pages: rand.NewZipf(rnd, zipfS, 1, allPages-1)}
}

// next draws a call. One goroutine calls it.
func (m *mix) next() call {
	switch n := m.rnd.IntN(1000); {
	case n < transferShare:
		from := m.rnd.IntN(m.accounts)
		to := (from + 1 + m.rnd.IntN(m.accounts-1)) % m.accounts
		path := fmt.Sprintf("/transfer?from=%s&to=%s&amount=%d", account(from), account(to), 1+m.rnd.IntN(9))
		return call{kind: transferCall, path: path}
	case n < transferShare+pageShare:
		return call{kind: pageCall, path: fmt.Sprintf("/page/%d", m.pages.Uint64())}
	default:
		key := m.items.Uint64()
		return call{kind: itemCall, hot: key < hotKeys, path: fmt.Sprintf("/item/%d", key)}
	}
}

// eachTwice asks for every one of so many keys twice, in a random order with the two together: a cold start
// in which nobody's value has been loaded.
func eachTwice(items int, seed uint64) func() call {
	order := rand.New(rand.NewPCG(seed, seed)).Perm(items)
	i := 0
	return func() call {
		key := order[i/2%items]
		i++
		return call{kind: itemCall, path: fmt.Sprintf("/item/%d", key)}
	}
}

// accounts is how many there are, so that transfers meet now and then.
const accounts = 20

// account is the name of account i.
func account(i int) string { return fmt.Sprintf("a%d", i) }

// seen is what callers saw.
type seen struct {
	reads     histogram.Histogram // /item and /page
	items     histogram.Histogram // /item alone
	pages     histogram.Histogram // /page alone
	transfers histogram.Histogram
	hotLate   histogram.Histogram // hot keys asked for between hotFrom and hotUntil
	hotFrom   atomic.Int64        // unix nanoseconds; 0: none
	hotUntil  atomic.Int64
	paid      atomic.Int64 // transfers answered 200

	mu     sync.Mutex // guards errors
	errors map[errorOf]int
}

// errorOf names errors that are counted together.
type errorOf struct {
	kind    string // "502", "refused", "reset", "timeout"..., or "transfer 502"
	process string
}

func (s *seen) fail(kind, process string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.errors == nil {
		s.errors = map[errorOf]int{}
	}
	s.errors[errorOf{kind, process}]++
}

// errorsByKind adds up errors: of all processes but one, and of that one.
func (s *seen) errorsByKind(one string) (others, its map[string]int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	others, its = map[string]int{}, map[string]int{}
	for e, n := range s.errors {
		if e.process == one && one != "" {
			its[e.kind] += n
		} else {
			others[e.kind] += n
		}
	}
	return others, its
}

// errorText lists errors by kind.
func errorText(kinds map[string]int) string {
	var parts []string
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		parts = append(parts, fmt.Sprintf("%s: %d", kind, kinds[kind]))
	}
	return strings.Join(parts, ", ")
}

// callers come at a rate.
type callers struct {
	b       *balancer
	rate    int
	limit   int64 // of calls under way: more are not sent, and counted as errors
	flying  atomic.Int64
	pending sync.WaitGroup
}

// run has callers come until ctx ends or limit of them have come (0: no limit), and returns when all have
// their answer.
func (c *callers) run(ctx context.Context, next func() call, limit int, s *seen) (came int) {
	began := time.Now()
	for limit == 0 || came < limit {
		due := began.Add(time.Duration(float64(came) / float64(c.rate) * float64(time.Second)))
		if wait := time.Until(due); wait > 0 && pause(ctx, wait) || ctx.Err() != nil {
			break
		}
		came++
		one := next()
		if c.flying.Add(1) > c.limit {
			c.flying.Add(-1)
			s.fail("not sent", "")
			continue
		}
		c.pending.Go(func() {
			defer c.flying.Add(-1)
			c.call(one, due, s)
		})
	}
	c.pending.Wait()
	return came
}

// call makes one call. It has a deadline of its own: callers do not leave when their phase ends.
func (c *callers) call(one call, due time.Time, s *seen) {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	method := http.MethodGet
	if one.kind == transferCall {
		method = http.MethodPost
	}
	process, status, body, err := c.b.do(ctx, method, one.path)
	took := time.Since(due)
	s.record(one, due, took)
	if one.kind != transferCall && err == nil && status == http.StatusOK && body == "" {
		s.fail("empty answer", c.b.names[process])
	} else if kind := errorKind(status, err); kind != "" {
		if one.kind == transferCall {
			kind = "transfer " + kind
		}
		s.fail(kind, c.b.names[process])
	} else if one.kind == transferCall {
		s.paid.Add(1)
	}
}

// record counts the latency of a call.
func (s *seen) record(one call, due time.Time, took time.Duration) {
	switch one.kind {
	case transferCall:
		s.transfers.Record(took)
		return
	case pageCall:
		s.pages.Record(took)
	case itemCall:
		s.items.Record(took)
		if at := due.UnixNano(); one.hot && at >= s.hotFrom.Load() && at < s.hotUntil.Load() {
			s.hotLate.Record(took)
		}
	}
	s.reads.Record(took)
}

// errorKind names what went wrong, in a word; "" if nothing did.
func errorKind(status int, err error) string {
	switch {
	case err == nil && status == http.StatusOK:
		return ""
	case err == nil:
		return fmt.Sprint(status)
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE),
		errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "reset"
	default:
		return "network"
	}
}
