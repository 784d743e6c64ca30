package flightlock_test

import (
	"context"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// Open refuses a bad url, says which and why, and does not show its password.
func TestOpenHidesPasswords(t *testing.T) {
	for _, bad := range []string{
		"redis://u:hunter2@127.0.0.1:99999999/x",
		"http://u:hunter2@127.0.0.1:6379",
		"redis://u:hunter2@127.0.0.1:6379?nonsense=1",
		"redis://u:hunter2@[::1",
		"://u:hunter2@x",
		"redis://u:hunter2",
		"redis://u:%68unter2@h:1/x",
		"redis://u:%68%75%6e%74%65%72%32@h:1?typo=%68unter2",
		"redis://h:1?master_name=m&username=app&password=hunter2&typo=1",
		"redis://h:1?Password=hunter2",
		"redis://h:1?hunter2@h",
		"redis://h:1?password=a&hunter2",
		"redis://h:1?p%61ssword=hunter2",
		"redis://u:hunter2@h:1?addr=h:2&read_only=true",
		"redis://h:1?master_name=m&replica_only=true&password=hunter2",
		"unix://u:hunter2@/run/redis.sock?typo=1",
		"127.0.0.1:6379",
		"u:hunter2@127.0.0.1:6379",
		"",
	} {
		_, err := flightlock.Open(flightlock.Options{}, "redis://127.0.0.1:1", bad)
		lockkit.WantInvalid(t, err, "urls[1]")
		if strings.Contains(err.Error(), "unter2") {
			t.Errorf("%q: %q shows the password", bad, err)
		}
	}
	_, err := flightlock.Open(flightlock.Options{})
	lockkit.WantInvalid(t, err, "len(urls) is 0")
	if strings.Contains(err.Error(), "Nodes") {
		t.Errorf("%v: there are no Nodes to give", err)
	}
}

// What go-redis misinterprets, or dials forever in vain, is refused: several hosts in one URL,
// invalid ports, a Sentinel's master without a name; and a size of its pool with which it panics.
func TestOpenRefusesWhatCannotBeDialled(t *testing.T) {
	for bad, says := range map[string]string{
		"redis://h1:6379,h2:6379":                         "several hosts",
		"redis://u:hunter2@h1:6379,h2:6379,h3:6379":       "several hosts",
		"redis://h1,h2":                                   "several hosts",
		"redis://h1:26379,h2:26379?master_name=m":         "several hosts",
		"redis://h1:26379?master_name=m&addr=h2:1,h3:1":   "several hosts",
		"redis://h:99999":                                 "from 1 to 65535",
		"rediss://u:hunter2@h:65536/1":                    "from 1 to 65535",
		"redis://h:0":                                     "from 1 to 65535",
		"redis://h:99999?master_name=m":                   "from 1 to 65535",
		"redis://h:1?master_name=m&addr=h2:99999":         "from 1 to 65535",
		"redis://h:1?addr=h2:99999":                       "from 1 to 65535",
		"redis://h:1?addr=h2:http":                        "from 1 to 65535",
		"redis://h:1?addr=h2:":                            "from 1 to 65535",
		"redis://h:26379?master_name=":                    "master_name",
		"redis://u:hunter2@h:26379?master_name=&addr=h:1": "master_name",
		"redis://h:1?pool_size=-1":                        "pool_size must not be negative",
		"redis://h:1?addr=h2:1&pool_size=5&pool_size=-5":  "pool_size must not be negative",
		"redis://h:1?master_name=m&pool_size=-5":          "pool_size must not be negative",
	} {
		_, err := flightlock.Open(flightlock.Options{}, "redis://127.0.0.1:1", bad)
		lockkit.WantInvalid(t, err, "urls[1]", says)
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q: %q shows the password", bad, err)
		}
	}
	for _, good := range []string{"redis://h", "redis://h:", "redis://[::1]:6379", "redis://:6379",
		"redis://h:1?addr=h2:2&addr=[::1]:65535", "redis://h?master_name=m&addr=h2:65535"} {
		c, err := flightlock.Open(flightlock.Options{}, good)
		if err != nil {
			t.Errorf("%q: %v", good, err)
			continue
		}
		lockkit.Close(t, c)
	}
	_, err := flightlock.Open(flightlock.Options{}, "redis://127.0.0.1:1", "redis://127.0.0.1:1")
	lockkit.WantInvalid(t, err, "urls[1]", "urls[0]")
	_, err = flightlock.Open(flightlock.Options{}, "redis://127.0.0.1:1/1", "redis://127.0.0.1:2/2")
	lockkit.WantInvalid(t, err, "urls[1]", "urls[0]")
	_, err = flightlock.Open(flightlock.Options{}, slices.Repeat([]string{"redis://127.0.0.1:1"}, 65)...)
	lockkit.WantInvalid(t, err, "len(urls) is 65", "64")
}

