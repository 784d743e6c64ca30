package rediscache_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

type user struct {
	ID    int
	Name  string
	Roles []string
}

var ada = user{42, "Ada", []string{"admin", "author"}}

// hitAndGET are a hit, and a plain GET and decoding of the same value.
func hitAndGET(tb testing.TB) (hit, plain func() error) {
	rdb := valueServer.Get(tb).Client(tb, honouring)
	data, _ := json.Marshal(ada)
	rdb.Set(tb.Context(), "plain:42", data, time.Hour)
	return hitOf(tb, rdb, 0), func() error {
		key := "42"
		stored, err := rdb.Get(tb.Context(), "plain:"+key).Bytes()
		if err != nil {
			return err
		}
		var u user
		return json.Unmarshal(stored, &u)
	}
}

// hitOf is a Get of a Cache with such a local tier, which hears of changes already if it is to.
func hitOf(tb testing.TB, rdb redis.UniversalClient, local time.Duration) func() error {
	users, err := rediscache.New(lockClient(tb), rdb,
		fetch.Each(func(context.Context, string) (user, error) { return ada, nil }),
		rediscache.Options[user]{Name: fmt.Sprint("user-", local), Fresh: time.Hour, Local: local})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { users.Close(context.Background()) })
	hit := func() error { _, err := users.Get(tb.Context(), "42"); return err }
	if err := hit(); err != nil {
		tb.Fatal(err)
	}
	for local > time.Second && !users.Stats().Hearing {
		time.Sleep(10 * time.Millisecond)
	}
	return hit
}

// A hit has no more allocations than a plain GET and decoding, and none if it is one of the local tier.
func TestAllocationsOfAHit(t *testing.T) {
	if redistest.Raced {
		t.Skip("the race detector makes pools forget")
	}
	hit, plain := hitAndGET(t)
	near := hitOf(t, valueServer.Get(t).Client(t, honouring), time.Minute)
	allocations := func(get func() error) float64 {
		return testing.AllocsPerRun(500, func() { testkit.Must(t, get()) })
	}
	if got, limit := allocations(hit), allocations(plain); got > limit {
		t.Errorf("a hit has %v allocations, a plain GET and decoding %v", got, limit)
	}
	if got := allocations(near); got > 0 {
		t.Errorf("a hit of the local tier has %v allocations", got)
	}
}

// A hit and a plain GET with decoding, in turns, so that both meet the same machine: the medians, and their
// ratio. local-ns is a hit of a local tier of 1s, and hearing-ns of one that hears of changes: the least of
// blocks of a thousand, in which nothing else had the processor.
func BenchmarkHitBesideGET(b *testing.B) {
	hit, plain := hitAndGET(b)
	const block = 1000
	near := func(local time.Duration) func() error {
		get := hitOf(b, valueServer.Get(b).Client(b, honouring), local)
		return func() (err error) {
			for range block {
				err = errors.Join(err, get())
			}
			return err
		}
	}
	all := []func() error{plain, hit, near(time.Second), near(time.Minute)}
	took := make([][]time.Duration, len(all))
	for n := 0; b.Loop(); n++ {
		for i, f := range all {
			if i > 1 && n%10 > 0 {
				continue
			}
			began := time.Now()
			if err := f(); err != nil {
				b.Fatal(err)
			}
			took[i] = append(took[i], time.Since(began))
		}
	}
	median := func(i int) float64 {
		slices.Sort(took[i])
		return float64(took[i][len(took[i])/2])
	}
	least := func(i int) float64 { return float64(slices.Min(took[i])) / block }
	b.ReportMetric(median(1)/median(0), "ratio")
	b.ReportMetric(median(0), "GET-ns")
	b.ReportMetric(median(1), "hit-ns")
	b.ReportMetric(least(2), "local-ns")
	b.ReportMetric(least(3), "hearing-ns")
}

