package rediscache_test

import (
	"context"
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/rediscache"
)

type user struct {
	ID    int
	Name  string
	Roles []string
}

var ada = user{42, "Ada", []string{"admin", "author"}}

// A hit has no more allocations than a plain GET and decoding.
func TestAllocationsOfAHit(t *testing.T) {
	if redistest.Raced {
		t.Skip("the race detector makes pools forget")
	}
	rdb, c := valueServer.Get(t).Client(t, honouring), lockClient(t)
	users, err := rediscache.New(c, rdb, fetch.Each(func(context.Context, string) (user, error) { return ada, nil }),
		rediscache.Options[user]{Name: "user", Fresh: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	defer users.Close(context.Background())
	hit := func() (user, error) { return users.Get(t.Context(), "42") }
	if _, err := hit(); err != nil {
		t.Fatal(err)
	}
	data, _ := json.Marshal(ada)
	rdb.Set(t.Context(), "plain:42", data, time.Hour)
	plain := func() (u user, err error) {
		key := "42"
		stored, err := rdb.Get(t.Context(), "plain:"+key).Bytes()
		if err != nil {
			return u, err
		}
		err = json.Unmarshal(stored, &u)
		return u, err
	}
	allocations := func(get func() (user, error)) float64 {
		return testing.AllocsPerRun(500, func() {
			if _, err := get(); err != nil {
				t.Fatal(err)
			}
		})
	}
	if got, limit := allocations(hit), allocations(plain); got > limit {
		t.Errorf("a hit has %v allocations, a plain GET and decoding %v", got, limit)
	}
}

// A hit and a plain GET with decoding, in turns, so that both meet the same machine: the medians, and
// their ratio. local-ns is the median of a hit of the local tier, in blocks of a thousand.
func BenchmarkHitBesideGET(b *testing.B) {
	rdb, c := valueServer.Get(b).Client(b, honouring), lockClient(b)
	open := func(name string, local time.Duration) *rediscache.Cache[user] {
		users, err := rediscache.New(c, rdb, fetch.Each(func(context.Context, string) (user, error) { return ada, nil }),
			rediscache.Options[user]{Name: name, Fresh: time.Hour, Local: local})
		if err != nil {
			b.Fatal(err)
		}
		return users
	}
	users, near := open("user", 0), open("near", time.Second)
	defer users.Close(context.Background())
	defer near.Close(context.Background())
	data, _ := json.Marshal(ada)
	rdb.Set(b.Context(), "plain:42", data, time.Hour)
	plain := func() (err error) {
		key := "42"
		stored, err := rdb.Get(b.Context(), "plain:"+key).Bytes()
		if err != nil {
			return err
		}
		var u user
		return json.Unmarshal(stored, &u)
	}
	hit := func(c *rediscache.Cache[user]) func() error {
		return func() error { _, err := c.Get(b.Context(), "42"); return err }
	}
	const block = 1000
	locals := func() error {
		for range block {
			if _, err := near.Get(b.Context(), "42"); err != nil {
				return err
			}
		}
		return nil
	}
	took := [3][]time.Duration{}
	for n := 0; b.Loop(); n++ {
		for i, f := range []func() error{plain, hit(users), locals} {
			if i == 2 && n%10 > 0 {
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
	b.ReportMetric(median(1)/median(0), "ratio")
	b.ReportMetric(median(0), "GET-ns")
	b.ReportMetric(median(1), "hit-ns")
	b.ReportMetric(median(2)/block, "local-ns")
}
