package flightlock

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/quorum"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// The name of an epoch fits into what a server reads from a dump as a short string, for a thousand
// years of two names a second.
func TestNamesOfMemoriesAreShort(t *testing.T) {
	c := &Client{id: "#01234567-89ab-cdef-0123-456789abcdef-"}
	c.epochs.Store(7e10)
	first, second := c.epochName(), c.epochName()
	if len(first) > lua.MaxName || first == second || first[:17] != "0123456789abcdefm" {
		t.Errorf("%s, then %s", first, second)
	}
}

// There is a quarantine for any MaxTTL and DriftFactor that are accepted, and no earlier lock
// outlives it. Whether there is one does not depend on its length.
func TestAQuarantineIsLongerThanAnyLock(t *testing.T) {
	var nodes []redis.UniversalClient // which receive no requests
	for i := range 3 {
		c := redis.NewClient(&redis.Options{Addr: fmt.Sprint("127.0.0.1:", i+1)})
		defer c.Close()
		nodes = append(nodes, c)
	}
	for _, maxTTL := range []time.Duration{minTTL, time.Minute, longestTTL} {
		for _, drift := range []float64{math.SmallestNonzeroFloat64, 0.01, math.Nextafter(0.5, 0)} {
			c, err := New(Options{MaxTTL: maxTTL, DriftFactor: drift}, nodes...)
			testkit.Must(t, err)
			if limit := c.quarantineTime(); !c.guarded() || limit < maxTTL || limit > 36*time.Hour+2*time.Millisecond {
				t.Errorf("MaxTTL %v, DriftFactor %v: guarded is %v, for %v", maxTTL, drift, c.guarded(), limit)
			}
			if v := c.quorum.Validity(minTTL); v < 3*time.Millisecond || v >= minTTL {
				t.Errorf("DriftFactor %v: a ttl of %v is valid for %v", drift, minTTL, v)
			}
			testkit.Must(t, c.Close(t.Context()))
		}
	}
}

// A dial is given up before Close would be, unless the url says otherwise. Without a timeout go-redis would
// give up each dial before it began.
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

// What a node has replied is a text: one that has not granted the key of an attempt has not lost it, so
// "gone" is for a lock that somebody had; and a key may have an empty value, and no ttl.
func TestTextsOfReplies(t *testing.T) {
	missing, empty := node.Reply{Kind: node.Missing},
		"a: held by a client of another library: the key has an empty value"
	for _, c := range []struct {
		op    string
		reply node.Reply
		want  string
	}{
		{"acquire", missing, "a: it has not granted the key"},
		{"refresh", missing, "a: the key is gone"},
		{"release", missing, "a: the key is gone"},
		{"acquire", node.Reply{Kind: node.Held, TTL: 3 * time.Second}, empty + ", for 3s"},
		{"acquire", node.Reply{Kind: node.Held, TTL: -1}, empty},
		{"refresh", node.Reply{Kind: node.Held, TTL: -1}, empty},
	} {
		err := quorumError("k", &quorum.Failure{Op: c.op, Reason: quorum.Unreachable, Need: 1,
			Nodes: []quorum.NodeAnswer{{Name: "a", Reply: c.reply}}})
		if n := err.Nodes[0]; !strings.HasSuffix(err.Error(), c.want) || n.Err == nil ||
			n.HolderTTL != c.reply.TTL {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}
