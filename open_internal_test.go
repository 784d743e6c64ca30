package flightlock

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// A dial is given up before Close would be, unless the url says otherwise. Without a timeout go-redis would give up
// each dial before it began.
func TestOpenBoundsDials(t *testing.T) {
	for u, want := range map[string]time.Duration{
		"redis://h:1":                             2 * time.Second,
		"rediss://h:1":                            2 * time.Second,
		"redis://h:1?dial_timeout=7s":             7 * time.Second,
		"redis://h:1?dial_timeout=0":              2 * time.Second,
		"redis://h:1?dial_timeout=0s":             2 * time.Second,
		"redis://h:1?dial_timeout=-1":             2 * time.Second,
		"redis://h:1?master_name=m":               2 * time.Second,
		"redis://h:1?addr=h:2":                    2 * time.Second,
		"redis://h:1?addr=h:2&dial_timeout=100ms": 100 * time.Millisecond,
	} {
		newNode, err := parseURL(u)
		if err != nil {
			t.Fatal(err)
		}
		n := newNode()
		var got time.Duration
		switch c := n.(type) {
		case *redis.Client:
			got = c.Options().DialTimeout
		case *redis.ClusterClient:
			got = c.Options().DialTimeout
		}
		if got != want {
			t.Errorf("%s: %v, want %v", u, got, want)
		}
		_ = n.Close()
	}
}
