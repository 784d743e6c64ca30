package election_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/election"
	"github.com/flightlock/flightlock/fenced"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type work = func(ctx context.Context, l *flightlock.Lock) error

func untilTheEnd(ctx context.Context, _ *flightlock.Lock) error { <-ctx.Done(); return ctx.Err() }

// campaign campaigns on a goroutine. stop ends it and returns its error.
func campaign(t *testing.T, c *flightlock.Client, value string, fn work) (stop func() error) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- election.Campaign(ctx, c, "k", value, 10*time.Second, fn) }()
	return func() error {
		cancel()
		return <-ended
	}
}

func wantLeader(t *testing.T, c *flightlock.Client, want string) (token int64) {
	t.Helper()
	value, token, until, err := election.Leader(t.Context(), c, "k")
	if value != want || err != nil || time.Until(until) < 6*time.Second || time.Until(until) > 10*time.Second {
		t.Errorf("%q leads until in %v, %v; want %q", value, time.Until(until), err, want)
	}
	return token
}

func wantNobody(t *testing.T, c *flightlock.Client) {
	t.Helper()
	if value, token, until, err := election.Leader(t.Context(), c, "k"); !errors.Is(err, election.ErrNoLeader) ||
		value != "" || token != 0 || !until.IsZero() {
		t.Errorf("%q leads with %d until %v, %v; want nobody", value, token, until, err)
	}
}

// The value is on the nodes when fn begins, for as long as fn runs, and not afterwards. The next process
// leads within a round trip of the end of the first one's ctx, and with a larger token.
func TestALeaderHandsOverOnShutdown(t *testing.T) {
	for _, n := range []int{1, 3, 5} {
		testkit.Bubble(t, n, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
			wantNobody(t, a)
			var first int64
			began := make(chan string, 2)
			lead := func(c *flightlock.Client, name string) work {
				return func(ctx context.Context, l *flightlock.Lock) error {
					if token := wantLeader(t, c, name); token != l.Fence() || token <= first {
						t.Errorf("%s has token %d, its lock %d, the leader before %d", name, token, l.Fence(), first)
					}
					first = l.Fence()
					began <- name
					return untilTheEnd(ctx, l)
				}
			}
			stop := campaign(t, a, "a", lead(a, "a"))
			if <-began != "a" {
				t.Error("b leads")
			}
			stopB := campaign(t, b, "b", lead(b, "b"))
			time.Sleep(time.Minute)
			wantLeader(t, b, "a")
			ended := time.Now()
			if err := stop(); err != context.Canceled {
				t.Errorf("the first leader returned %v", err)
			}
			if <-began != "b" || time.Since(ended) > 50*time.Millisecond {
				t.Errorf("the next leader after %v", time.Since(ended))
			}
			if err := stopB(); err != context.Canceled {
				t.Errorf("the next leader returned %v", err)
			}
			wantNobody(t, a)
		})
	}
}

// A campaign survives the loss of its lock and an outage, whatever fn returns when it has lost the lock; fn's
// ctx ends before another one leads.
func TestACampaignSurvivesLossAndOutages(t *testing.T) {
	for _, result := range []error{nil, errors.New("cut short")} {
		testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
			var leading atomic.Int32
			var terms [2]atomic.Int32
			lead := func(i int) work {
				return func(ctx context.Context, l *flightlock.Lock) error {
					terms[i].Add(1)
					if leading.Add(1) > 1 {
						t.Error("two lead")
					}
					<-ctx.Done()
					leading.Add(-1)
					return result
				}
			}
			stopA, stopB := campaign(t, a, "a", lead(0)), campaign(t, b, "b", lead(1))
			time.Sleep(time.Second)
			for range 3 {
				testkit.Down(true, nodes[:2]...)
				time.Sleep(15 * time.Second)
				_, _, _, err := election.Leader(t.Context(), a, "k")
				if !errors.Is(err, flightlock.ErrUnavailable) || strings.Contains(err.Error(), "\n") {
					t.Errorf("without a majority the leader is %v", err)
				}
				testkit.Down(false, nodes[:2]...)
				time.Sleep(5 * time.Second)
				if leading.Load() != 1 {
					t.Error("nobody leads after an outage")
				}
			}
			if terms[0].Load()+terms[1].Load() != 4 {
				t.Errorf("%d and %d terms, want 4", terms[0].Load(), terms[1].Load())
			}
			for _, stop := range []func() error{stopA, stopB} {
				if err := stop(); err != result && !errors.Is(err, context.Canceled) {
					t.Errorf("got %v", err)
				}
			}
		})
	}
}

