package demo

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

// services starts stand-ins for processes of the service, with a balancer before them that knows all of them.
func services(t *testing.T, handlers ...http.HandlerFunc) *balancer {
	t.Helper()
	var names, urls []string
	for i, h := range handlers {
		s := httptest.NewServer(h)
		t.Cleanup(s.Close)
		names, urls = append(names, fmt.Sprint("p", i+1)), append(urls, s.URL)
	}
	b := newBalancer(names, urls)
	t.Cleanup(b.close)
	return b
}

func answer(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, body) }
}

// Callers come whether those before them have an answer or not, and the time in which the service stood still
// is in each one's latency, from when it was due.
func TestCallersDoNotWaitForEachOther(t *testing.T) {
	release := make(chan struct{})
	var came atomic.Int64
	b := services(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/healthz" {
			came.Add(1)
			<-release
		}
		fmt.Fprint(w, "v")
	})
	const n = 20
	c := &callers{b: b, rate: 1000, limit: 100}
	var saw seen
	done := make(chan int)
	go func() {
		done <- c.run(t.Context(), func() call { return call{path: "/item/1"} }, n, &saw)
	}()
	redistest.Eventually(t, time.Minute, "all have come", func() bool { return came.Load() == n })
	stood := 50 * time.Millisecond
	time.Sleep(stood)
	close(release)
	if got := <-done; got != n {
		t.Errorf("%d came, want %d", got, n)
	}
	if got := saw.reads.Count(); got != n {
		t.Errorf("%d answers, want %d", got, n)
	}
	if got := saw.reads.Quantile(0.01); got < stood {
		t.Errorf("the shortest of all latencies is %v, and nobody was answered for %v", got, stood)
	}
}

// Calls that cannot be sent, for too many are under way, are errors.
func TestCallsThatAreNotSentAreCounted(t *testing.T) {
	release := make(chan struct{})
	b := services(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/healthz" {
			<-release
		}
		fmt.Fprint(w, "v")
	})
	c := &callers{b: b, rate: 1000, limit: 3}
	var saw seen
	n := 0
	c.run(t.Context(), func() call {
		if n++; n == 10 {
			close(release)
		}
		return call{path: "/item/1"}
	}, 10, &saw)
	if errs, _ := saw.errorsByKind(""); errs["not sent"] < 6 {
		t.Errorf("errors %v, want 6 not sent at least", errs)
	}
}

// Errors are counted by kind, and those of a broken process by themselves. A transfer counts as paid if it
// was answered 200.
func TestErrorsAreCountedByKind(t *testing.T) {
	failing := func(status int) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/healthz" {
				return
			}
			http.Error(w, "no", status)
		}
	}
	b := services(t, failing(502), failing(503), answer(""), func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/healthz" {
			return
		}
		panic(http.ErrAbortHandler) // the connection ends without an answer
	})
	for i := range b.up {
		redistest.Eventually(t, time.Minute, "healthy", b.up[i].Load)
	}
	c := &callers{b: b, rate: 1000, limit: 100}
	var saw seen
	// The processes are called in turn.
	c.run(t.Context(), func() call { return call{kind: transferCall, path: "/transfer"} }, 8, &saw)
	c.run(t.Context(), func() call { return call{kind: itemCall, path: "/item/1"} }, 4, &saw)
	others, its := saw.errorsByKind("p1")
	if got := errorText(others); got != "503: 1, empty answer: 1, reset: 1, transfer 503: 2, transfer reset: 2" {
		t.Errorf("errors of others: %s", got)
	}
	if got := errorText(its); got != "502: 1, transfer 502: 2" {
		t.Errorf("errors of p1: %s", got)
	}
	if saw.paid.Load() != 2 || saw.transfers.Count() != 8 || saw.reads.Count() != 4 {
		t.Errorf("%d paid, %d transfers, %d reads", saw.paid.Load(), saw.transfers.Count(), saw.reads.Count())
	}
}

// A process that is gone costs no caller an error: its request goes to another one, which the next ones do at
// once.
func TestTheBalancerSkipsWhoIsGone(t *testing.T) {
	gone := httptest.NewServer(answer("never"))
	gone.Close()
	var served atomic.Int64
	alive := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/healthz" {
			served.Add(1)
		}
		fmt.Fprint(w, "v")
	}))
	defer alive.Close()
	b := newBalancer([]string{"gone", "alive"}, []string{gone.URL, alive.URL})
	defer b.close()
	b.up[0].Store(true) // as if it had just gone
	for range 6 {
		process, status, _, err := b.do(t.Context(), http.MethodPost, "/transfer")
		if err != nil || status != 200 || process != 1 {
			t.Fatal(process, status, err)
		}
	}
	if served.Load() != 6 {
		t.Errorf("served %d, want each one once", served.Load())
	}
}

// A process that says that it is not healthy gets no calls.
func TestTheBalancerSkipsWhoIsNotHealthy(t *testing.T) {
	var sick, calls atomic.Bool
	b := services(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path != "/healthz":
			calls.Store(true)
		case sick.Load():
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		fmt.Fprint(w, "v")
	}, answer("v"))
	redistest.Eventually(t, time.Minute, "both are healthy",
		func() bool { return b.up[0].Load() && b.up[1].Load() })
	sick.Store(true)
	redistest.Eventually(t, time.Minute, "one is not", func() bool { return !b.up[0].Load() })
	calls.Store(false)
	for range 10 {
		if process, _, _, err := b.do(t.Context(), http.MethodGet, "/item/1"); err != nil || process != 1 {
			t.Error(process, err)
		}
	}
	if calls.Load() {
		t.Error("it got calls")
	}
}

// Most calls are for items, by Zipf's law, and a cold start asks for every key twice.
func TestTheMixIsWhatItSaysThatItIs(t *testing.T) {
	m := newMix(1000, 10, 1)
	kinds := map[callKind]int{}
	paths := map[string]int{}
	for range 10_000 {
		c := m.next()
		kinds[c.kind]++
		paths[c.path]++
	}
	if kinds[itemCall] < 8500 || kinds[pageCall] < 600 || kinds[transferCall] < 100 {
		t.Errorf("%v", kinds)
	}
	if paths["/item/0"] < 10*max(1, paths["/item/500"]) {
		t.Errorf("item 0 %d times, item 500 %d times", paths["/item/0"], paths["/item/500"])
	}
	cold := map[string]int{}
	next := eachTwice(100, 1)
	for range 200 {
		cold[next().path]++
	}
	if len(cold) != 100 || cold["/item/0"] != 2 || cold["/item/99"] != 2 {
		t.Errorf("%d keys, %v", len(cold), cold)
	}
}

func TestErrorKinds(t *testing.T) {
	for _, c := range []struct {
		status int
		err    error
		want   string
	}{
		{200, nil, ""},
		{504, nil, "504"},
		{0, context.DeadlineExceeded, "timeout"},
		{0, fmt.Errorf("odd"), "network"},
	} {
		if got := errorKind(c.status, c.err); got != c.want {
			t.Errorf("%d %v: %q, want %q", c.status, c.err, got, c.want)
		}
	}
}
