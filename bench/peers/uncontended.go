package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/progress"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// uncontended is the comparison of -uncontended, and what its flags say: one goroutine locks and releases a
// free key again and again, in short slices that alternate between flightlock, with Release and with
// ReleaseAsync, and redsync's two settings.
//
// Each has a client of its own, in one process and on the same servers. How fast a machine is changes from
// second to second by more than these differ, and it changes a slice and its neighbours alike; so what counts
// is the ratio of neighbouring slices. One bout after the other, as the other loads have it, cannot tell them
// apart.
type uncontended struct {
	on          bool
	nodes       []int
	slices      int
	slice       time.Duration
	busy        int           // processes that spin meanwhile
	every       time.Duration // from one lock to the next; 0: without a pause
	nodeTimeout time.Duration

	load string // average of the machine, before it began
}

// idleClients is how many clients share the heap that is measured, so that what the process needs anyway is
// little.
const idleClients = 50

func (u *uncontended) register(f *flag.FlagSet) {
	f.BoolVar(&u.on, "uncontended", false, "compare one goroutine without contention in alternating slices, "+
		"print a table for each number of nodes, and measure nothing else")
	u.nodes = []int{1, 3, 5}
	f.Func("nodes", "of -uncontended: numbers of nodes, separated by commas (default 1,3,5)",
		func(text string) error {
			u.nodes = nil
			for n := range strings.SplitSeq(text, ",") {
				v, err := strconv.Atoi(n)
				if err != nil || v < 1 || v > 64 {
					return errors.New("want numbers from 1 to 64")
				}
				u.nodes = append(u.nodes, v)
			}
			return nil
		})
	f.IntVar(&u.slices, "slices", 0, "of -uncontended: slices of each rival (default 60; 20 with -every)")
	f.DurationVar(&u.slice, "slice", 0, "of -uncontended: length of a slice (default 60ms; 10s with -every)")
	f.IntVar(&u.busy, "busy", 0, "of -uncontended: processes that spin meanwhile")
	f.DurationVar(&u.every, "every", 0, "of -uncontended: time from one lock to the next; "+
		"10 minutes for each number of nodes by default (default: no pause)")
	f.DurationVar(&u.nodeTimeout, "node-timeout", 50*time.Millisecond,
		"of -uncontended: flightlock's NodeTimeout")
}

// check fills in the defaults that depend on -every.
func (u *uncontended) check() error {
	if u.every > 0 {
		u.slices, u.slice = cmp.Or(u.slices, 20), cmp.Or(u.slice, 10*time.Second)
	}
	u.slices, u.slice = cmp.Or(u.slices, 60), cmp.Or(u.slice, 60*time.Millisecond)
	if u.slices < 1 || u.slice <= 0 || u.busy < 0 || u.every < 0 || u.nodeTimeout <= 0 {
		return errors.New("-slices, -slice and -node-timeout must be positive; -busy and -every not negative")
	}
	return nil
}

func (u uncontended) run(ctx context.Context, stdout io.Writer) error {
	u.load = loadAverage()
	busy, err := startSpinning(ctx, u.busy)
	if err != nil {
		return err
	}
	defer stopWorkers(busy)
	bar := progress.New(os.Stderr)
	bar.Start(time.Duration(len(u.nodes)) * u.expected())
	defer bar.Close()
	for _, nodes := range u.nodes {
		bar.Next(fmt.Sprintf("uncontended, nodes: %d", nodes), u.expected())
		if err := u.compare(ctx, nodes, stdout); err != nil {
			return cmp.Or(ctx.Err(), err)
		}
	}
	return nil
}

// expected is how long the slices on one number of nodes take.
func (u uncontended) expected() time.Duration {
	return time.Duration(u.slices*len(alternating)) * u.slice
}

// startSpinning starts n processes that spin until stopWorkers ends them.
func startSpinning(ctx context.Context, n int) ([]*worker, error) {
	workers, err := startIdle(n)
	if err != nil {
		return nil, err
	}
	if _, err = callAll(ctx, workers, request{Op: opSpin}); err != nil {
		stopWorkers(workers)
	}
	return workers, err
}