// nil resigns, an error ends the campaign and is returned unchanged, and a panic resigns as well.
func TestWhatFnReturnsEndsTheCampaign(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		mine := errors.New("mine")
		for _, want := range []error{nil, mine, flightlock.ErrNotAcquired, flightlock.ErrUnavailable} {
			err := election.Campaign(t.Context(), c, "k", "a", time.Second,
				func(context.Context, *flightlock.Lock) error {
					return want
				})
			if err != want {
				t.Errorf("got %v, want %v", err, want)
			}
			wantNobody(t, c)
		}
		if v := testkit.Recovered(func() {
			election.Campaign(t.Context(), c, "k", "a", time.Second,
				func(context.Context, *flightlock.Lock) error { panic("on purpose") })
		}); v != "on purpose" {
			t.Errorf("recovered %v", v)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			election.Campaign(t.Context(), c, "k", "a", time.Second,
				func(context.Context, *flightlock.Lock) error { runtime.Goexit(); return nil })
		}()
		<-done
		wantNobody(t, c)
		lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
	})
}

// The value outlives nodes that lose it, and a slow or failed minority; it ends with a leader that dies.
func TestTheValueLastsAsLongAsItsLeader(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		stop := campaign(t, a, "a", untilTheEnd)
		time.Sleep(time.Second)
		for i := range 12 {
			testkit.Lose("flightlock:{election:lock:k}", nodes[i%3])
			nodes[(i+1)%3].Stall(true)
			time.Sleep(4 * time.Second)
			nodes[(i+1)%3].Stall(false)
			time.Sleep(4 * time.Second)
			wantLeader(t, b, "a")
		}
		testkit.Down(true, nodes...) // a can neither renew nor withdraw: as if it had died
		time.Sleep(time.Second)
		stop()
		testkit.Down(false, nodes...)
		time.Sleep(10 * time.Second)
		wantNobody(t, b)
	})
}

// Between any two majorities one node knows the later leader, and a withdrawn value is not read on any other.
func TestAnyMajorityKnowsTheLastLeader(t *testing.T) {
	testkit.Bubble(t, 5, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		watching := func(ctx context.Context, l *flightlock.Lock) error {
			for i := range nodes {
				testkit.Down(true, nodes[i], nodes[(i+1)%5])
				wantLeader(t, c, "a")
				testkit.Down(false, nodes...)
				time.Sleep(time.Second)
			}
			testkit.Down(true, nodes[0], nodes[1]) // they keep the value, which is withdrawn on the others
			return nil
		}
		testkit.Must(t, election.Campaign(t.Context(), c, "k", "a", 10*time.Second, watching))
		testkit.Down(false, nodes...)
		time.Sleep(500 * time.Millisecond)
		for i := range nodes {
			testkit.Down(true, nodes[i], nodes[(i+3)%5])
			wantNobody(t, c)
			testkit.Down(false, nodes...)
			time.Sleep(1500 * time.Millisecond) // go-redis dials once a second
		}
	})
}

// fn does not begin before a majority has the value.
func TestFnWaitsUntilItsValueIsStored(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		const key = "flightlock:{election:lock:k}:token"
		for _, n := range nodes[:2] { // a list, so that writing the token fails
			n.Mini.Lpush(key, "x")
		}
		var began atomic.Bool
		stop := campaign(t, c, "a", func(ctx context.Context, l *flightlock.Lock) error {
			began.Store(true)
			return untilTheEnd(ctx, l)
		})
		time.Sleep(time.Minute)
		if began.Load() {
			t.Error("fn began, and a majority does not have its value")
		}
		testkit.Lose(key, nodes[0])
		time.Sleep(time.Second)
		if !began.Load() {
			t.Error("fn has not begun")
		}
		wantLeader(t, c, "a")
		stop()
	})
}

// A leader whose value cannot be stored resigns within a ttl, and says so: another one may reach the nodes.
func TestALeaderWithoutAValueResigns(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		var closed []redis.UniversalClient
		for _, n := range nodes {
			closed = append(closed, n.Client(t))
		}
		var log bytes.Buffer
		a := lockkit.New(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}, closed...)
		for _, rdb := range closed { // locks use connections of their own
			testkit.Must(t, rdb.Close())
		}
		stopA := campaign(t, a, "a", func(context.Context, *flightlock.Lock) error {
			t.Error("a leads without a value")
			return nil
		})
		time.Sleep(time.Second)
		b := lockkit.New(t, flightlock.Options{}, clients...)
		stopB := campaign(t, b, "b", untilTheEnd)
		time.Sleep(10 * time.Second)
		wantLeader(t, b, "b")
		stopA()
		stopB()
		lockkit.Close(t, a)
		if !strings.Contains(log.String(), "cannot be stored") || !strings.Contains(log.String(), "closed") {
			t.Errorf("logged: %s", &log)
		}
	})
}

