package rediscache_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// Versions have entries of their own, also beside a Cache without one: a key of that which would be an entry
// of a Version is refused, and all others are where they were.
func TestVersions(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		a := w.cache(options{Name: "user", Version: "v1"})
		b := w.cache(options{Name: "user", Version: "v2"})
		without := w.cache(options{Name: "user"})
		w.want("42", "42@0", a, b, without)
		w.want("42", "42@0", a, b, without)
		w.wantLoads(3)
		for _, key := range []string{"user:v1:42", "user:v2:42", "user:42"} {
			if !w.values.Mini.Exists(key) {
				t.Errorf("there is no %s", key)
			}
		}
		_, err := without.Get(t.Context(), "v2:42")
		wantIs(t, flightlock.ErrInvalid, err)
		for _, key := range []string{"v2", "x:v2:42", "version:42"} {
			w.want(key, key+"@0", without)
		}
		w.want("v2:42", "v2:42@0", b)
	})
}

// Timeouts may be as long as a duration can be: values are stored and found all the same, and Close does not
// fail.
func TestTimeoutsForEver(t *testing.T) {
	bubbles(t, []time.Duration{0, math.MaxInt64}, func(t *testing.T, w *world, loads time.Duration) {
		c := w.cache(options{LookupTimeout: math.MaxInt64, LoadTimeout: loads, WaitTimeout: math.MaxInt64})
		w.want("k", "k@0", c, c)
		w.wantLoads(1)
		testkit.Must(t, c.Close(t.Context()))
	})
}

// Bad arguments are an ErrInvalid that names them, before anything is sent. Among them are a Name and keys
// with which an entry would be at the key of a lock, or at one that a node keeps for all its clients: a
// lookup would overwrite it.
func TestInvalidArguments(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		client := w.client()
		made := func(rdb redis.UniversalClient, want string, change func(*options)) {
			t.Helper()
			opts := options{Fresh: time.Minute}
			change(&opts)
			_, err := rediscache.New(client, rdb, fetch.Each(w.origin.load), opts)
			wantText(t, err, want)
			wantIs(t, flightlock.ErrInvalid, err)
		}
		for want, change := range map[string]func(*options){
			"Options.Fresh is 0s":              func(o *options) { o.Fresh = 0 },
			"Options.Fresh is -1s":             func(o *options) { o.Fresh = -time.Second },
			"Options.Stale is -1s":             func(o *options) { o.Stale = -time.Second },
			"Options.NotFoundFor is -1s":       func(o *options) { o.NotFoundFor = -time.Second },
			"Options.Jitter is 1":              func(o *options) { o.Jitter = 1 },
			"Options.MaxValue is -1":           func(o *options) { o.MaxValue = -1 },
			"Options.Local is 25h":             func(o *options) { o.Local = 25 * time.Hour },
			"Options.Local is 1.001s":          func(o *options) { o.Local = time.Second + time.Millisecond },
			"Options.LocalKeys is -1":          func(o *options) { o.LocalKeys = -1 },
			"Options.EarlyRefresh is -1":       func(o *options) { o.EarlyRefresh = -1 },
			"Options.Codec is incomplete":      func(o *options) { o.Codec.Encode = rediscache.Text().Encode },
			`Options.Name and Version is "xxx`: func(o *options) { o.Name = strings.Repeat("x", 128) },
			`Options.Name and Version is "{`:   func(o *options) { o.Name = "{user}" },
			`Options.Name and Version is "l`:   func(o *options) { o.Name = "lock" },
			`Options.Name and Version is "lo`:  func(o *options) { o.Name = "lock:users" },
			`Options.Name and Version is "f`:   func(o *options) { o.Name = "flightlock:{x}" },
			`Options.Version is "2"`:           func(o *options) { o.Version = "2" },
			`Options.Version is "v2:x"`:        func(o *options) { o.Version = "v2:x" },
			`Options.Name is "user:v2"`:        func(o *options) { o.Name = "user:v2" },
			`Options.Name is "v2"`:             func(o *options) { o.Name = "v2" },
			"Options.LockTTL is 1ms":           func(o *options) { o.LockTTL = time.Millisecond },
			"Options.StaleWait is -1s":         func(o *options) { o.StaleWait = -time.Second },
		} {
			made(w.rdb, want, change)
		}
		ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "a:6379"},
			HeartbeatFrequency: time.Hour})
		defer ring.Close()
		readOnly := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"10.1.0.1:6379"}, ReadOnly: true})
		defer readOnly.Close()
		for want, rdb := range map[string]redis.UniversalClient{
			"rdb is nil": nil, "rdb is a *redis.Ring": ring, "rdb is a *redis.ClusterClient with ReadOnly": readOnly,
		} {
			made(rdb, want, func(*options) {})
		}
		all := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"10.1.0.1:6379"}})
		defer all.Close()
		made(all,
			"Options.Local is 1m0s, but above 1s it needs a *redis.Client, whose server tells of all changes, and "+
				"rdb is a *redis.ClusterClient: set 1s or less",
			func(o *options) { o.Name, o.Local = "user", time.Minute })
		client = nil
		made(w.rdb, "c is nil", func(*options) {})
		without := w.cacheWith(w.rdb, nil, options{})
		_, err := without.Get(t.Context(), "k")
		errs := []error{err}
		c := w.cache(options{})
		for _, key := range []string{"", strings.Repeat("x", 5000), "lock:k", "flightlock:{x}",
			"flightlock:{x}:want"} {
			_, get := c.Get(t.Context(), key)
			_, many := c.GetMany(t.Context(), []string{key})
			_, with := without.GetWith(t.Context(), key, w.origin.load)
			errs = append(errs, get, many, with, c.Set(t.Context(), key, "v"), c.Invalidate(t.Context(), "good", key))
		}
		wantIs(t, flightlock.ErrInvalid, errs...)
		if n := w.values.Mini.CommandCount(); n != 0 {
			t.Errorf("%d commands", n)
		}
	})
}
