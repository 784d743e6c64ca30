package once_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/flightlock/flightlock/once"
	"github.com/redis/go-redis/v9"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const keep = 4 * time.Minute

type (
	job    = func(ctx context.Context, l *flightlock.Lock) error
	record = func(
		ctx context.Context, c *flightlock.Client, rdb redis.UniversalClient, name string, tick time.Time,
		keep time.Duration, fn job) (bool, error)
)

// both are the two ways.
var both = map[string]record{"RecordLast": once.RecordLast, "RecordFirst": once.RecordFirst}

// world is a Client on three nodes in memory, and a server with the records.
type world struct {
	*testing.T
	c       *flightlock.Client
	rdb     redis.UniversalClient
	nodes   []*redistest.MemNode
	clients []redis.UniversalClient
	server  *redistest.MemNode
}

// inWorlds runs a test for each of the ways, in virtual time.
func inWorlds(t *testing.T, ways map[string]record, test func(w *world, way record)) {
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 4, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				nodes[3].Mini.FlushAll() // it is no node
				test(&world{t, lockkit.New(t, flightlock.Options{}, clients[:3]...), clients[3], nodes[:3], clients[:3],
					nodes[3]}, way)
			})
		})
	}
}

// last and first are the ways by themselves.
var last, first = map[string]record{"": once.RecordLast}, map[string]record{"": once.RecordFirst}

// now is the tick of this moment.
func now() time.Time { return time.Now().Truncate(time.Second) }

// want calls way for a tick, and checks whether it calls fn, which returns result, and the error: it is
// wanted itself, or matches it.
func (w *world) want(way record, tick time.Time, result error, ran bool, want error) {
	w.Helper()
	called := false
	got, err := way(w.Context(), w.c, w.rdb, "job", tick, keep, func(context.Context, *flightlock.Lock) error {
		called = true
		return result
	})
	if got != ran || called != ran || !errors.Is(err, want) || result != nil && err != result {
		w.Errorf("ran is %v, fn was called: %v, %v; want %v, %v", got, called, err, ran, want)
	}
}

var errMine = errors.New("mine")

// Four clients call for each tick, their timers up to two seconds apart, and again later. Each tick runs
// once, none beside another one, and later ones have larger tokens.
func TestEachTickRunsOnceInTheFleet(t *testing.T) {
	inWorlds(t, both, func(w *world, way record) {
		var running, ran atomic.Int32
		var order []int64
		begin := now()
		ticks := []time.Time{begin.Add(2 * time.Second), begin.Add(3 * time.Second), begin.Add(30 * time.Second)}
		var wg sync.WaitGroup
		for i := range 4 {
			c := lockkit.New(w.T, flightlock.Options{}, w.clients...)
			call := func(tick time.Time) {
				did, err := way(w.Context(), c, w.rdb, "job", tick.In(time.FixedZone("", i)), keep,
					func(_ context.Context, l *flightlock.Lock) error {
						if running.Add(1) > 1 {
							w.Error("two run")
						}
						order = append(order, l.Fence())
						time.Sleep(15 * time.Second)
						running.Add(-1)
						return nil
					})
				if did {
					ran.Add(1)
				}
				if err != nil {
					w.Error(err)
				}
			}
			for _, tick := range ticks {
				wg.Go(func() {
					time.Sleep(time.Until(tick.Add(time.Duration(i-2) * 500 * time.Millisecond)))
					call(tick)
					time.Sleep(10 * time.Second)
					call(tick)
				})
			}
		}
		wg.Wait()
		if int(ran.Load()) != len(ticks) || len(order) != len(ticks) || order[0] >= order[1] ||
			order[1] >= order[2] {
			w.Errorf("%d runs with tokens %v, want %d", ran.Load(), order, len(ticks))
		}
		const first = "flightlock:once:lock:job:2000-01-01T00:00:02Z"
		if keys := w.server.Mini.Keys(); len(keys) != len(ticks) || keys[0] != first {
			w.Errorf("records: %v", keys)
		}
	})
}

