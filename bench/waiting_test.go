package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/procs"
	"github.com/flightlock/flightlock/internal/redistest"
)

// This file measures many processes that wait for one key, with one caller in each Client: it locks
// the key, releases it, and locks it again. The processes are this test binary again, and the
// servers are started by the benchmark.
//
// Each process appends the time of each lock and of each release to a file of its own, which
// survives a kill -9. From these files follows when nobody held the key. The processes share a
// machine and so its wall clock; a run in which that clock is set is to be repeated.

const (
	waitingKey = "waiting"
	// waitingTTL is what a holder that is killed may cost the others. A killed waiter costs less.
	waitingTTL = 2 * time.Second
)

// waitingTimeout is patient: on a small machine, a thousand Clients keep each other waiting.
const waitingTimeout = 500 * time.Millisecond

// waitingEnv makes the test binary one of the processes: its label, the number of its Clients, its file
// and the nodes.
const waitingEnv = "FLIGHTLOCK_BENCH_WAITING"

// waitingMain is a process, until in ends. It says "ready" when each of its Clients has had the key.
func waitingMain(in io.Reader, out io.Writer, args []string) int {
	n, err := strconv.Atoi(args[1])
	if err == nil {
		err = waitInTurns(in, out, args[0], n, args[2], args[3:])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "waiting:", err)
		return exitFailed
	}
	return exitOK
}

func waitInTurns(in io.Reader, out io.Writer, label string, clients int, path string, urls []string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var first, all sync.WaitGroup
	for i := range clients {
		opts := flightlock.Options{NodeTimeout: waitingTimeout, Label: label}
		c, err := flightlock.Open(opts, urls...)
		if err != nil {
			return err
		}
		first.Add(1)
		all.Go(func() {
			defer c.Close(ctx) // at once: the run is over
			had := sync.OnceFunc(first.Done)
			defer had()
			for ctx.Err() == nil {
				l, err := c.SingleFlightLock(ctx, waitingKey, waitingTTL, nil)
				if err != nil {
					continue // the end, or a node did not answer in time
				}
				note(f, i, time.Now(), true)
				end := time.Now()
				if u := l.Until(); u.Before(end) {
					end = u // the process was stopped, and had lost the lock
				}
				note(f, i, end, false)
				_ = l.Release(ctx)
				had()
			}
		})
	}
	first.Wait()
	if _, err := fmt.Fprintln(out, `"ready"`); err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, in)
	cancel()
	all.Wait()
	return nil
}

// note appends that a Client has locked or released the key.
func note(f *os.File, client int, at time.Time, locked bool) {
	b := binary.BigEndian.AppendUint64(nil, uint64(at.UnixNano()))
	n := uint32(client) << 1
	if locked {
		n |= 1
	}
	_, _ = f.Write(binary.BigEndian.AppendUint32(b, n))
}

// waiting is the processes and their servers.
type waiting struct {
	servers []*redistest.Server
	urls    []string
	dir     string
	clients int // per process
	procs   []*waitingProc
	gone    []*waitingProc // killed
}

type waitingProc struct {
	*procs.Child
	label, path string
	killed      time.Time
}

// startWaiting returns when each Client has had the key.
func startWaiting(b *testing.B, nodes, processes, clients int) *waiting {
	w := &waiting{dir: b.TempDir(), clients: clients}
	w.servers, w.urls = startServers(b, nodes)
	for range processes {
		w.procs = append(w.procs, w.start(b))
	}
	for _, p := range w.procs {
		p.await(b)
	}
	return w
}

func (p *waitingProc) await(b *testing.B) {
	var ready string
	if err := p.Receive(&ready); err != nil {
		b.Fatal(err)
	}
}

func (w *waiting) start(b *testing.B) *waitingProc {
	label := fmt.Sprintf("p%d", len(w.procs)+len(w.gone))
	path := filepath.Join(w.dir, label)
	words := append([]string{label, strconv.Itoa(w.clients), path}, w.urls...)
	return &waitingProc{Child: startProcess(b, waitingEnv, words), label: label, path: path}
}

