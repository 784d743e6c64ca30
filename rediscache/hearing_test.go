package rediscache_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// With a Local of an hour, every change of an entry reaches the tiers of the other processes, and until then
// they need no Redis.
func TestChangesAreHeard(t *testing.T) {
	type changing struct {
		name   string
		change func(w *world, c *rediscache.Cache[string]) error
		loads  bool
	}
	bubbles(t, []changing{
		{"Invalidate", func(w *world, c *rediscache.Cache[string]) error {
			return c.Invalidate(context.Background(), "k")
		}, true},
		{"Set", func(w *world, c *rediscache.Cache[string]) error {
			return c.Set(context.Background(), "k", "k@1")
		}, false},
		{"InvalidateTag", func(w *world, c *rediscache.Cache[string]) error {
			return c.InvalidateTag(context.Background(), "t")
		}, true},
		{"Clear", func(w *world, c *rediscache.Cache[string]) error {
			return c.Clear(context.Background(), nil)
		}, true},
		{"deleted by hand", func(w *world, c *rediscache.Cache[string]) error {
			w.values.Mini.Del("c:k")
			return nil
		}, true},
		{"flushed", func(w *world, c *rediscache.Cache[string]) error {
			return w.rdb.FlushAll(context.Background()).Err()
		}, true},
	}, func(t *testing.T, w *world, x changing) {
		opts := options{
			Name: "c", Fresh: 24 * time.Hour, Local: time.Hour,
			Tags: func(string, string) []string { return []string{"t"} },
		}
		a, b := w.cache(opts), w.cache(opts)
		w.want("k", "k@0", a, b)
		time.Sleep(time.Second)
		w.want("k", "k@0", a, b) // heard of, by now
		before := b.Stats()
		for range 30 {
			time.Sleep(2 * time.Second)
			w.want("k", "k@0", b)
		}
		after := b.Stats()
		if hits := after.LocalHits - before.LocalHits; hits != 30 || after.Hits != before.Hits {
			t.Errorf("of 30 Gets %d were not from Redis", hits)
		}
		w.origin.version.Add(1)
		testkit.Must(t, x.change(w, a))
		time.Sleep(500 * time.Millisecond)
		w.want("k", "k@1", b, a)
		w.wantLoads(1 + map[bool]int64{true: 1}[x.loads])
	})
}

// ear is the connection of b on which it hears of changes, as its network has it.
type ear struct {
	late time.Duration // by how much everything comes late
	deaf atomic.Bool   // what arrives is lost
	cut  atomic.Bool   // it ends, and there is no other
}

// dialer has the connection of o that asks for changes be e.
func (e *ear) dialer(o *redis.Options) {
	dial := o.Dialer
	o.ContextTimeoutEnabled = true
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &earConn{Conn: c, e: e}, nil
	}
}

type earConn struct {
	net.Conn
	e     *ear
	hears atomic.Bool
}

func (c *earConn) Write(p []byte) (int, error) {
	if strings.Contains(string(p), "TRACKING") {
		c.hears.Store(true)
	}
	if c.hears.Load() && c.e.cut.Load() {
		return 0, io.ErrClosedPipe
	}
	return c.Conn.Write(p)
}

func (c *earConn) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if !c.hears.Load() || err != nil {
			return n, err
		}
		if c.e.cut.Load() {
			return 0, io.EOF
		}
		time.Sleep(c.e.late)
		if !c.e.deaf.Load() {
			return n, err
		}
	}
}

// hears is a Cache with a Local of an hour that has heard of changes, has k and has it for longer than a
// second.
func (w *world) hears(e *ear) *rediscache.Cache[string] {
	w.t.Helper()
	c := w.cacheOf(w.values.Client(w.t, e.dialer), options{Name: "c", Fresh: 24 * time.Hour, Local: time.Hour})
	w.want("k", "k@0", c)
	time.Sleep(2 * time.Second)
	w.want("k", "k@0", c)
	time.Sleep(2 * time.Second) // no pulse has expired so far
	w.pulse()
	time.Sleep(e.late + 10*time.Millisecond)
	before := c.Stats().LocalHits
	w.want("k", "k@0", c)
	if c.Stats().LocalHits == before {
		w.t.Fatal("the value is not in the tier")
	}
	return c
}

// pulse waits for one that the server has executed.
func (w *world) pulse() {
	pulses := func() (keys []string) {
		return slices.DeleteFunc(w.values.Mini.Keys(),
			func(key string) bool { return strings.HasPrefix(key, "c:") })
	}
	before := pulses()
	another := func(key string) bool { return !slices.Contains(before, key) }
	for !slices.ContainsFunc(pulses(), another) {
		time.Sleep(time.Millisecond)
	}
}

// While changes are not heard of, no value is served that was current longer ago than a second, although the
// process does not know that it is deaf, and hears late.
func TestADeafProcess(t *testing.T) {
	bubbles(t, []time.Duration{0, 200 * time.Millisecond}, func(t *testing.T, w *world, late time.Duration) {
		e := &ear{late: late}
		a, b := w.cache(options{Name: "c", Fresh: 24 * time.Hour}), w.hears(e)
		w.pulse()
		time.Sleep(10 * time.Millisecond) // else both are told together
		w.change(a, "k")
		if late > 0 {
			time.Sleep(late + late/5) // the pulse was heard, and the change is on its way
		}
		e.deaf.Store(true)
		time.Sleep(time.Second - late)
		w.want("k", "k@1", b)
	})
}

// refusing is a hook that has pulses refused, as by a server whose user may not write them.
type refusing struct {
	before
	on atomic.Bool
}