// A tick whose fn failed, panicked or ended its goroutine, or whose process died, is run by the next caller,
// one that waits for the lock included.
func TestRecordLastTakesOver(t *testing.T) {
	inWorlds(t, last, func(w *world, way record) {
		tick := now()
		w.want(way, tick, errMine, true, errMine)
		bad := []job{
			func(context.Context, *flightlock.Lock) error { panic("on purpose") },
			func(context.Context, *flightlock.Lock) error { runtime.Goexit(); return nil },
		}
		for _, fn := range bad {
			done := make(chan struct{})
			go func() {
				defer close(done)
				testkit.Recovered(func() { way(w.Context(), w.c, w.rdb, "job", tick, keep, fn) })
			}()
			<-done
		}
		began, died := make(chan struct{}), make(chan struct{})
		go way(w.Context(), lockkit.New(w.T, flightlock.Options{}, w.clients...), w.rdb, "job", tick, keep,
			func(ctx context.Context, _ *flightlock.Lock) error {
				close(began)
				<-died
				return errMine
			})
		<-began
		go func() {
			time.Sleep(20 * time.Second) // longer than a ttl
			close(died)
		}()
		w.want(way, tick, nil, true, nil)
		w.want(way, tick, nil, false, nil)
	})
}

// A tick whose fn failed, panicked or ended its goroutine is lost, and never runs again, not even inside
// itself.
func TestRecordFirstNeverRepeats(t *testing.T) {
	inWorlds(t, first, func(w *world, way record) {
		var tick time.Time
		for i, fn := range []job{
			func(context.Context, *flightlock.Lock) error { return errMine },
			func(context.Context, *flightlock.Lock) error { panic("on purpose") },
			func(context.Context, *flightlock.Lock) error { runtime.Goexit(); return nil },
			func(ctx context.Context, _ *flightlock.Lock) error {
				ran, err := way(ctx, w.c, w.rdb, "job", tick, keep,
					func(context.Context, *flightlock.Lock) error { return nil })
				if ran || err != nil {
					w.Errorf("inside itself: %v, %v", ran, err)
				}
				return nil
			},
		} {
			tick = now().Add(time.Duration(i) * time.Second)
			done := make(chan struct{})
			go func() {
				defer close(done)
				testkit.Recovered(func() { way(w.Context(), w.c, w.rdb, "job", tick, keep, fn) })
			}()
			<-done
			w.want(way, tick, nil, false, nil)
		}
	})
}

// What was done is recorded although the lock was lost meanwhile, or ctx has ended, and the error says so;
// what was not done is not.
func TestRecordLastRecordsWhatWasDone(t *testing.T) {
	inWorlds(t, last, func(w *world, way record) {
		for i, result := range []error{nil, errMine} {
			tick := now()
			ran, err := way(w.Context(), w.c, w.rdb, "job", tick, keep,
				func(ctx context.Context, _ *flightlock.Lock) error {
					testkit.Down(true, w.nodes...)
					<-ctx.Done()
					testkit.Down(false, w.nodes...)
					return result
				})
			if !ran || !errors.Is(err, flightlock.ErrLockLost) || result != nil && !errors.Is(err, result) {
				w.Errorf("with a lost lock: %v, %v", ran, err)
			}
			time.Sleep(5 * time.Second) // go-redis dials once a second
			w.want(way, tick, nil, i == 1, nil)
		}
		tick := now()
		ctx, cancel := context.WithCancel(w.Context())
		ran, err := way(ctx, w.c, w.rdb, "job", tick, keep, func(context.Context, *flightlock.Lock) error {
			cancel()
			return nil
		})
		if !ran || err != nil {
			w.Errorf("with a ctx that has ended: %v, %v", ran, err)
		}
		w.want(way, tick, nil, false, nil)
	})
}

