package app

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/examples/service/internal/variant"
	"github.com/flightlock/flightlock/internal/redistest"
)

// Whoever misses a key at once, in whatever process, shares one load, and that is under a lock.
func TestAnItemIsLoadedOnce(t *testing.T) {
	w := newWorld(t, 3)
	procs := w.two()
	together(100, func(i int) {
		if status, body := procs[i%2].get("/item/7"); status != http.StatusOK || body != "value of item:7" {
			t.Errorf("%d %q", status, body)
		}
	})
	unlocked := procs[0].stats().Unlocked + procs[1].stats().Unlocked
	if loads := w.origin.counted(); loads["item:7"] != 1 || unlocked != 0 {
		t.Errorf("%v, %d without a lock", loads, unlocked)
	}
}

// Pages that share items, wanted at once in two processes beside the items themselves, load each item once.
func TestPagesShareTheirItems(t *testing.T) {
	w := newWorld(t, 1)
	procs := w.two()
	together(60, func(i int) {
		path, want := fmt.Sprintf("/page/%d", i%5), fmt.Sprintf("value of item:%d", i%5)
		if i%3 == 0 {
			path = fmt.Sprintf("/item/%d", i%5)
		}
		if status, body := procs[i%2].get(path); status != http.StatusOK || !strings.HasPrefix(body, want) {
			t.Errorf("%s: %d %q", path, status, body)
		}
	})
	loads, unlocked := w.origin.counted(), procs[0].stats().Unlocked+procs[1].stats().Unlocked
	for key, n := range loads {
		if n != 1 {
			t.Errorf("%s was loaded %d times", key, n)
		}
	}
	if len(loads) != 8 || unlocked != 0 { // pages 0 to 4 show items 0 to 7
		t.Errorf("%v, %d without a lock", loads, unlocked)
	}
}

// What the origin refuses one process is that one's alone; its callers are told whose fault it is.
func TestABrokenProcessHarmsItsOwnCallers(t *testing.T) {
	w := newWorld(t, 1)
	procs := w.two()
	if status, body := procs[1].post("/admin/token?t=wrong"); status != http.StatusOK {
		t.Fatal(status, body)
	}
	together(40, func(i int) {
		status, body := procs[i%2].get("/item/7")
		// The broken one may find the value in the cache.
		if ok := status == http.StatusOK; !ok && (i%2 == 0 || status != http.StatusBadGateway) {
			t.Errorf("p%d: %d %q", i%2+1, status, body)
		}
	})
	if status, body := procs[1].get("/item/8"); status != http.StatusBadGateway {
		t.Errorf("%d %q", status, body)
	}
	if status, body := procs[1].get("/page/20"); status != http.StatusBadGateway {
		t.Errorf("%d %q", status, body)
	}
	if status, body := procs[0].get("/item/8"); status != http.StatusOK {
		t.Errorf("%d %q", status, body)
	}
	if s := procs[1].stats(); s.Errors["origin"] < 2 || s.Loads < 2 || s.Unlocked > s.Loads {
		t.Errorf("%+v", s)
	}
}

// A caller waits no longer than its request may take, and is told so.
func TestARequestHasADeadline(t *testing.T) {
	w := newWorld(t, 1)
	w.origin.set(func(o *fakeOrigin) { o.takes = 300 * time.Millisecond })
	p := w.start("p1", "-timeout", "50ms")
	if status, body := p.get("/item/7"); status != http.StatusGatewayTimeout {
		t.Errorf("%d %q", status, body)
	}
	if s := p.stats(); s.Errors["deadline"] != 1 {
		t.Errorf("%+v", s)
	}
}

// With no node that answers, and no cache, values are loaded without a lock: the origin bears a little more.
func TestItemsGoOnWithoutRedis(t *testing.T) {
	w := newWorld(t, 1)
	p := w.start("p1")
	w.nodes[0].Kill()
	w.cache.Kill()
	together(20, func(i int) {
		if status, body := p.get(fmt.Sprintf("/item/%d", i%4)); status != http.StatusOK {
			t.Errorf("%d %q", status, body)
		}
	})
	if s := p.stats(); s.Unlocked == 0 || s.LookupErrors == 0 {
		t.Errorf("%+v", s)
	}
}

// What a value was replaced by is loaded again when it is not fresh any more.
func TestValuesAreLoadedAgain(t *testing.T) {
	w := newWorld(t, 1)
	p := w.start("p1", "-fresh", "1s")
	if status, body := p.get("/item/7"); status != http.StatusOK {
		t.Fatal(status, body)
	}
	redistest.Eventually(t, patience, "second load", func() bool {
		status, body := p.get("/item/7")
		if status != http.StatusOK {
			t.Fatal(status, body)
		}
		loads := w.origin.counted()
		return loads["item:7"] > 1
	})
}