// BenchmarkTags invalidates a tag of 100,000 keys, and clears as many. longest-us is how long one command of
// ours took the server at most, by its slow log: others wait for that. It includes what the server waited for
// a processor.
func BenchmarkTags(b *testing.B) {
	const keys = 100_000
	s := redistest.StartServer(b, "--slowlog-log-slower-than", "500")
	rdb := s.Client(b, honouring)
	c, err := rediscache.New(lockClient(b), rdb, nil, rediscache.Options[string]{
		Name: "tags", Fresh: time.Hour, LookupTimeout: 10 * time.Second,
		Tags: func(string, string) []string { return []string{"t"} },
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = c.Close(context.Background()) })
	values := map[string]string{}
	for i := range keys {
		values[fmt.Sprint("k", i)] = "value"
	}
	for name, op := range map[string]func() error{
		"InvalidateTag": func() error { return c.InvalidateTag(b.Context(), "t") },
		"Clear":         func() error { return c.Clear(b.Context(), nil) },
	} {
		b.Run(fmt.Sprintf("%s/keys=%d", name, keys), func(b *testing.B) {
			var longest time.Duration
			for range b.N {
				b.StopTimer()
				if err := c.SetMany(b.Context(), values); err != nil {
					b.Fatal(err)
				}
				rdb.SlowLogReset(b.Context())
				b.StartTimer()
				if err := op(); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				for _, x := range rdb.SlowLogGet(b.Context(), 1000).Val() {
					longest = max(longest, x.Duration)
				}
				b.StartTimer()
			}
			b.ReportMetric(float64(longest.Microseconds()), "longest-us")
		})
	}
}

// BenchmarkHearing has 16 Caches with a Local of an hour, as in as many processes, hear of 6,000 changes per
// second for each b.Loop's second, and then of one more: seen-us is how long that took to be seen by all of
// them, and heard how many changes each of them has heard of per second. What waits on the server for who
// hears is in waiting-bytes.
func BenchmarkHearing(b *testing.B) {
	const caches, perSecond, part = 16, 6000, 100
	s := redistest.StartServer(b)
	opts := rediscache.Options[string]{Name: "hearing", Fresh: time.Hour, Local: time.Hour, Jitter: -1}
	locks := lockClient(b)
	none := fetch.Each(func(context.Context, string) (string, error) { return "none", nil })
	open := func() *rediscache.Cache[string] {
		c, err := rediscache.New(locks, s.Client(b, honouring), none, opts)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = c.Close(context.Background()) })
		return c
	}
	writer, all := open(), make([]*rediscache.Cache[string], caches)
	get := func(c *rediscache.Cache[string]) string {
		v, err := c.Get(b.Context(), "k")
		if err != nil {
			b.Fatal(err)
		}
		return v
	}
	for i := range all {
		all[i] = open()
		get(all[i])
	}
	keys := make([]string, part)
	for i := range keys {
		keys[i] = fmt.Sprint("other", i)
	}
	var seen time.Duration
	var waiting float64
	changes, began := 0, time.Now()
	for n := 0; b.Loop(); n++ {
		next := time.NewTicker(time.Second * part / perSecond)
		for range perSecond / part {
			<-next.C
			if err := writer.Invalidate(b.Context(), keys...); err != nil {
				b.Fatal(err)
			}
			changes += part
		}
		next.Stop()
		for _, line := range strings.Split(s.Do(b, "CLIENT", "LIST", "TYPE", "pubsub").(string), "\n") {
			_, rest, _ := strings.Cut(line, " omem=")
			bytes, _, _ := strings.Cut(rest, " ")
			n, _ := strconv.ParseFloat(bytes, 64)
			waiting = max(waiting, n)
		}
		want := fmt.Sprint(n)
		if err := writer.Set(b.Context(), "k", want); err != nil {
			b.Fatal(err)
		}
		set := time.Now()
		for _, c := range all {
			for get(c) != want {
				time.Sleep(100 * time.Microsecond)
			}
		}
		seen += time.Since(set)
	}
	b.ReportMetric(float64(seen.Microseconds())/float64(b.N), "seen-us")
	b.ReportMetric(float64(changes)/time.Since(began).Seconds(), "heard/s")
	b.ReportMetric(waiting, "waiting-bytes")
}
