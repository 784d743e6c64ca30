package rediscache_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/rediscache"
)

type user struct {
	ID    int
	Name  string
	Roles []string
}

var ada = user{42, "Ada", []string{"admin", "author"}}

// What a hit costs beside a plain GET and decoding.
func BenchmarkHit(b *testing.B) {
	s := redistest.StartServer(b)
	rdb := s.Client(b, honouring)
	c, err := flightlock.Open([]string{"redis://" + s.Addr()}, flightlock.Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close(context.Background())
	b.Run("client=plain", func(b *testing.B) {
		data, _ := json.Marshal(ada)
		rdb.Set(b.Context(), "plain:42", data, time.Hour)
		b.ReportAllocs()
		for b.Loop() {
			key := "42"
			stored, err := rdb.Get(b.Context(), "plain:"+key).Bytes()
			if err != nil {
				b.Fatal(err)
			}
			var u user
			if err := json.Unmarshal(stored, &u); err != nil {
				b.Fatal(err)
			}
		}
	})
	for name, local := range map[string]time.Duration{"rediscache": 0, "rediscache,Local": time.Second} {
		b.Run("client="+name, func(b *testing.B) {
			users, err := rediscache.New(c, rdb, func(context.Context, string) (user, error) { return ada, nil },
				rediscache.Options[user]{Name: "user", Fresh: time.Hour, Local: local})
			if err != nil {
				b.Fatal(err)
			}
			defer users.Close(context.Background())
			if _, err := users.Get(b.Context(), "42"); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := users.Get(b.Context(), "42"); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