// After the origin's call has been answered, no process serves what was there before: not a value that was
// cached, nor one whose load was under way, nor a page that shows it.
func TestAChangedItemIsServedByNobody(t *testing.T) {
	w := newWorld(t, 1)
	procs := w.two("-fresh", "1h")
	if status, body := procs[0].get("/page/7"); status != http.StatusOK ||
		!strings.Contains(body, "value of item:9") {
		t.Fatal(status, body)
	}
	holds := make(chan struct{})
	w.origin.set(func(o *fakeOrigin) { o.holds = holds })
	old := make(chan string, 1)
	go func() { _, body := procs[1].get("/item/50"); old <- body }()
	redistest.Eventually(t, patience, "load of the old value", func() bool {
		loads := w.origin.counted()
		return loads["item:50"] == 1
	})
	w.origin.set(func(o *fakeOrigin) { o.version = 1 })
	for _, id := range []string{"9", "50", "name"} {
		if status, body := procs[0].post("/item/" + id + "/changed"); status != http.StatusOK {
			t.Fatal(id, status, body)
		}
	}
	check := func(path, want string) {
		for i, p := range procs {
			if status, body := p.get(path); status != http.StatusOK || !strings.Contains(body, want) {
				t.Errorf("p%d: %s: %d %q", i+1, path, status, body)
			}
		}
	}
	check("/item/9", "value 1 of item:9")
	check("/page/7", "value 1 of item:9")
	close(holds) // the old load ends, and with it its lock, for which callers wait
	if body := <-old; body != "value of item:50" {
		t.Errorf("%q", body)
	}
	check("/item/50", "value 1 of item:50")
	if status, body := procs[0].post("/item/%7B7%7D/changed"); status != http.StatusBadRequest {
		t.Errorf("%d %q", status, body)
	}
}

// What the origin does not have is 404, and remembered, until the origin calls.
func TestAnItemThatDoesNotExist(t *testing.T) {
	w := newWorld(t, 1)
	procs := w.two("-fresh", "1h")
	w.origin.set(func(o *fakeOrigin) { o.missing = map[string]bool{"item:7": true} })
	for i := range 4 {
		if status, body := procs[i%2].get("/item/7"); status != http.StatusNotFound {
			t.Errorf("%d %q", status, body)
		}
	}
	if loads := w.origin.counted(); loads["item:7"] != 1 {
		t.Errorf("%v", loads)
	}
	w.origin.set(func(o *fakeOrigin) { o.missing = nil })
	if status, body := procs[0].post("/item/7/changed"); status != http.StatusOK {
		t.Fatal(status, body)
	}
	if status, body := procs[1].get("/item/7"); status != http.StatusOK {
		t.Errorf("%d %q", status, body)
	}
}

// The other variants serve the same values; that they load more is what they are there for.
func TestVariantsServeTheSame(t *testing.T) {
	for _, name := range []string{variant.Singleflight, variant.Redsync} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 1)
			procs := w.two("-with", name)
			together(20, func(i int) {
				status, body := procs[i%2].get("/page/7")
				if status != http.StatusOK || !strings.HasPrefix(body, "value of item:7\n") {
					t.Errorf("%d %q", status, body)
				}
			})
			if status, body := procs[0].post("/transfer?from=a1&to=a2&amount=5"); status != http.StatusOK {
				t.Errorf("%d %q", status, body)
			}
			w.reconcile(procs[0], 1)
			redistest.Eventually(t, patience, "a tick", func() bool { return len(w.ticks(procs[0])) > 0 })
			redistest.Eventually(t, patience, "a leader", func() bool { return len(w.leaders(procs[0])) > 0 })
			s := procs[0].stats().Stats.Add(procs[1].stats().Stats)
			if s.Loads == 0 || (name == variant.Singleflight) != (s.Unlocked == s.Loads) {
				t.Errorf("%+v", s)
			}
		})
	}
}

// loadOf is a Locker whose caches do nothing but keep their load.
type loadOf struct {
	variant.Locker
	load variant.Load
}

func (l *loadOf) NewCache(_ string, load variant.Load, _ variant.CacheOptions) (variant.Cache, error) {
	l.load = load
	return nil, nil
}

// stuck is a cache without answers.
type stuck struct{ variant.Cache }

func (stuck) Fetch(ctx context.Context, _ string) (string, error) {
	<-ctx.Done()
	return "", ctx.Err()
}

// A page whose items do not come within its LoadTimeout is answered 504, as a request is that ran out of time
// itself.
func TestAPageThatIsLate(t *testing.T) {
	var l loadOf
	if _, err := newPages(&l, stuck{}, "", time.Second); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err := l.load(ctx, pageKey("", "7"))
	if kind, status := classify(t.Context(), err); status != http.StatusGatewayTimeout {
		t.Errorf("%v: %s, %d", err, kind, status)
	}
}

// An id that cannot be part of a key is the client's mistake, and not an internal error; one with braces
// could name the key of another item's token.
func TestIdsThatCannotBeKeys(t *testing.T) {
	w := newWorld(t, 1)
	p := w.start("p1")
	long := strings.Repeat("x", 5000)
	if status, body := p.get("/item/" + long); status != http.StatusBadRequest {
		t.Errorf("item: %d %q", status, body)
	}
	if status, body := p.post("/transfer?from=a1&amount=1&to=" + long); status != http.StatusBadRequest {
		t.Errorf("transfer: %d %q", status, body)
	}
	for _, id := range []string{"%7B7%7Dx", "%7B7%7Dx:token"} {
		if status, body := p.get("/item/" + id); status != http.StatusBadRequest {
			t.Errorf("%s: %d %q", id, status, body)
		}
	}
	if status, body := p.get("/item/" + long[:maxID]); status != http.StatusOK {
		t.Errorf("the longest id: %d %q", status, body)
	}
}