// end stops all processes and servers, so that a benchmark may start others.
func (w *waiting) end() {
	for _, p := range w.procs {
		p.Kill()
	}
	for _, s := range w.servers {
		_ = s.Close()
	}
}

// holds is when the key was held by whom, since a certain time: in the order in which it was locked.
func (w *waiting) holds(b *testing.B, since time.Time) (all []hold) {
	for _, p := range slices.Concat(w.procs, w.gone) {
		data, err := os.ReadFile(p.path)
		if err != nil && !os.IsNotExist(err) { // a process that was killed before it began
			b.Fatal(err)
		}
		locked := map[uint32]time.Time{}
		add := func(from, to time.Time) {
			if from.After(since) {
				all = append(all, hold{from, to, p})
			}
		}
		for r := range slices.Chunk(data[:len(data)/12*12], 12) {
			at := time.Unix(0, int64(binary.BigEndian.Uint64(r)))
			n := binary.BigEndian.Uint32(r[8:])
			if n&1 == 1 {
				locked[n>>1] = at
				continue
			}
			add(locked[n>>1], at)
			delete(locked, n>>1)
		}
		for _, from := range locked { // until it was killed; or it holds the key now, and that is the last
			if p.killed.IsZero() {
				add(from, from)
			} else {
				add(from, p.killed)
			}
		}
	}
	slices.SortFunc(all, func(x, y hold) int { return x.from.Compare(y.from) })
	return all
}

type hold struct {
	from, to time.Time
	by       *waitingProc
}

// gap is a time in which nobody held the key.
type gap struct{ from, to time.Time }

func (g gap) length() time.Duration { return g.to.Sub(g.from) }

// gaps are those between the holds. Two holders at once are an error.
func gaps(b *testing.B, holds []hold) (all []gap) {
	for i, h := range holds[1:] {
		before := holds[i]
		if h.from.Before(before.to) && before.by.killed.IsZero() {
			b.Errorf("two holders at once, for %v: %s and %s", before.to.Sub(h.from), before.by.label, h.by.label)
		}
		all = append(all, gap{before.to, h.from})
	}
	return all
}

// longest is the longest gap that touches the given time.
func longest(all []gap, from, to time.Time) (most time.Duration) {
	for _, g := range all {
		if g.to.After(from) && g.from.Before(to) {
			most = max(most, g.length())
		}
	}
	return most
}

// cost is what the servers have done during a window, per lock.
type cost struct {
	locks    float64
	micros   float64            // processor time of all servers together
	commands map[string]float64 // of all servers, those inside scripts included
	total    float64
}

// measure lets d pass.
func (w *waiting) measure(b *testing.B, d time.Duration) cost {
	began := time.Now()
	cpu, calls := w.usage(b)
	time.Sleep(d) // the load that is measured is in other processes
	cpuNow, callsNow := w.usage(b)
	c := cost{commands: map[string]float64{}}
	c.locks = float64(len(w.holds(b, began)))
	c.micros = us(cpuNow-cpu) / c.locks
	for name, n := range callsNow {
		if n -= calls[name]; n > 0 && name != "info" {
			c.commands[name] = float64(n) / c.locks
			c.total += float64(n) / c.locks
		}
	}
	return c
}

func (w *waiting) usage(b *testing.B) (cpu time.Duration, calls map[string]int64) {
	calls = map[string]int64{}
	for _, s := range w.servers {
		cpu += s.CPU(b)
		for name, n := range s.CommandCalls(b) {
			calls[name] += n
		}
	}
	return cpu, calls
}

// logCommands lists the commands per lock and node.
func (c cost) logCommands(b *testing.B, nodes int) {
	var text bytes.Buffer
	names := make([]string, 0, len(c.commands))
	for name := range c.commands {
		names = append(names, name)
	}
	slices.SortFunc(names, func(x, y string) int { return cmp.Compare(c.commands[y], c.commands[x]) })
	for _, name := range names {
		if n := c.commands[name] / float64(nodes); n >= 0.005 {
			fmt.Fprintf(&text, " %s %.2f", name, n)
		}
	}
	b.Logf("commands per lock and node:%s", text.String())
}