// contestant is one rival on one number of nodes. All per lock are of one slice each.
type contestant struct {
	rival
	settings settings
	l        locker

	rates    []float64 // locks per second of the time that locks and releases took
	client   []float64 // microseconds of processor time per lock, of this process
	server   []float64 // the same, of all servers
	sent     []float64 // commands per lock that the client sent
	executed []float64 // commands per lock that the servers executed, with those of scripts

	connections float64 // to each server, after the slices
	start       float64 // bytes sent to each server before the first lock was held
	heap        float64 // bytes of an idle client
	failures    int
	failure     error // the latest
}

// compare measures on servers that nobody else uses, and prints a table.
func (u uncontended) compare(ctx context.Context, nodes int, stdout io.Writer) (err error) {
	s, err := openSite(nodes)
	if err != nil {
		return err
	}
	defer s.close()
	env, err := readEnvironment(ctx, s, config{}) // before the load begins
	if err != nil {
		return err
	}
	var all []*contestant
	for _, name := range alternating {
		c, err := u.newContestant(ctx, s, name)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, c)
	}
	for _, c := range all {
		if c.l, err = c.open(c.settings); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		defer c.l.close() // a second time does nothing
		if err := once(ctx, c.l, c.name); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	for round := range u.slices {
		for i := range all { // another one begins in every round
			if err := u.measure(ctx, s, all[(i+round)%len(all)]); err != nil {
				return err
			}
		}
	}
	for _, c := range all {
		if err := c.countConnections(ctx, s); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(stdout, "%s\n\n%s\n", u.caption(env, nodes), table(all))
	return err
}

// newContestant opens and closes clients of their own for what does not depend on slices.
func (u uncontended) newContestant(ctx context.Context, s *site, name string) (*contestant, error) {
	r, err := rivalNamed(name)
	if err != nil {
		return nil, err
	}
	c := &contestant{rival: r, settings: settings{Addrs: s.addrs(bout{Nodes: len(s.servers)}), TTL: ttl,
		Delay: bestDelay(name, closed), NodeTimeout: u.nodeTimeout}}
	if err := c.measureStart(ctx, s); err != nil {
		return nil, err
	}
	return c, c.measureHeap(ctx)
}

func keyOf(rival string) string { return "uncontended:" + rival }

// once locks and releases the key of a rival, which nobody else wants.
func once(ctx context.Context, l locker, rival string) error {
	h, err := l.lock(ctx, keyOf(rival))
	if err != nil {
		return err
	}
	return h.release()
}

// measureStart counts what a new client sends to servers that have not seen its scripts.
func (c *contestant) measureStart(ctx context.Context, s *site) error {
	if err := s.each(func(_ int, rdb *redis.Client) error { return rdb.ScriptFlush(ctx).Err() }); err != nil {
		return err
	}
	first, err1 := s.usage(ctx)
	before, err2 := s.usage(ctx) // so own is what an INFO adds by itself
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	own := before.since(first, "total_net_input_bytes")
	l, err := c.open(c.settings)
	if err != nil {
		return err
	}
	defer l.close()
	h, err := l.lock(ctx, keyOf(c.name))
	if err != nil {
		return err
	}
	after, err := s.usage(ctx)
	c.start = (after.since(before, "total_net_input_bytes") - own) / float64(len(s.servers))
	return errors.Join(err, h.release())
}

// measureHeap has a process of its own do it: others' clients leave something behind for a while after they
// are closed.
func (c *contestant) measureHeap(ctx context.Context) error {
	w, err := startWorker()
	if err != nil {
		return err
	}
	defer stopWorkers([]*worker{w})
	rep, err := w.call(ctx, request{Op: opIdle, Task: &task{Rival: c.name, Settings: c.settings}})
	if err == nil {
		c.heap = rep.Result.Extra["heap"]
	}
	return err
}

// runIdle measures the heap of clients that have locked once, so that their connections are there.
func runIdle(t task) (*result, error) {
	r, err := rivalNamed(t.Rival)
	if err != nil {
		return nil, err
	}
	before := redistest.Heap()
	for range idleClients {
		l, err := r.open(t.Settings)
		if err != nil {
			return nil, err
		}
		defer l.close()
		if err := once(context.Background(), l, r.name); err != nil {
			return nil, err
		}
	}
	return &result{Extra: map[string]float64{"heap": float64(redistest.Heap()-before) / idleClients}}, nil
}

// measure has c lock for one slice. The garbage of the slice before is gone by then.
func (u uncontended) measure(ctx context.Context, s *site, c *contestant) error {
	runtime.GC()
	before, err := s.usage(ctx)
	if err != nil {
		return err
	}
	used, locks, spent := cpuTime(), 0.0, time.Duration(0)
	sliceCtx, cancel := context.WithCancel(ctx) // can be canceled, as that of a request can
	defer cancel()
	began := time.Now()
	for now := began; now.Sub(began) < u.slice && ctx.Err() == nil; now = time.Now() {
		if err := once(sliceCtx, c.l, c.name); err != nil {
			c.failures, c.failure = c.failures+1, err
		} else {
			locks++
		}
		spent += time.Since(now)
		if u.every > 0 {
			time.Sleep(time.Until(now.Add(u.every)))
		}
	}
	used = cpuTime() - used
	after, err := s.usage(ctx)
	if err != nil {
		return err
	}
	if locks == 0 {
		return fmt.Errorf("%s: no lock in %v: %w", c.name, u.slice, c.failure)
	}
	own := float64(len(s.servers)) // the INFO of before was counted after it had been answered
	sent, server := after.work(before, c.rival)
	sent += after.commands["info"] - before.commands["info"] - own
	executed := after.since(before, "total_commands_processed") - own
	c.rates = append(c.rates, locks/spent.Seconds())
	c.client = append(c.client, micros(used)/locks)
	c.server = append(c.server, micros(server)/locks)
	c.sent = append(c.sent, sent/locks)
	c.executed = append(c.executed, executed/locks)
	return nil
}

// countConnections closes the client, and counts those that its servers lose.
func (c *contestant) countConnections(ctx context.Context, s *site) error {
	before, err1 := s.usage(ctx)
	c.l.close()
	_, err2 := s.usage(ctx) // a server may answer this before it notices
	after, err3 := s.usage(ctx)
	c.connections = before.since(after, "connected_clients") / float64(len(s.servers))
	return errors.Join(err1, err2, err3)
}

// caption says what was measured, where, when and with what.
func (u uncontended) caption(env *environment, nodes int) string {
	pause := "no pause"
	if u.every > 0 {
		pause = fmt.Sprintf("a lock every %v", u.every)
	}
	return fmt.Sprintf("uncontended, nodes: %d; one goroutine, %s, %d slices of %v each, NodeTimeout %v, "+
		"processes that spin: %d\n%s; %s; load average before: %s; %s, %s, %s", nodes, pause, u.slices, u.slice,
		u.nodeTimeout, u.busy, env.At.Format(time.DateTime+" MST"), env.Machine, u.load, env.Go, env.Server,
		strings.Join(env.Versions, ", "))
}

// table has a row for each. Their ratios are to redsync's better setting.
func table(all []*contestant) string {
	var others []*contestant
	for _, c := range all {
		if c.name == nameRedsync || c.name == nameFailFast {
			others = append(others, c)
		}
	}
	best := slices.MaxFunc(others, func(a, b *contestant) int {
		return cmp.Compare(median(a.rates), median(b.rates))
	})
	rows := [][]string{{"", "locks/s", "times " + best.name + " (quartiles)", "CPU per lock: client", "servers",
		"commands per lock: sent", "executed", "connections per server", "sent per server before the first lock",
		"heap per idle client", "failures"}}
	for _, c := range all {
		ratios := make([]float64, len(c.rates))
		for i := range ratios {
			ratios[i] = c.rates[i] / best.rates[i]
		}
		slices.Sort(ratios)
		n := len(ratios)
		rows = append(rows, []string{c.name, short(median(c.rates)),
			fmt.Sprintf("%.2f (%.2f to %.2f)", median(ratios), ratios[n/4], ratios[n-1-n/4]),
			span(median(c.client)), span(median(c.server)), short(median(c.sent)), short(median(c.executed)),
			short(c.connections), short(c.start) + " bytes", short(c.heap/1024) + " KiB", strconv.Itoa(c.failures)})
	}
	return markdown(rows)
}

// loadAverage says how busy the machine is with other things; it is empty where there is no /proc.
func loadAverage() string {
	text, _ := os.ReadFile("/proc/loadavg")
	fields := strings.Fields(string(text))
	return strings.Join(fields[:min(3, len(fields))], " ")
}
