package flightlock_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// detach detaches l, and passes it through its text, as to another process.
func detach(t *testing.T, l *flightlock.Lock) (d flightlock.Detached) {
	t.Helper()
	was, err := l.Detach()
	testkit.Must(t, err)
	text, err := was.MarshalText()
	testkit.Must(t, err)
	testkit.Must(t, d.UnmarshalText(text))
	return d
}

// wantKey checks who has the key on how many nodes; "" is nobody.
func wantKey(t *testing.T, nodes []*redistest.MemNode, key, owner string, want int) {
	t.Helper()
	n := 0
	for _, m := range nodes {
		got, _ := m.Mini.Get("lock:" + key)
		if got == owner {
			n++
		}
	}
	if n != want {
		t.Errorf("%d nodes have %q for %q, want %d", n, key, owner, want)
	}
}

// A lock that is detached is over here, and a lock of whoever attaches it: with its token, and its full ttl;
// nobody else gets it in between. Of two that attach it, the second gets ErrNotHeld.
func TestALockIsFinishedElsewhere(t *testing.T) {
	for _, n := range []int{1, 3} {
		testkit.Bubble(t, n, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			a, b, other := lockkit.New(t, flightlock.Options{}, clients...),
				lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
			ctx := t.Context()
			l := lockkit.Lock(t, a, "k", 10*time.Second)
			testkit.Must(t, l.AutoRefresh(ctx, flightlock.RefreshPolicy{}))
			inner := l.Context(ctx)
			synctest.Wait()
			sent := a.Stats().Commands
			d := detach(t, l)
			if context.Cause(inner) != context.Canceled || !errors.Is(l.Err(), flightlock.ErrNotHeld) {
				t.Errorf("the lock is not over: %v, %v", context.Cause(inner), l.Err())
			}
			for name, err := range map[string]error{"Release": l.Release(ctx), "Refresh": l.Refresh(ctx)} {
				if !errors.Is(err, flightlock.ErrNotHeld) {
					t.Errorf("%s: %v", name, err)
				}
			}
			if _, err := l.Detach(); !errors.Is(err, flightlock.ErrNotHeld) {
				t.Errorf("a second Detach: %v", err)
			}
			time.Sleep(7 * time.Second)
			if now := a.Stats(); now.Commands != sent || now.Held != 0 {
				t.Errorf("something was sent for a lock that is detached: %+v", now)
			}
			if _, err := other.TryLock(ctx, "k", time.Second); !errors.Is(err, flightlock.ErrNotAcquired) {
				t.Errorf("another got it: %v", err)
			}
			m, err := b.Attach(ctx, d)
			testkit.Must(t, err)
			if m.Fence() != l.Fence() || m.Key() != "k" || m.Owner() == l.Owner() ||
				time.Until(m.Until()) < 9*time.Second {
				t.Errorf("attached: %d %q %q for %v", m.Fence(), m.Key(), m.Owner(), time.Until(m.Until()))
			}
			synctest.Wait()
			wantKey(t, nodes, "k", m.Owner(), n)
			for _, c := range []*flightlock.Client{a, b, other} {
				if _, err := c.Attach(ctx, d); !errors.Is(err, flightlock.ErrNotHeld) {
					t.Errorf("a second Attach: %v", err)
				}
			}
			testkit.Must(t, m.Refresh(ctx))
			testkit.Must(t, m.Release(ctx))
			synctest.Wait()
			wantKey(t, nodes, "k", "", n)
			next := lockkit.Lock(t, other, "k", time.Second)
			if next.Fence() <= m.Fence() {
				t.Errorf("the next token is %d after %d", next.Fence(), m.Fence())
			}
			for _, c := range []*flightlock.Client{a, b} {
				if _, err := c.Attach(ctx, d); !errors.Is(err, flightlock.ErrNotHeld) {
					t.Errorf("Attach after another had it: %v", err)
				}
			}
			testkit.Must(t, next.Err())
		})
	}
}

// A detached lock that nobody attaches ends with its ttl, and one of which the Client is closed can be
// attached.
func TestADetachedLockEndsWithItsTTL(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		d, d2 := detach(t, lockkit.Lock(t, a, "k", time.Second)), detach(t, lockkit.Lock(t, a, "k2", time.Second))
		lockkit.Close(t, a)
		m, err := b.Attach(t.Context(), d2)
		testkit.Must(t, err)
		testkit.Must(t, m.Release(t.Context()))
		time.Sleep(time.Second)
		if _, err := b.Attach(t.Context(), d); !errors.Is(err, flightlock.ErrNotHeld) {
			t.Errorf("after its ttl: %v", err)
		}
		synctest.Wait()
		wantKey(t, nodes, "k", "", 3)
		lockkit.Lock(t, b, "k", time.Second)
	})
}