// While the server of the records cannot be reached nothing is run. If it fails in the middle, RecordLast
// says that the tick will run again, and it does.
func TestWithoutTheServerOfTheRecords(t *testing.T) {
	inWorlds(t, both, func(w *world, way record) {
		tick := now()
		w.server.Down(true)
		if ran, err := way(w.Context(), w.c, w.rdb, "job", tick, keep, nothing); ran || err == nil {
			w.Errorf("without a server: %v, %v", ran, err)
		}
		w.server.Down(false)
		time.Sleep(5 * time.Second)
		w.want(way, tick, nil, true, nil)
	})
	inWorlds(t, last, func(w *world, way record) {
		tick := now()
		ran, err := way(w.Context(), w.c, w.rdb, "job", tick, keep, func(context.Context, *flightlock.Lock) error {
			w.server.Down(true)
			return nil
		})
		if !ran || err == nil || !strings.Contains(err.Error(), "flightlock:once:lock:job:") {
			w.Errorf("the record cannot be stored: %v, %v", ran, err)
		}
		w.server.Down(false)
		time.Sleep(5 * time.Second)
		w.want(way, tick, nil, true, nil)
	})
}

func nothing(context.Context, *flightlock.Lock) error { return nil }

// hook changes what a client gets for SET and GET.
type hook func(name string, do func() error) error

func (hook) DialHook(next redis.DialHook) redis.DialHook { return next }
func (hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
func (h hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() != "set" && cmd.Name() != "get" {
			return next(ctx, cmd)
		}
		err := h(cmd.Name(), func() error { return next(ctx, cmd) })
		cmd.SetErr(err)
		return err
	}
}

// What the server has counts, whatever became of the replies. If that is in doubt, fn does not run.
func TestRecordFirstInDoubt(t *testing.T) {
	lost := errors.New("the reply is lost")
	for _, x := range []struct {
		name  string
		h     hook
		ran   bool
		again bool // the next call runs it
	}{
		{"sent twice", func(name string, do func() error) error {
			if name == "set" {
				_ = do()
			}
			return do()
		}, true, false},
		{"done", func(name string, do func() error) error {
			if err := do(); name == "get" {
				return err
			}
			return lost
		}, true, false},
		{"not done", func(name string, do func() error) error {
			if name == "get" {
				return do()
			}
			return lost
		}, false, true},
		{"done, but nobody knows", func(name string, do func() error) error {
			_ = do()
			return lost
		}, false, false},
		{"not done, but nobody knows", func(string, func() error) error { return lost }, false, true},
	} {
		t.Run(x.name, func(t *testing.T) {
			inWorlds(t, first, func(w *world, way record) {
				tick, healthy := now(), w.rdb
				w.rdb = w.server.Client(w.T)
				w.rdb.AddHook(x.h)
				if x.ran {
					w.want(way, tick, nil, true, nil)
				} else {
					w.want(way, tick, nil, false, lost)
				}
				w.rdb = healthy
				w.want(way, tick, nil, x.again, nil)
			})
		})
	}
}

// A tick runs from 15 s before until keep/2 after it: also by the clock when a wait for the lock, or for the
// server, is over. What is recorded is no error, however old.
func TestTicksHaveTheirTime(t *testing.T) {
	inWorlds(t, both, func(w *world, way record) {
		w.want(way, time.Now().Add(-keep/2), nil, true, nil)
		w.want(way, time.Now().Add(15*time.Second), nil, true, nil)
		old, early := time.Now().Add(-keep/2-1), time.Now().Add(15*time.Second+1)
		for _, tick := range []time.Time{old, early, {}} {
			_, err := way(w.Context(), w.c, w.rdb, "job", tick, keep, nothing)
			lockkit.WantInvalid(w.T, err, "tick", tick.UTC().Format(time.RFC3339Nano), "2m0s", "15s")
		}

		held := lockkit.Lock(w.T, w.c, "job", time.Minute)
		testkit.Must(w.T, held.AutoRefresh(w.Context(), flightlock.RefreshPolicy{}))
		tick := now()
		go func() {
			time.Sleep(keep/2 + time.Second)
			held.ReleaseAsync()
		}()
		w.want(way, tick, nil, false, flightlock.ErrInvalid)

		tick, healthy := now(), w.rdb
		w.rdb = w.server.Client(w.T)
		w.rdb.AddHook(hook(func(_ string, do func() error) error {
			err := do()
			time.Sleep(keep/2 + time.Second) // a process that is paused
			return err
		}))
		w.want(way, tick, nil, false, flightlock.ErrInvalid)

		w.rdb = healthy
		tick = now()
		began := make(chan struct{})
		go way(w.Context(), w.c, w.rdb, "job", tick, keep, func(context.Context, *flightlock.Lock) error {
			close(began)
			time.Sleep(keep * 2 / 3)
			return nil
		})
		<-began
		w.want(way, tick, nil, false, nil)
	})
}

