package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/histogram"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// stage is all that one variant plays on: servers, an origin, processes with a balancer before them, callers,
// and the database that they write to. One goroutine uses it, but for the callers.
type stage struct {
	cfg     Config
	variant string
	dir     string // of the database and the logs
	prefix  string // of all keys in Redis
	servers *servers
	origin  *origin
	procs   []*process
	b       *balancer
	callers *callers
	mix     *mix
	records *records
	rows    []Row

	paid  int64 // transfers answered 200, since the beginning
	books books // after the last phase
	mark  int64 // paid, then
}

// originToken are the origin's credentials.
const originToken = "letmein"

// maxFlying is how many calls may be under way. It bounds the demo's memory when nothing is answered.
const maxFlying = 8_000

func newStage(ctx context.Context, cfg Config, variant string) (_ *stage, err error) {
	s := &stage{
		cfg: cfg, variant: variant, prefix: fmt.Sprintf("demo:%x:%s:", cfg.seed, variant),
		mix: newMix(cfg.Keys, accounts, cfg.seed),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.dir, err = os.MkdirTemp("", "flightlock-demo-"); err != nil {
		return nil, err
	}
	if s.servers, err = startServers(cfg.redisURLs, cfg.Cache); err != nil {
		return nil, err
	}
	if s.origin, err = startOrigin(originToken, cfg.Latency, freshFor-freshFor/10); err != nil {
		return nil, err
	}
	if err := s.startProcesses(ctx); err != nil {
		return nil, err
	}
	if s.records, err = openRecords(s.database()); err != nil {
		return nil, err
	}
	s.callers = &callers{b: s.b, rate: cfg.Rate, limit: maxFlying}
	s.books, err = s.records.readBooks(ctx)
	return s, err
}

func (s *stage) database() string { return filepath.Join(s.dir, "bank.db") }

// startProcesses starts all of them at once and waits until they are ready.
func (s *stage) startProcesses(ctx context.Context) error {
	var names, urls []string
	for i := range s.cfg.Procs {
		p, err := s.newProcess(fmt.Sprintf("p%d", i+1))
		if err != nil {
			return err
		}
		s.procs = append(s.procs, p)
		names, urls = append(names, p.name), append(urls, p.url())
		if err := p.start(); err != nil {
			return err
		}
	}
	for _, p := range s.procs {
		if err := p.ready(ctx); err != nil {
			return err
		}
	}
	s.b = newBalancer(names, urls)
	return nil
}

func (s *stage) newProcess(name string) (*process, error) {
	dir := s.dir
	if s.cfg.Logs != "" {
		dir = s.cfg.Logs
	}
	log, err := os.OpenFile(filepath.Join(dir, s.variant+"-"+name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND,
		0o600)
	if err != nil {
		return nil, err
	}
	addr, release, err := redistest.ReserveAddr()
	if err != nil {
		return nil, errors.Join(err, log.Close())
	}
	return &process{
		name: name, addr: addr, release: release, exe: s.cfg.Exe, env: s.cfg.Env, log: log,
		args: []string{
			"-addr", addr, "-name", name, "-admin",
			"-redis", strings.Join(s.servers.nodeURLs, ","), "-cache", s.servers.cacheURL,
			"-origin", s.origin.url, "-origin-token", originToken, "-db", s.database(), "-with", s.variant,
			"-fresh", freshFor.String(), "-prefix", s.prefix, "-accounts", fmt.Sprint(accounts),
		},
	}, nil
}

// processorTime is for how long processors have been busy so far, with whom.
type processorTime struct{ demo, service, servers time.Duration }

func (p processorTime) minus(o processorTime) processorTime {
	return processorTime{p.demo - o.demo, p.service - o.service, p.servers - o.servers}
}

func (s *stage) processorTime() (p processorTime) {
	var pids []int
	for _, one := range s.procs {
		if pid := one.pid(); pid != 0 {
			pids = append(pids, pid)
		}
	}
	self, ended := ownTime() // processes of the service that have ended, but for a node that was killed
	return processorTime{self, ended + timeOf(pids), timeOf(s.servers.pids())}
}

// unlocked is how many loads without a lock each process has counted since it was started; 0 for one that
// does not say.
func (s *stage) unlocked() []uint64 {
	list := make([]uint64, len(s.procs))
	client := http.Client{Timeout: 2 * time.Second}
	for i, p := range s.procs {
		resp, err := client.Get(p.url() + "/stats")
		if err != nil {
			continue
		}
		var said struct{ Unlocked uint64 }
		if json.NewDecoder(resp.Body).Decode(&said) == nil {
			list[i] = said.Unlocked
		}
		resp.Body.Close()
	}
	client.CloseIdleConnections()
	return list
}

// everyProcess are the numbers of all processes.
func (s *stage) everyProcess() (all []int) {
	for i := range s.procs {
		all = append(all, i)
	}
	return all
}

// close ends everything, in the order of a careful operator: callers are gone by now, then processes, then
// servers.
func (s *stage) close() error {
	var errs []error
	if s.b != nil {
		s.b.close()
	}
	errs = append(errs, s.endProcesses())
	for _, p := range s.procs {
		errs = append(errs, p.close())
	}
	if s.records != nil {
		errs = append(errs, s.records.close())
	}
	if s.origin != nil {
		errs = append(errs, s.origin.close())
	}
	if s.servers != nil {
		errs = append(errs, s.servers.close())
	}
	return errors.Join(append(errs, os.RemoveAll(s.dir))...)
}

// endProcesses tells all to end, at once. One that does not end well is an error with the end of its log.
func (s *stage) endProcesses() error {
	ended := make(chan error, len(s.procs))
	for _, p := range s.procs {
		go func() { ended <- s.withLog(p, p.end()) }()
	}
	var errs []error
	for range s.procs {
		errs = append(errs, <-ended)
	}
	return errors.Join(errs...)
}

// withLog adds the end of a process's log to an error of it.
func (s *stage) withLog(p *process, err error) error {
	if err == nil {
		return nil
	}
	data, rerr := os.ReadFile(p.log.Name())
	if rerr != nil {
		return errors.Join(err, rerr)
	}
	return fmt.Errorf("%w; the end of its log:\n%s", err, data[max(0, len(data)-4000):])
}

// play plays a phase: callers come for as long as it is meant to last, or longer if what happens in it does.
// Then the calls under way are answered, and the stage comes to rest before the next phase; errors until then
// are not this phase's, but updates lost are.
func (s *stage) play(ctx context.Context, p phase, number, of int) (Row, error) {
	row := Row{Phase: p.name, Variant: s.variant, weather: p.weather}
	if p.own && !s.servers.own() {
		row.Skipped = "would stop or flush servers of -redis"
		return row, nil
	}
	if number == 1 && p.load == nil {
		s.quiet(ctx, 2*time.Second) // warm
	}
	saw := &seen{}
	before, unlocked := s.origin.snapshot(), s.unlocked()
	s.origin.takeSurplus()
	busy := s.processorTime()
	trips, stopTrips := watchRoundTrips(ctx, s.servers.cacheURL)
	nodes, stopNodes := s.watchNodes(ctx)
	row.From = time.Now()
	stopLine := s.showProgress(p.name, number, of, saw, row.From)

	err := s.load(ctx, p, saw)

	stopLine()
	row.Until = time.Now()
	stopTrips()
	stopNodes()
	row.NodesMax = longestOfTheMiddle(nodes)
	busy = s.processorTime().minus(busy)
	row.measure(saw, trips, s.origin.snapshot().minus(before))
	for i, n := range s.unlocked() {
		if n < unlocked[i] { // it has been started again
			unlocked[i] = 0
		}
		row.Unlocked += n - unlocked[i]
	}
	row.Surplus = s.origin.takeSurplus()
	if busy.servers < 0 { // a node was killed, and is among those that have ended
		busy.service, busy.servers = busy.service+busy.servers, 0
	}
	all := float64(row.Until.Sub(row.From)) * float64(runtime.NumCPU())
	row.CPU = Processors{float64(busy.demo) / all, float64(busy.service) / all, float64(busy.servers) / all}
	s.paid += saw.paid.Load()
	row.Errors, row.OfBroken = saw.errorsByKind(p.broken)
	if err != nil {
		return row, err
	}
	row.Recovery = s.rest(ctx)
	if p.fails && s.variant == "flightlock" {
		// A Fetcher keeps the error of a key for a second at first (Options.ErrorHold), and for about as
		// long again as the key's loads have failed: the next phase is not to see it.
		pause(ctx, s.seconds(broken)+time.Second)
	}
	if p.weather&kept == 0 || row.slow() { // what was loaded in it may be in the cache or not
		s.origin.cacheFlushed()
	}
	if err := s.count(ctx, &row); err != nil {
		return row, err
	}
	s.cfg.Logf("%s", row.line(number, of))
	if s.variant == "flightlock" && p.weather&kept != 0 {
		for _, line := range row.Surplus[:min(3, len(row.Surplus))] {
			s.cfg.Logf("    surplus: %s", line)
		}
	}
	return row, ctx.Err()
}

// load has callers come while the phase happens.
func (s *stage) load(ctx context.Context, p phase, saw *seen) error {
	callersCtx, stop := context.WithCancel(ctx)
	defer stop()
	happened := make(chan error, 1)
	go func() {
		atLeast := time.After(s.seconds(1))
		err := p.happen(ctx, s, saw)
		if p.load == nil {
			select {
			case <-atLeast:
			case <-ctx.Done():
			}
			stop()
		}
		happened <- err
	}()
	c, next, limit := s.callers, s.mix.next, 0
	if p.load != nil {
		next, limit, c.rate = p.load(s)
		defer func() { c.rate = s.cfg.Rate }()
	}
	c.run(callersCtx, next, limit, saw)
	return <-happened
}

// seconds are so many lengths of a phase.
func (s *stage) seconds(n float64) time.Duration {
	return time.Duration(n * s.cfg.Seconds * float64(time.Second))
}

// quiet has callers come for a while whom nobody counts, but for what they paid.
func (s *stage) quiet(ctx context.Context, d time.Duration) (errs map[string]int) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	var saw seen
	s.callers.run(ctx, s.mix.next, 0, &saw)
	s.paid += saw.paid.Load()
	errs, _ = saw.errorsByKind("")
	return errs
}

// rest waits until callers see no errors any more, at most 15 s, and returns how long that took.
func (s *stage) rest(ctx context.Context) time.Duration {
	began := time.Now()
	for time.Since(began) < 15*time.Second && ctx.Err() == nil {
		round := time.Now()
		if len(s.quiet(ctx, 400*time.Millisecond)) == 0 {
			return round.Sub(began)
		}
	}
	return time.Since(began)
}

// count looks what has become of the money since the last phase. No call is under way.
func (s *stage) count(ctx context.Context, row *Row) error {
	now, err := s.records.readBooks(ctx)
	if err != nil {
		return err
	}
	row.MoneyLost = moneyLost(s.books, now)
	row.Unpaid = max(0, (s.paid-s.mark)-(now.entries-s.books.entries))
	s.books, s.mark = now, s.paid
	return nil
}

// audit looks, after the last phase, at the ticks and the leaders of every phase. A tick and a leader between
// two phases count for the earlier one.
func (s *stage) audit(ctx context.Context) error {
	var played []*Row // in order
	for i := range s.rows {
		if s.rows[i].Skipped == "" {
			played = append(played, &s.rows[i])
		}
	}
	if len(played) == 0 {
		return nil
	}
	pause(ctx, 1200*time.Millisecond) // the last ticks may be late
	if err := s.endProcesses(); err != nil {
		return err
	}
	for i, row := range played {
		end := row.Until
		if i+1 < len(played) {
			end = played[i+1].From
		}
		first := row.From.Unix() + 1
		if i == 0 {
			first++ // until everybody is there
		}
		var err error
		if row.Twice, row.Never, err = s.records.ticks(ctx, first, end.Unix()+btoi(i+1 < len(played))); err != nil {
			return err
		}
		spans, err := s.records.leaders(ctx, row.From, end)
		if err != nil {
			return err
		}
		row.Leaders, row.Leaderless = leadersAtOnce(spans), leaderless(spans, row.From, end)
	}
	return nil
}

func btoi(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// watchNodes measures round trips to each node until stop.
func (s *stage) watchNodes(ctx context.Context) (nodes []*histogram.Histogram, stop func()) {
	var stops []func()
	for _, u := range s.servers.nodeURLs {
		h, stop := watchRoundTrips(ctx, u)
		nodes, stops = append(nodes, h), append(stops, stop)
	}
	return nodes, func() {
		for _, stop := range stops {
			stop()
		}
	}
}

// longestOfTheMiddle is the longest round trip to the node that is neither among the faster nor among the
// slower half: a majority has answered within that time.
func longestOfTheMiddle(nodes []*histogram.Histogram) time.Duration {
	all := make([]time.Duration, len(nodes))
	for i, h := range nodes {
		all[i] = h.Max()
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// watchRoundTrips measures round trips to a server until stop.
func watchRoundTrips(ctx context.Context, u string) (h *histogram.Histogram, stop func()) {
	h = &histogram.Histogram{}
	o, err := redis.ParseURL(u)
	if err != nil {
		return h, func() {}
	}
	o.MaxRetries = -1
	c := redis.NewClient(o)
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := 0; !pause(ctx, 10*time.Millisecond); n++ {
			began := time.Now()
			if c.Ping(ctx).Err() == nil && n > 0 {
				h.Record(time.Since(began))
			}
		}
	}()
	return h, func() { cancel(); c.Close(); <-done }
}

// showProgress keeps a line on the screen until stop.
func (s *stage) showProgress(name string, number, of int, saw *seen, from time.Time) (stop func()) {
	if s.cfg.progress == nil {
		return func() {}
	}
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(500 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				s.cfg.progress("")
				return
			case <-tick.C:
			}
			errs, _ := saw.errorsByKind("")
			took := time.Since(from)
			n := saw.reads.Count() + saw.transfers.Count()
			s.cfg.progress(fmt.Sprintf("%-12s %2d/%d %-22s %5.1fs %6.0f req/s  p99 %-8s %s", s.variant, number, of,
				name, took.Seconds(), float64(n)/took.Seconds(), duration(saw.reads.Quantile(0.99)), errorText(errs)))
		}
	}()
	return func() { close(quit); <-done }
}
