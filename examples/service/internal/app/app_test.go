package app

import (
	"context"
	"database/sql"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9/logging"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	logging.Disable()
	goleak.VerifyTestMain(m)
}

// world is what the processes of a test share: servers, an origin, a database.
type world struct {
	t      *testing.T
	nodes  []*redistest.Server
	cache  *redistest.Server
	origin *fakeOrigin
	db     string
}

// newWorld makes one, for a test that is run in parallel with others: it waits, most of the time.
func newWorld(t *testing.T, nodes int) *world {
	t.Helper()
	t.Parallel()
	w := &world{t: t, origin: newFakeOrigin(t), db: filepath.Join(t.TempDir(), "bank.db")}
	for range nodes {
		w.nodes = append(w.nodes, redistest.StartServer(t))
	}
	w.cache = redistest.StartServer(t)
	return w
}

// process is one App that runs in the test's process.
type process struct {
	*App
	t    *testing.T
	stop context.CancelFunc
	done chan error
	once sync.Once
}

// start starts a process with flags of its own, and waits until it is healthy. It is shut down with the test.
func (w *world) start(name string, args ...string) *process {
	w.t.Helper()
	var nodes []string
	for _, n := range w.nodes {
		nodes = append(nodes, "redis://"+n.Addr())
	}
	flags := flag.NewFlagSet(name, flag.PanicOnError)
	cfg := Flags(flags)
	common := []string{
		"-addr", "127.0.0.1:0", "-name", name, "-drain", "0", "-admin",
		"-redis", strings.Join(nodes, ","), "-cache", "redis://" + w.cache.Addr(), "-db", w.db,
		"-origin", w.origin.URL, "-origin-token", goodToken,
		"-node-timeout", "10s", // the machine may be busy
	}
	if err := flags.Parse(append(common, args...)); err != nil {
		w.t.Fatal(err)
	}
	a, err := Open(w.t.Context(), *cfg, testLog(w.t, name))
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	p := &process{App: a, t: w.t, stop: stop, done: make(chan error, 1)}
	go func() { p.done <- a.Run(ctx) }()
	w.t.Cleanup(p.shutDown)
	redistest.Eventually(w.t, patience, "a healthy process", func() bool {
		status, _ := p.get("/healthz")
		return status == http.StatusOK
	})
	return p
}

// two starts p1 and p2.
func (w *world) two(args ...string) []*process {
	w.t.Helper()
	return []*process{w.start("p1", args...), w.start("p2", args...)}
}

func testLog(t *testing.T, name string) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), nil)).With("process", name)
}

// shutDown is a graceful one, as by SIGTERM.
func (p *process) shutDown() {
	p.once.Do(func() {
		p.stop()
		if err := <-p.done; err != nil {
			p.t.Errorf("shutdown: %v", err)
		}
	})
}

func (p *process) get(path string) (int, string)  { return p.do(http.MethodGet, path) }
func (p *process) post(path string) (int, string) { return p.do(http.MethodPost, path) }

func (p *process) stats() (s Stats) {
	p.t.Helper()
	if _, body := p.get("/stats"); json.Unmarshal([]byte(body), &s) != nil {
		p.t.Fatalf("/stats: %q", body)
	}
	return s
}

func (p *process) do(method, path string) (status int, body string) {
	req, err := http.NewRequest(method, "http://"+p.Addr()+path, nil)
	if err != nil {
		p.t.Fatal(err)
	}
	resp, err := httpClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(b)
}

// patience is how long a test waits for what must happen.
const patience = time.Minute

// httpClient keeps no connection: none is left when a test ends.
var httpClient = &http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true}}

const goodToken = "let-me-in"

// fakeOrigin counts loads by key.
type fakeOrigin struct {
	*httptest.Server
	mu      sync.Mutex // guards all below
	loads   map[string]int
	fails   bool
	takes   time.Duration
	version int           // of all values
	holds   chan struct{} // loads of version 0 wait until it is closed
	missing map[string]bool
}

func newFakeOrigin(t *testing.T) *fakeOrigin {
	o := &fakeOrigin{loads: map[string]int{}, takes: 20 * time.Millisecond}
	o.Server = httptest.NewServer(o)
	t.Cleanup(o.Close)
	return o
}

func (o *fakeOrigin) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	key := strings.TrimPrefix(r.URL.Path, "/load/")
	o.mu.Lock()
	o.loads[key]++
	fails, takes, version, missing := o.fails, o.takes, o.version, o.missing[key]
	holds := o.holds
	o.mu.Unlock()
	time.Sleep(takes)
	if holds != nil && version == 0 {
		<-holds
	}
	switch {
	case r.Header.Get("Authorization") != "Bearer "+goodToken:
		http.Error(w, "who are you?", http.StatusUnauthorized)
	case fails:
		http.Error(w, "not today", http.StatusInternalServerError)
	case missing:
		http.NotFound(w, r)
	case version > 0:
		fmt.Fprintf(w, "value %d of %s", version, key)
	default:
		fmt.Fprintf(w, "value of %s", key)
	}
}

func (o *fakeOrigin) set(change func(o *fakeOrigin)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	change(o)
}

// counted gives all loads.
func (o *fakeOrigin) counted() (loads map[string]int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	loads = map[string]int{}
	for k, n := range o.loads {
		loads[k] = n
	}
	return loads
}

// together calls f n times at once.
func together(n int, f func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

// readBank gives all balances, and what the ledger says has been moved.
func readBank(t *testing.T, db *sql.DB) (balances, ledger map[string]int64) {
	t.Helper()
	sums := func(query string) map[string]int64 {
		m := map[string]int64{}
		each(t, db, query, func(scan func(...any) error) error {
			var id string
			var n int64
			err := scan(&id, &n)
			m[id] += n
			return err
		})
		return m
	}
	return sums(`SELECT id, balance FROM accounts`),
		sums(`SELECT "from", -amount FROM ledger UNION ALL SELECT "to", amount FROM ledger`)
}

// reconcile holds the balances against the ledger, and the ledger against what clients were told.
func (w *world) reconcile(p *process, paid int64) {
	w.t.Helper()
	balances, ledger := readBank(w.t, p.db)
	for id, balance := range balances {
		if balance != 1_000_000+ledger[id] {
			w.t.Errorf("%s has %d, and %d by the ledger", id, balance, 1_000_000+ledger[id])
		}
	}
	n := int64(0)
	each(w.t, p.db, `SELECT count(*) FROM ledger`, func(scan func(...any) error) error { return scan(&n) })
	if n != paid {
		w.t.Errorf("%d transfers in the ledger, %d were answered", n, paid)
	}
}

// ticks are those that were started, in their order.
func (w *world) ticks(p *process) (ticks []int64) {
	w.t.Helper()
	each(w.t, p.db, `SELECT tick FROM runs ORDER BY tick`, func(scan func(...any) error) error {
		var tick int64
		err := scan(&tick)
		ticks = append(ticks, tick)
		return err
	})
	return ticks
}

// span is a time for which a process led.
type span struct {
	process            string
	fence, from, until int64
}

func (w *world) leaders(p *process) (spans []span) {
	w.t.Helper()
	query := `SELECT process, fence, from_ns, until_ns FROM leaders ORDER BY rowid`
	each(w.t, p.db, query, func(scan func(...any) error) error {
		var s span
		err := scan(&s.process, &s.fence, &s.from, &s.until)
		spans = append(spans, s)
		return err
	})
	return spans
}

// each reads the rows of a query.
func each(t *testing.T, db *sql.DB, query string, row func(scan func(...any) error) error) {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), query)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := row(rows.Scan); err != nil {
			t.Fatal(err)
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
}