// RecordFirst does not run fn with a lock that was lost at the record.
func TestALockThatIsLostAtTheRecord(t *testing.T) {
	inWorlds(t, first, func(w *world, way record) {
		tick := now()
		w.rdb.AddHook(hook(func(_ string, do func() error) error {
			err := do()
			testkit.Down(true, w.nodes...)
			time.Sleep(time.Minute)
			return err
		}))
		w.want(way, tick, nil, false, flightlock.ErrLockLost)
		testkit.Down(false, w.nodes...)
	})
}

// What cannot be is refused before anything is sent.
func TestBadInput(t *testing.T) {
	inWorlds(t, both, func(w *world, way record) {
		ctx, tick := w.Context(), now()
		try := func(c *flightlock.Client, rdb redis.UniversalClient, name string, keep time.Duration, fn job,
			says ...string) {
			w.Helper()
			ran, err := way(ctx, c, rdb, name, tick, keep, fn)
			if lockkit.WantInvalid(w.T, err, says...); ran {
				w.Error("ran is true")
			}
		}
		try(w.c, w.rdb, "", keep, nothing, "key")
		try(w.c, w.rdb, strings.Repeat("k", 4097), keep, nothing, "key", "4097", "4096")
		try(w.c, w.rdb, "job", time.Minute-1, nothing, "keep", "59.999999999s", "1m0s")
		try(w.c, w.rdb, "job", 367*24*time.Hour, nothing, "keep", "8808h0m0s", "8784h0m0s")
		try(w.c, w.rdb, "job", keep, nil, "fn")
		try(new(flightlock.Client), w.rdb, "job", keep, nothing, "zero")
		try(w.c, nil, "job", keep, nothing, "rdb", "nil")
		for _, o := range []redis.ClusterOptions{{ReadOnly: true}, {RouteByLatency: true}, {RouteRandomly: true}} {
			o.Addrs = []string{"127.0.0.1:1"}
			rdb := redis.NewClusterClient(&o)
			try(w.c, rdb, "job", keep, nothing, "rdb", "ClusterClient")
			rdb.Close()
		}
		ring := redis.NewRing(&redis.RingOptions{})
		try(w.c, ring, "job", keep, nothing, "rdb", "Ring")
		ring.Close()
		if keys := w.server.Mini.Keys(); len(keys) != 0 {
			w.Errorf("keys: %v", keys)
		}
		lockkit.Close(w.T, w.c)
		w.want(way, tick, nil, false, flightlock.ErrClosed)
	})
}

// A Client with a MaxTTL below 10 s has locks of that ttl.
func TestAShortMaxTTL(t *testing.T) {
	inWorlds(t, both, func(w *world, way record) {
		w.c = lockkit.New(w.T, flightlock.Options{MaxTTL: time.Second}, w.clients...)
		w.want(way, now(), nil, true, nil)
	})
}

// On a real server the documented rights suffice, and the records expire.
func TestRights(t *testing.T) {
	t.Parallel()
	server := redistest.StartServer(t)
	for _, rule := range lockkit.DocumentedACL(t) {
		rule.Apply(t, server)
	}
	rdb := server.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "pw" })
	c := lockkit.New(t, lockkit.Patient, rdb)
	for name, way := range both {
		tick := time.Now().Truncate(time.Minute)
		for i := range 2 {
			ran, err := way(t.Context(), c, rdb, name, tick, keep, nothing)
			if ran != (i == 0) || err != nil {
				t.Errorf("%s: %v, %v", name, ran, err)
			}
		}
		key := fmt.Sprintf("flightlock:once:lock:%s:%s", name, tick.UTC().Format(time.RFC3339))
		if ttl := rdb.PTTL(t.Context(), key).Val(); ttl <= keep/2 || ttl > keep {
			t.Errorf("%s expires in %v", key, ttl)
		}
	}
}