func (r *refusing) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if r.on.Load() && strings.Contains(fmt.Sprint(cmd.Args()), "{pulse}") {
			cmd.SetErr(conn.ServerError("NOPERM No permissions to access a key"))
			return cmd.Err()
		}
		return next(ctx, cmd)
	}
}

// Pulses that are refused are one line in the log, with what the user needs, and not a line each. The next
// one is made a minute later.
func TestPulsesThatAreRefused(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		var log testkit.LogBuffer
		locks, err := w.locks.Client(flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		testkit.Must(t, err)
		r := &refusing{}
		r.on.Store(true)
		w.rdb.AddHook(r)
		c := newCache(t, locks, w.rdb, fetch.Each(w.origin.load),
			options{Name: "c", Fresh: time.Hour, Local: time.Hour})
		w.want("k", "k@0", c)
		time.Sleep(30 * time.Second)
		wantDeaf(t, &log)
		r.on.Store(false)
		time.Sleep(time.Minute)
		if !c.Stats().Hearing {
			t.Error("it does not hear, though pulses are not refused any more")
		}
	})
}

// wantDeaf checks that one line tells why the tier does not hear of changes, with the rule of the docs.
func wantDeaf(t *testing.T, log *testkit.LogBuffer) {
	t.Helper()
	testkit.WantOneLine(t, log, "level=WARN", "keeps values for 1s only", "NOPERM",
		`fix="give the user `+strings.Join(documented(t, "ACL SETUSER hearing (.*)$"), " ")+`"`)
}

// What has changed while there was no connection was not heard of.
func TestAConnectionThatWasLost(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		e := &ear{}
		a, b := w.cache(options{Name: "c", Fresh: 24 * time.Hour}), w.hears(e)
		hearing := func(is bool) {
			for b.Stats().Hearing != is {
				time.Sleep(time.Millisecond)
			}
		}
		e.cut.Store(true) // it ends with the next pulse
		hearing(false)
		w.change(a, "k")
		e.cut.Store(false)
		hearing(true)
		w.want("k", "k@1", b)
	})
}

// What was loaded and not stored is nothing that the server could tell of: an InvalidateTag and a Clear do
// not find it.
func TestAValueThatWasNotStored(t *testing.T) {
	bubbles(t, []bool{false, true}, func(t *testing.T, w *world, clears bool) {
		opts := options{
			Name: "c", Fresh: 24 * time.Hour, Local: time.Hour,
			Tags: func(string, string) []string { return []string{"t"} },
		}
		a, b := w.cache(opts), w.cache(opts)
		w.want("other", "other@0", b)
		testkit.Must(t, a.Invalidate(t.Context(), "k")) // there is a stamp, which a lookup leaves as it is
		time.Sleep(2 * time.Second)                     // b hears
		done := make(chan struct{})
		go func() {
			defer close(done)
			w.want("k", "k@0", b)
		}()
		time.Sleep(w.origin.takes / 2)
		w.origin.version.Add(1)
		if clears {
			testkit.Must(t, a.Clear(t.Context(), nil))
		} else {
			testkit.Must(t, a.InvalidateTag(t.Context(), "t"))
		}
		<-done
		time.Sleep(1100 * time.Millisecond)
		w.want("k", "k@1", b)
	})
}

// A value that has become stale is not served from the tier for long: there nobody would begin to load a new
// one.
func TestAStaleValueLeavesTheTier(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(options{Name: "c", Fresh: 10 * time.Second, Stale: time.Hour, Local: time.Hour})
		w.want("k", "k@0", c)
		time.Sleep(2 * time.Second)
		w.want("k", "k@0", c) // from here on in the tier
		w.origin.version.Add(1)
		time.Sleep(8 * time.Second)
		w.want("k", "k@0", c) // stale: it is loaded behind this
		time.Sleep(2 * time.Second)
		w.want("k", "k@1", c)
		w.wantLoads(2)
	})
}

// On a real server, too, the tier keeps a value for longer than a second, and a change removes it: also if
// that is made while the connection on which it would be heard of is gone.
func TestChangesAreHeardOnAServer(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	opts := options{Local: time.Hour}
	a, _ := realCache(t, s.Client(t, honouring), opts)
	b, _ := realCache(t, s.Client(t, honouring), opts)
	get := func() string {
		v, err := b.Get(t.Context(), "k")
		testkit.Must(t, err)
		return v
	}
	kept := func() { // until it was served from the tier more than a second after it came there
		t.Helper()
		for hits := uint64(0); hits == 0; {
			get()
			time.Sleep(1200 * time.Millisecond)
			before := b.Stats().LocalHits
			get()
			hits = b.Stats().LocalHits - before
		}
	}
	// The two have origins of their own: what b gets is what a has stored.
	changed := func(change func()) {
		t.Helper()
		want := "of " + time.Now().String()
		change()
		testkit.Must(t, a.Set(t.Context(), "k", want))
		for get() != want {
			time.Sleep(10 * time.Millisecond)
		}
	}
	kept()
	changed(func() {})
	kept()
	list, _ := s.Do(t, "CLIENT", "LIST", "TYPE", "pubsub").(string)
	if n := strings.Count(list, "\n"); n != 1 { // a has had no value so far
		t.Errorf("%d connections on which too much may not wait, want 1:\n%s", n, list)
	}
	changed(func() { s.Do(t, "CLIENT", "KILL", "TYPE", "pubsub") })
	kept()
	s.Do(t, "FLUSHALL")
	for get() != "k@0" { // of b's origin
		time.Sleep(10 * time.Millisecond)
	}
}