// Callers of the process that detaches wait on, and are served when the lock is released elsewhere; so are
// those of the process that attaches.
func TestWaitersOfADetachedLock(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, a, "k", 10*time.Second)
		served := make(chan error, 2)
		for _, c := range []*flightlock.Client{a, b} {
			go func() {
				m, err := c.SingleFlightLock(t.Context(), "k", time.Second, nil)
				if err == nil {
					err = m.Release(t.Context())
				}
				served <- err
			}()
		}
		time.Sleep(100 * time.Millisecond)
		d := detach(t, l)
		time.Sleep(2 * time.Second)
		m, err := b.Attach(t.Context(), d)
		testkit.Must(t, err)
		time.Sleep(2 * time.Second)
		if len(served) > 0 || m.Err() != nil {
			t.Fatalf("%d were served while it is held: %v", len(served), m.Err())
		}
		testkit.Must(t, m.Release(t.Context()))
		time.Sleep(time.Second)
		for range 2 {
			select {
			case err := <-served:
				testkit.Must(t, err)
			default:
				t.Error("one who waits was not served")
			}
		}
	})
}

// A caller of the process that detaches, which gives up later, takes nothing from the detached lock: even
// where the process contends for the key in the name of that lock's owner.
func TestAWaiterThatGivesUpLeavesADetachedLock(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a := lockkit.New(t, flightlock.Options{DisableNotify: true}, clients...)
		b := lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, a, "k", 10*time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		waits := make(chan error, 2)
		for _, c := range []*flightlock.Client{b, a} {
			go func() {
				_, err := c.SingleFlightLock(ctx, "k", 10*time.Second, nil)
				waits <- err
			}()
		}
		time.Sleep(2 * time.Second)
		testkit.Must(t, l.Refresh(ctx)) // meets the rival
		time.Sleep(100 * time.Millisecond)
		d := detach(t, l)
		time.Sleep(500 * time.Millisecond)
		cancel()
		for range 2 {
			if err := <-waits; !errors.Is(err, context.Canceled) {
				t.Errorf("one who waits: %v", err)
			}
		}
		time.Sleep(300 * time.Millisecond)
		wantKey(t, nodes, "k", l.Owner(), 3)
		m, err := b.Attach(t.Context(), d)
		testkit.Must(t, err)
		testkit.Must(t, m.Release(t.Context()))
	})
}

// An Attach whose outcome is not known leaves the key as it is, and the next one by the same Client settles
// it: whichever nodes the first has reached.
func TestAnAttachOfUnknownOutcomeIsSettled(t *testing.T) {
	for down := range 8 {
		for _, back := range []bool{true, false} {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
				lockkit.LockAndRelease(t, b)
				synctest.Wait() // until all nodes have released it: Release waits for a majority
				l := lockkit.Lock(t, a, "k", 10*time.Second)
				synctest.Wait() // all nodes have it
				d := detach(t, l)
				var hit []*redistest.MemNode
				for i, m := range nodes {
					if down&(1<<i) != 0 {
						hit = append(hit, m)
					}
				}
				testkit.Stall(true, hit...)
				m, err := b.Attach(t.Context(), d)
				if (err == nil) != (len(hit) < 2) {
					t.Fatalf("%d nodes do not answer: %v", len(hit), err)
				}
				if err != nil && !errors.Is(err, flightlock.ErrUnavailable) {
					t.Errorf("the outcome is not known: %v", err)
				}
				if !back {
					_, err2 := a.TryLock(t.Context(), "k", time.Second)
					if err2 == nil {
						t.Error("another got it")
					}
				}
				testkit.Stall(false, hit...)
				time.Sleep(2 * time.Second)
				if err != nil {
					m, err = b.Attach(t.Context(), d)
					testkit.Must(t, err)
				}
				synctest.Wait()
				if _, err := a.Attach(t.Context(), d); !errors.Is(err, flightlock.ErrNotHeld) {
					t.Errorf("another attached it, too: %v", err)
				}
				testkit.Must(t, m.Refresh(t.Context()))
				testkit.Must(t, m.Release(t.Context()))
				time.Sleep(15 * time.Second) // what a node had, which was not reached
				wantKey(t, nodes, "k", "", 3)
			})
		}
	}
}