// BenchmarkOneCallerEach reports, for P processes with one caller each that do nothing under the lock:
// locks per second, and per lock the processor time of all servers (server-us/lock) and the commands
// that each executes, inside scripts as well (commands/lock/node). One op is FLIGHTLOCK_BENCH_TIME.
func BenchmarkOneCallerEach(b *testing.B) {
	for _, nodes := range []int{1, 3} {
		for _, n := range []int{2, 4, 16, 64} {
			b.Run(fmt.Sprintf("nodes=%d/procs=%d", nodes, n), func(b *testing.B) {
				w := startWaiting(b, nodes, n, 1)
				defer w.end()
				f := figures{}
				for range b.N {
					c := w.measure(b, benchTime(b))
					f.add("locks/s", c.locks/benchTime(b).Seconds())
					f.add("server-us/lock", c.micros)
					f.add("commands/lock/node", c.total/float64(nodes))
					c.logCommands(b, nodes)
				}
				f.report(b)
			})
		}
	}
}

// BenchmarkManyClients compares 1,000 Clients that wait for one key, in 10 processes, with 10 in as
// many processes: the server's processor time per hand-over of both, and the ratio (x-server), for which
// the goal is 1.2. The two loads take turns on servers of their own. One op is two turns of
// FLIGHTLOCK_BENCH_TIME each.
func BenchmarkManyClients(b *testing.B) {
	const processes = 10
	f := figures{}
	for range b.N {
		for _, clients := range []int{1, 100} {
			name := strconv.Itoa(processes * clients)
			w := startWaiting(b, 1, processes, clients)
			time.Sleep(2 * time.Second) // connections, and the polls of those that waited for others to begin
			c := w.measure(b, benchTime(b))
			w.end()
			f.add(name+"-server-us/lock", c.micros)
			f.add(name+"-locks/s", c.locks/benchTime(b).Seconds())
			f.add(name+"-scripts/lock", c.commands["evalsha"])
			c.logCommands(b, 1)
		}
	}
	for i, many := range f["1000-server-us/lock"] {
		f.add("x-server", many/f["10-server-us/lock"][i])
	}
	verdict(b, "server time per hand-over with 1,000 waiting at most 1.2 times that with 10", "hundredths",
		100*median(f["x-server"]), 120)
	f.report(b)
}

// BenchmarkKilledWaiter has ten processes take turns, kills one by SIGKILL each second, and starts
// another in its place. It reports the longest time without a holder in the second after a kill
// (longest-ms), for which the goal is 50 ms, if the key was not the killed one's; else that time is
// longer by what was left of the key's ttl, and longest-beyond-ttl-ms is the longest without that.
// usual-ms is the longest before the first kill. One op is FLIGHTLOCK_BENCH_TIME.
func BenchmarkKilledWaiter(b *testing.B) {
	for _, nodes := range []int{1, 3} {
		b.Run(fmt.Sprintf("nodes=%d", nodes), func(b *testing.B) { killedWaiters(b, nodes) })
	}
}

func killedWaiters(b *testing.B, nodes int) {
	w := startWaiting(b, nodes, 10, 1)
	defer w.end()
	began := time.Now()
	time.Sleep(time.Second) // what is usual, before the first one
	type killing struct {
		at   time.Time
		left time.Duration // of the key, if it was the killed one's
	}
	var kills []killing
	for range b.N * int(benchTime(b)/time.Second) {
		p := w.procs[0]
		second := time.After(time.Second)
		at := time.Now()
		p.Kill()
		p.killed = time.Now()
		w.procs, w.gone = w.procs[1:], append(w.gone, p)
		kills = append(kills, killing{at, w.leftTo(b, p.label, p.killed)})
		w.procs = append(w.procs, w.start(b))
		<-second
	}
	all := gaps(b, w.holds(b, began))
	var most, beyond []float64
	for _, k := range kills {
		d := longest(all, k.at, k.at.Add(time.Second))
		if k.left > 0 {
			beyond = append(beyond, ms(d-k.left))
		} else {
			most = append(most, ms(d))
		}
	}
	f := figures{}
	f.add("usual-ms", ms(longest(all, began, kills[0].at)))
	f.add("kills", float64(len(kills)))
	f.add("killed-as-holder", float64(len(beyond)))
	f.add("median-ms", quantile(most, 0.5))
	f.add("longest-ms", slices.Max(most))
	if len(beyond) > 0 {
		f.add("longest-beyond-ttl-ms", slices.Max(beyond))
	}
	verdict(b, "below 50 ms without a holder", "ms", slices.Max(most), 50)
	f.report(b)
}