// A leader that was paused beyond its ttl changes nothing: neither what it guards by its token nor who leads.
// With FLIGHTLOCK_LONG=1 a thousand leaders try.
func TestOldLeadersAreRefused(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c, ctx := lockkit.New(t, flightlock.Options{}, clients...), t.Context()
		rdb := clients[0]
		var old int64
		terms, refused := testkit.Full(1000, 100), 0
		for i := range terms + 1 {
			lead := func(ctx context.Context, l *flightlock.Lock) error {
				testkit.Must(t, fenced.Set(ctx, rdb, "state", fmt.Sprint(i), l.Fence(), 0))
				if i > 0 && errors.Is(fenced.Set(ctx, rdb, "state", "old", old, 0), fenced.ErrStale) {
					refused++
				}
				for _, rdb := range clients {
					_ = fenced.Set(ctx, rdb, "flightlock:{election:lock:k}", fmt.Sprintf("%d old", old), old, time.Second)
				}
				if value, token, _, err := election.Leader(ctx, c, "k"); value != "a" || token != l.Fence() ||
					err != nil {
					t.Errorf("%q leads with %d, %v; want %d", value, token, err, l.Fence())
				}
				old = l.Fence()
				return nil
			}
			testkit.Must(t, election.Campaign(ctx, c, "k", "a", time.Second, lead))
		}
		if got := rdb.Get(ctx, "state").Val(); got != fmt.Sprint(terms) || refused != terms {
			t.Errorf("%d of %d old writes were refused, and the value is %q", refused, terms, got)
		}
	})
}

// Observe yields each change once, errors too, and ends with its ctx.
func TestObserve(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		ctx, cancel := context.WithCancel(t.Context())
		var seen []string
		var wg sync.WaitGroup
		wg.Go(func() {
			for term, err := range election.Observe(ctx, c, "k") {
				switch {
				case errors.Is(err, election.ErrNoLeader):
					seen = append(seen, "nobody")
				case errors.Is(err, flightlock.ErrUnavailable):
					seen = append(seen, "unavailable")
				case err != nil:
					seen = append(seen, err.Error())
				default:
					seen = append(seen, term.Value)
				}
			}
		})
		time.Sleep(5 * time.Second)
		for _, value := range []string{"a", "a", "", "two words"} {
			stop := campaign(t, c, value, untilTheEnd)
			time.Sleep(5*time.Second + 20*time.Millisecond) // never when Observe reads
			stop()
		}
		time.Sleep(5 * time.Second)
		testkit.Down(true, nodes...)
		time.Sleep(20 * time.Second)
		cancel()
		wg.Wait()
		testkit.Down(false, nodes...)
		time.Sleep(5 * time.Second) // go-redis dials once a second
		if got := strings.Join(seen, ", "); got != "nobody, a, a, , two words, nobody, unavailable" {
			t.Errorf("seen: %q", got)
		}
	})
}

// Close ends a campaign and an observation. What cannot be is refused.
func TestCloseAndBadInput(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c, ctx := lockkit.New(t, flightlock.Options{}, clients...), t.Context()
		fn := func(context.Context, *flightlock.Lock) error { return nil }
		lockkit.WantInvalid(t, election.Campaign(ctx, c, "k", "v", time.Second, nil), "fn")
		lockkit.WantInvalid(t, election.Campaign(ctx, c, "", "v", time.Second, fn), "key")
		lockkit.WantInvalid(t, election.Campaign(ctx, c, "k", "v", time.Millisecond, fn), "ttl", "1ms")
		lockkit.WantInvalid(t, election.Campaign(ctx, c, "k", strings.Repeat("v", 4097), time.Second, fn), "4097",
			"4096")
		lockkit.WantInvalid(t, election.Campaign(ctx, new(flightlock.Client), "k", "v", time.Second, fn), "zero")
		_, _, _, err := election.Leader(ctx, c, "")
		lockkit.WantInvalid(t, err, "key")
		for _, err := range election.Observe(ctx, c, "") {
			lockkit.WantInvalid(t, err, "key")
		}
		ended := make(chan error)
		go func() { ended <- election.Campaign(ctx, c, "k", "v", time.Second, untilTheEnd) }()
		time.Sleep(time.Second)
		lockkit.Close(t, c)
		if err := <-ended; !errors.Is(err, flightlock.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
		for _, err := range election.Observe(ctx, c, "k") {
			if !errors.Is(err, flightlock.ErrClosed) {
				t.Errorf("after Close: %v", err)
			}
		}
		other := lockkit.New(t, flightlock.Options{}, clients...)
		wantNobody(t, other)
	})
}

// On a real server the documented rights and +eval suffice, also where KeyPrefix and name have braces.
func TestRights(t *testing.T) {
	t.Parallel()
	server := redistest.StartServer(t)
	for _, rule := range lockkit.DocumentedACL(t) {
		rule.Apply(t, server)
	}
	server.Do(t, "ACL", "SETUSER", "app", "+eval")
	rdb := server.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "pw" })
	for _, prefix := range []string{"", "lock:{x", "lock:}"} {
		c := lockkit.New(t, flightlock.Options{NodeTimeout: lockkit.Patience, KeyPrefix: prefix}, rdb)
		testkit.Must(t, election.Campaign(t.Context(), c, "}{k}", "a", 10*time.Second,
			func(ctx context.Context, l *flightlock.Lock) error {
				value, token, _, err := election.Leader(ctx, c, "}{k}")
				if value != "a" || token != l.Fence() {
					t.Errorf("with %q %q leads with %d", prefix, value, token)
				}
				return err
			}))
	}
}