// A ctx that ends while the nodes have not answered leaves the lock to the next Attach.
func TestAnAttachWhoseContextEnds(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		lockkit.LockAndRelease(t, b)
		for after := range 12 { // a round trip takes 10ms
			d := detach(t, lockkit.Lock(t, a, fmt.Sprint("k", after), 10*time.Second))
			testkit.Delay(5*time.Millisecond, nodes...)
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(after)*time.Millisecond)
			m, err := b.Attach(ctx, d)
			cancel()
			if err != nil {
				if !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("after %dms: %v", after, err)
				}
				m, err = b.Attach(t.Context(), d)
				testkit.Must(t, err)
			}
			testkit.Delay(0, nodes...)
			testkit.Must(t, m.Release(t.Context()))
			time.Sleep(time.Second)
			wantKey(t, nodes, d.Key(), "", 3)
		}
	})
}

// While one Attach is under way, another one by the same Client says that the outcome is not known yet: it is
// not ErrNotHeld, because the first may fail.
func TestTwoAttachesOfOneClient(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		lockkit.LockAndRelease(t, b)
		synctest.Wait()
		d := detach(t, lockkit.Lock(t, a, "k", 10*time.Second))
		synctest.Wait()
		testkit.Stall(true, nodes...)
		first := make(chan error)
		go func() {
			_, err := b.Attach(t.Context(), d)
			first <- err
		}()
		synctest.Wait()
		if _, err := b.Attach(t.Context(), d); !errors.Is(err, flightlock.ErrUnavailable) ||
			!strings.Contains(err.Error(), "another Attach") {
			t.Errorf("while another one is under way: %v", err)
		}
		if err := <-first; !errors.Is(err, flightlock.ErrUnavailable) {
			t.Errorf("the nodes do not answer: %v", err)
		}
		testkit.Stall(false, nodes...)
		time.Sleep(time.Second)
		m, err := b.Attach(t.Context(), d)
		testkit.Must(t, err)
		if _, err := b.Attach(t.Context(), d); !errors.Is(err, flightlock.ErrNotHeld) {
			t.Errorf("after it was attached: %v", err)
		}
		testkit.Must(t, m.Release(t.Context()))
	})
}

// A token that somebody may have had in between is not used again.
func TestAnAttachedLockHasANewTokenIfOthersHadSome(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, a, "k", 10*time.Second)
		d := detach(t, l)
		synctest.Wait()
		for i, m := range nodes[:2] { // as if the key had been another's on these, and had come back
			for _, key := range m.Mini.Keys() {
				if strings.Contains(key, ":fence:") {
					_, err := m.Mini.Incr(key, 100*(i+1))
					testkit.Must(t, err)
				}
			}
		}
		m, err := b.Attach(t.Context(), d)
		testkit.Must(t, err)
		if m.Fence() <= l.Fence()+100 {
			t.Errorf("the token is %d after %d", m.Fence(), l.Fence())
		}
		testkit.Must(t, m.Release(t.Context()))
		if next := lockkit.Lock(t, a, "k", time.Second); next.Fence() <= m.Fence() {
			t.Errorf("the next token is %d after %d", next.Fence(), m.Fence())
		}
	})
}

// A chain of processes passes one lock on, with one token, by any of its Locks.
func TestALockThatIsPassedOnAndOn(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		var c [2]*flightlock.Client
		for i := range c {
			c[i] = lockkit.New(t, flightlock.Options{}, clients...)
		}
		first := lockkit.Lock(t, c[0], "k", time.Second)
		l := first
		for i := range 10 {
			m, err := c[i%2].Attach(t.Context(), detach(t, l))
			testkit.Must(t, err)
			if m.Fence() != first.Fence() {
				t.Errorf("token %d after %d", m.Fence(), first.Fence())
			}
			time.Sleep(700 * time.Millisecond)
			testkit.Must(t, m.Err())
			l = m
		}
		testkit.Must(t, l.Release(t.Context()))
	})
}