func ms(d time.Duration) float64 { return 1000 * d.Seconds() }

// leftTo is for how long after a certain time the key was kept for the process of that label, which was
// killed then; 0 if it was not, on a majority of nodes. A release elsewhere may have granted it the key
// until its connections were closed.
func (w *waiting) leftTo(b *testing.B, label string, killed time.Time) time.Duration {
	// see above: it may be granted late
	for ; time.Since(killed) < 50*time.Millisecond; time.Sleep(5 * time.Millisecond) {
		var left []time.Duration
		for _, s := range w.servers {
			owner, _ := s.Do(b, "GET", "lock:"+waitingKey).(string)
			owner = strings.TrimPrefix(owner, "flightlock:turn:")
			if ttl := s.Do(b, "PTTL", "lock:"+waitingKey).(int64); strings.HasPrefix(owner, label+"#") && ttl > 0 {
				left = append(left, time.Since(killed)+time.Duration(ttl)*time.Millisecond)
			}
		}
		if len(left) > len(w.servers)/2 {
			return slices.Max(left)
		}
	}
	return 0
}

// BenchmarkStoppedWaiter has 64 processes take turns, and stops one by SIGSTOP for 2 seconds, then the
// next. It reports per stop how long nobody held the key in these seconds and the one after them, in
// gaps of more than 20 ms (lost-ms, the median and the most), for which the goal is 500 ms. One
// op is FLIGHTLOCK_BENCH_TIME.
func BenchmarkStoppedWaiter(b *testing.B) {
	for _, nodes := range []int{1, 3} {
		b.Run(fmt.Sprintf("nodes=%d", nodes), func(b *testing.B) { stoppedWaiters(b, nodes) })
	}
}

func stoppedWaiters(b *testing.B, nodes int) {
	const stopped, after = 2 * time.Second, time.Second
	w := startWaiting(b, nodes, 64, 1)
	defer w.end()
	began := time.Now()
	time.Sleep(time.Second) // what is usual, before the first one
	type stop struct{ from, to time.Time }
	var stops []stop
	for i := range b.N * max(1, int(benchTime(b)/(stopped+after))) {
		p := w.procs[i%len(w.procs)]
		from := time.Now()
		if err := p.Stop(); err != nil {
			b.Fatal(err)
		}
		time.Sleep(stopped)
		if err := p.Cont(); err != nil {
			b.Fatal(err)
		}
		time.Sleep(after)
		stops = append(stops, stop{from, time.Now()})
	}
	all := gaps(b, w.holds(b, began))
	const short = 20 * time.Millisecond
	var lost, single []float64
	for _, s := range stops {
		var sum time.Duration
		for _, g := range all {
			if g.length() > short && !g.from.Before(s.from) && g.from.Before(s.to) {
				sum += g.length()
			}
		}
		lost = append(lost, ms(sum))
		single = append(single, ms(longest(all, s.from, s.to)))
	}
	f := figures{}
	f.add("usual-ms", ms(longest(all, began, stops[0].from)))
	f.add("stops", float64(len(stops)))
	f.add("lost-p50-ms", quantile(lost, 0.5))
	f.add("lost-most-ms", slices.Max(lost))
	f.add("longest-ms", slices.Max(single))
	verdict(b, "a stop costs at most 500 ms", "ms", slices.Max(lost), 500)
	f.report(b)
}