// A password with a character that should have been written as %XX makes a URL that means something
// else. However it is parsed, no half of the password is shown.
func TestOpenHidesHalvesOfPasswords(t *testing.T) {
	for _, form := range []string{
		"redis://u:PW@h:1/x", "redis://:PW@h:1/x", "redis://PW@h:1/x",
		"rediss://u:PW@h:1?typo=1", "unix://u:PW@/run/r.sock?typo=1",
		"redis://u:PW@h:1?addr=h:2&typo=1", "redis://u:PW@h:1?master_name=m&typo=1",
		"redis://h:1?master_name=m&password=PW&typo=1", "redis://h:1?sentinel_password=PW&addr=h:2",
		"redis://h:1?password=&PW",
	} {
		for c := rune(' '); c < 127; c++ {
			halves := []string{"7531864", "9876543"}
			for range 2 {
				u := strings.Replace(form, "PW", halves[0]+string(c)+halves[1], 1)
				cl, err := flightlock.Open(flightlock.Options{}, u)
				if err == nil {
					lockkit.Close(t, cl)
					continue
				}
				if c == ':' && strings.HasPrefix(form, "redis://PW@") {
					continue // a user and a password
				}
				if text := err.Error(); strings.Contains(text, halves[0]) || strings.Contains(text, halves[1]) {
					t.Errorf("%q: shown in %q", u, text)
				}
				halves = []string{"correcthorse", "batterystaple"}
			}
		}
	}
}

// The error gives the reason, as far as it is not secret.
func TestOpenSaysWhatIsWrong(t *testing.T) {
	for bad, says := range map[string][]string{
		"127.0.0.1:6379":                      {"127.0.0.1:6379", "want redis://host:port"},
		"redis://h:1/x?db=1":                  {"redis://h:1/x?db=1", `"x"`},
		"redis://u:p@h:1?read_timeout=soon":   {"redis://u:xxxxx@h:1?read_timeout=soon", "read_timeout"},
		"redis://h:1?addr=h:2&read_only=true": {"read_only", "replica"},
		"redis://h:1?master_name=m&typo=5&password=secret": {"redis://h:1?master_name=m&typo=xxxxx&password=xxxxx",
			"unexpected option: typo"},
		"redis://u:12#b@h:1":    {"redis://xxxxx", "%XX"},
		"redis://u:a/b@h:1":     {"redis://xxxxx", "%XX"},
		"unix://run/redis.sock": {"unix://run/redis.sock", "three slashes"},
		"ftp://h:1":             {"ftp://h:1", "scheme"},
	} {
		_, err := flightlock.Open(flightlock.Options{}, bad)
		lockkit.WantInvalid(t, err, append(says, "urls[0]")...)
	}
}

// Nodes whose clients have dialers of their own may have equal addresses, and a socket's name may have any
// bytes: errors, logs and metrics distinguish them nevertheless, by texts.
func TestNodesHaveDifferentNames(t *testing.T) {
	dir, refused := t.TempDir(), redistest.RefusedAddr(t)
	sockets := lockkit.Open(t, flightlock.Options{}, "unix://"+dir+"/%ff.sock", "unix://"+dir+"/%fe.sock",
		"unix://"+dir+"/%ff%fe.sock")
	var nodes []redis.UniversalClient
	for range 3 {
		rdb := redis.NewClient(&redis.Options{Addr: "10.0.0.1:1", DialerRetries: 1,
			Dialer: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "tcp", refused)
			}})
		t.Cleanup(func() { rdb.Close() })
		nodes = append(nodes, rdb)
	}
	dialers := lockkit.New(t, flightlock.Options{}, nodes...)
	names := map[string]bool{}
	for _, c := range []*flightlock.Client{sockets, dialers} {
		_, err := c.TryLock(t.Context(), "k", time.Second)
		for _, n := range c.NodeStats() {
			if names[n.Name] || !utf8.ValidString(n.Name) || err == nil ||
				!strings.Contains(err.Error(), n.Name+": ") {
				t.Errorf("%q, %v", n.Name, err)
			}
			names[n.Name] = true
		}
	}
	for _, want := range []string{"10.0.0.1:1", "10.0.0.1:1 nodes[1]", "10.0.0.1:1 nodes[2]"} {
		if !names[want] {
			t.Errorf("no node %q in %v", want, names)
		}
	}
}