// What cannot be detached or attached says why, and stays as it is.
func TestWhatCannotBeDetached(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{MaxTTL: time.Minute}, clients...)
		l := lockkit.Lock(t, c, "k", time.Minute)
		inner, err := c.TryLock(l.Context(t.Context()), "k", time.Second)
		testkit.Must(t, err)
		for _, nested := range []*flightlock.Lock{l, inner} {
			_, err := nested.Detach()
			lockkit.WantInvalid(t, err, "nested")
			testkit.Must(t, nested.Err())
		}
		testkit.Must(t, inner.Release(t.Context()))
		d := detach(t, l)
		short := lockkit.New(t, flightlock.Options{MaxTTL: time.Second}, clients...)
		_, err = short.Attach(t.Context(), d)
		lockkit.WantInvalid(t, err, "ttl", "1m0s", "1s")
		lingers := lockkit.New(t, flightlock.Options{Linger: time.Second, KeyPrefix: "p:"}, clients...)
		lockkit.Lock(t, lingers, "a", time.Second) // subscribes
		synctest.Wait()
		kept := lockkit.Lock(t, lingers, "b", time.Second)
		_, err = kept.Detach()
		lockkit.WantInvalid(t, err, "retained", "Linger")
		testkit.Must(t, kept.Err())
		_, err = c.Attach(t.Context(), flightlock.Detached{})
		lockkit.WantInvalid(t, err)
		_, err = flightlock.Detached{}.MarshalText()
		lockkit.WantInvalid(t, err)
		_, err = new(flightlock.Client).Attach(t.Context(), d)
		lockkit.WantInvalid(t, err)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := c.Attach(ended, d); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		m, err := c.Attach(t.Context(), d) // all that has changed nothing
		testkit.Must(t, err)
		lockkit.Close(t, c)
		if !errors.Is(m.Err(), flightlock.ErrClosed) && !errors.Is(m.Err(), flightlock.ErrNotHeld) {
			t.Error(m.Err())
		}
		if _, err := c.Attach(t.Context(), d); !errors.Is(err, flightlock.ErrClosed) {
			t.Error(err)
		}
	})
}

// Whatever prints a Detached, or something that contains one, does not print what is needed to attach it. Its
// text does, and no text but that is one.
func TestADetachedIsASecret(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{Label: "the-label"}, clients...)
		l := lockkit.Lock(t, c, "a key, with spaces\n", time.Minute)
		d, err := l.Detach()
		testkit.Must(t, err)
		text, err := d.MarshalText()
		testkit.Must(t, err)
		within := struct{ d flightlock.Detached }{d}
		var log strings.Builder
		slog.New(slog.NewTextHandler(&log, nil)).Info("x", "d", d, "within", within)
		slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "d", d)
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%d", "%x"} {
			fmt.Fprintf(&log, verb+verb, d, within)
		}
		if strings.Contains(log.String(), "the-label#") || strings.Contains(log.String(), string(text)) ||
			strings.Contains(log.String(), fmt.Sprintf("%x", l.Owner())) {
			t.Errorf("the secret is in %s", log.String())
		}
		if !strings.Contains(d.String(), `"a key, with spaces\n"`) {
			t.Errorf("the key is not in %s", d)
		}
		for i := range text {
			var other flightlock.Detached
			err := other.UnmarshalText(text[:i])
			lockkit.WantInvalid(t, err)
			if strings.Contains(err.Error(), "fl1") {
				t.Errorf("the error has the text: %v", err)
			}
		}
		var passed struct{ D flightlock.Detached }
		data, err := json.Marshal(struct{ D flightlock.Detached }{d})
		testkit.Must(t, err)
		testkit.Must(t, json.Unmarshal(data, &passed))
		m, err := c.Attach(t.Context(), passed.D)
		testkit.Must(t, err)
		testkit.Must(t, m.Release(t.Context()))
	})
}

// FuzzDetachedText has no text read that MarshalText would not write.
func FuzzDetachedText(f *testing.F) {
	f.Add([]byte("fl1.MSAyIDMgNCAxIDEgb2s"))
	f.Add([]byte(""))
	f.Fuzz(func(t *testing.T, text []byte) {
		var d, again flightlock.Detached
		if d.UnmarshalText(text) != nil {
			return
		}
		written, err := d.MarshalText()
		testkit.Must(t, err)
		testkit.Must(t, again.UnmarshalText(written))
		if d.Key() == "" || again.String() != d.String() {
			t.Errorf("%v, then %v", d, again)
		}
	})
}
