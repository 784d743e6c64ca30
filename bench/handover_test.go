package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/procs"
	"github.com/redis/go-redis/v9"
)

// This file measures the hand-over between processes: from the call of Release in one to the return
// of SingleFlightLock in another that has been waiting. It compares that with what nobody can do
// without, a round trip to Redis after an equal pause: an EVALSHA that compares and deletes, on a
// plain go-redis client.
//
// The other process is this test binary again. The two share a machine and so its wall clock, by
// which both note the time; a run in which that clock is set is to be repeated.

const (
	handoverKey     = "handover"
	handoverSamples = 300
)

// BenchmarkHandover reports medians, 99th percentiles and their ratios; x-p99-of-p50 is the p99 of
// the hand-over by the median of the EVALSHA. One op is 300 samples of each, in turns.
func BenchmarkHandover(b *testing.B) {
	for _, n := range []int{1, 3} {
		b.Run(fmt.Sprintf("nodes=%d", n), func(b *testing.B) { handovers(b, n) })
	}
}

func handovers(b *testing.B, nodes int) {
	servers, urls := startServers(b, nodes)
	c := benchStore{name: "redis", urls: urls}.client(b, patientTimeout)
	w := startWaiter(b, urls)
	rdb := servers[0].Client(b)
	if err := compareAndDelete.Load(b.Context(), rdb).Err(); err != nil {
		b.Fatal(err)
	}
	handover(b, c, w, 0) // connections, scripts
	var ours, raws []float64
	for range b.N * handoverSamples {
		pause := 20*time.Millisecond + rand.N(30*time.Millisecond)
		ours = append(ours, float64(handover(b, c, w, pause)))
		raws = append(raws, float64(rawDelete(b, rdb, pause)))
	}
	f := figures{}
	for name, q := range map[string]float64{"p50": 0.5, "p99": 0.99} {
		f.add(name+"-ns", quantile(ours, q))
		f.add("evalsha-"+name+"-ns", quantile(raws, q))
		f.add("x-"+name, quantile(ours, q)/quantile(raws, q))
	}
	f.add("x-p99-of-p50", quantile(ours, 0.99)/quantile(raws, 0.5))
	f.report(b)
}

// handover holds the key until the other process has waited for it for a pause, and returns how
// long after the release that one had it.
func handover(b *testing.B, c *flightlock.Client, w *waiter, pause time.Duration) time.Duration {
	l, err := c.SingleFlightLock(b.Context(), handoverKey, benchTTL, nil)
	if err != nil {
		b.Fatal(err)
	}
	w.say(b, "lock")
	w.hear(b, "waiting")
	time.Sleep(pause)
	released := time.Now()
	if err := l.Release(b.Context()); err != nil {
		b.Fatal(err)
	}
	got, err := strconv.ParseInt(w.hear(b, "got "), 10, 64)
	if err != nil {
		b.Fatal(err)
	}
	w.say(b, "release")
	w.hear(b, "released")
	return time.Duration(got - released.UnixNano())
}

// rawDelete lets an equal pause pass before it deletes a key.
func rawDelete(b *testing.B, rdb *redis.Client, pause time.Duration) time.Duration {
	if err := rdb.Set(b.Context(), "raw", "me", benchTTL).Err(); err != nil {
		b.Fatal(err)
	}
	time.Sleep(pause)
	began := time.Now()
	n, err := compareAndDelete.EvalSha(b.Context(), rdb, []string{"raw"}, "me").Int()
	took := time.Since(began)
	if err != nil || n != 1 {
		b.Fatalf("the EVALSHA deleted %d keys: %v", n, err)
	}
	return took
}

// waiter is the process that waits for the key: "lock" is answered by "waiting" as soon as it does,
// and by "got" and the time when it has the lock; "release" by "released".
type waiter struct{ *procs.Child }

// waiterEnv makes the test binary a waiter on the nodes that it names.
const waiterEnv = "FLIGHTLOCK_BENCH_WAITER"

// startWaiter starts a waiter, which ends with the benchmark.
func startWaiter(b *testing.B, urls []string) *waiter {
	return &waiter{startProcess(b, waiterEnv, urls)}
}

// startProcess starts the test binary as what env makes of it, with these words. It ends with the
// benchmark.
func startProcess(b *testing.B, env string, words []string) *procs.Child {
	cmd, err := procs.Self(env + "=" + strings.Join(words, ","))
	if err != nil {
		b.Fatal(err)
	}
	child, err := procs.StartChild(cmd)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { child.Kill(); _ = child.End(time.Minute) })
	return child
}

func (w *waiter) say(b *testing.B, line string) {
	if err := w.Send(line); err != nil {
		b.Fatal(err)
	}
}

// hear wants a line that begins with prefix, and returns the rest of it.
func (w *waiter) hear(b *testing.B, prefix string) string {
	var line string
	if err := w.Receive(&line); err != nil {
		b.Fatalf("instead of %q from the waiter: %v", prefix, err)
	}
	rest, ok := strings.CutPrefix(line, prefix)
	if !ok {
		b.Fatalf("the waiter said %q, not %q", line, prefix)
	}
	return rest
}

// waiterMain is the other process, until in ends. It returns the exit code.
func waiterMain(in io.Reader, out io.Writer, urls []string) int {
	c, err := flightlock.Open(flightlock.Options{NodeTimeout: patientTimeout}, urls...)
	if err == nil {
		err = serveWaiter(json.NewDecoder(in), json.NewEncoder(out), c)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "waiter:", err)
		return exitFailed
	}
	return exitOK
}

func serveWaiter(in *json.Decoder, out *json.Encoder, c *flightlock.Client) error {
	ctx := context.Background()
	var held *flightlock.Lock
	for {
		var line string
		if in.Decode(&line) != nil {
			return nil
		}
		switch line {
		case "lock":
			l, at, err := waitForLock(ctx, out, c)
			if err != nil {
				return err
			}
			held = l
			_ = out.Encode(fmt.Sprint("got ", at.UnixNano()))
		case "release":
			if err := held.Release(ctx); err != nil {
				return err
			}
			_ = out.Encode("released")
		}
	}
}

// waitForLock says when the library counts it among its waiters, so that nobody measures a call
// that has yet to begin.
func waitForLock(
	ctx context.Context, out *json.Encoder, c *flightlock.Client,
) (l *flightlock.Lock, at time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		l, err = c.SingleFlightLock(ctx, handoverKey, benchTTL, nil)
		at = time.Now()
	}()
	for c.Stats().Waiters == 0 {
		time.Sleep(50 * time.Microsecond)
	}
	_ = out.Encode("waiting")
	<-done
	return l, at, err
}
