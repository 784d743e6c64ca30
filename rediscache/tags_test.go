package rediscache_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// tagged are options with the tags that every value has.
func tagged(opts options, names ...string) options {
	opts.Tags = func(string, string) []string { return names }
	return opts
}

// byKey tags a value with the first letter of its key, and with all.
func byKey(key, _ string) []string { return []string{key[:1], "all"} }

// InvalidateTag invalidates what has the tag in all processes, and nothing else.
func TestInvalidateTag(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		opts := options{Name: "user", Tags: byKey, NotFoundFor: time.Minute}
		c, other := w.cache(opts), w.cache(opts)
		for _, key := range []string{"a1", "a2", "b1"} {
			w.want(key, key+"@0", c)
		}
		testkit.Must(t, c.SetMany(t.Context(), map[string]string{"a3": "a3@0", "b2": "b2@0"}))
		testkit.Must(t, c.Set(t.Context(), "a4", "a4@0"))
		w.origin.version.Add(1)
		testkit.Must(t, other.InvalidateTag(t.Context(), "a"))
		for _, key := range []string{"a1", "a2", "a3", "a4"} {
			w.want(key, key+"@1", c, other)
		}
		w.want("b1", "b1@0", c, other)
		w.want("b2", "b2@0", c, other)
		w.origin.version.Add(1)
		testkit.Must(t, c.InvalidateTag(t.Context(), "none", "all", "all"))
		for _, key := range []string{"a1", "a4", "b1", "b2"} {
			w.want(key, key+"@2", c, other)
		}
		w.origin.version.Add(1)
		// those that were loaded again are in their tags again
		testkit.Must(t, c.InvalidateTag(t.Context(), "b", "a"))
		w.want("a1", "a1@3", c)
		w.want("b2", "b2@3", c)
		opts.Local = time.Second
		near := w.cache(opts)
		w.want("a1", "a1@3", near)
		w.origin.version.Add(1)
		testkit.Must(t, near.InvalidateTag(t.Context(), "a"))
		w.want("a1", "a1@4", near)
	})
}

// A load that began before an InvalidateTag is not stored, though its key was in no tag yet; and who comes
// after it has another value, also in the process that loads.
func TestALoadThroughAnInvalidateTag(t *testing.T) {
	t.Parallel()
	cases := []string{"nothing", "a stale value", "a value with other tags"}
	bubbles(t, cases, func(t *testing.T, w *world, before string) {
		tags := []string{"other"}
		c := w.cache(options{Stale: time.Hour, Tags: func(string, string) []string { return tags }})
		other := w.cache(options{Stale: time.Hour, Tags: func(string, string) []string { return tags }})
		switch before {
		case "a stale value":
			tags = []string{"t"}
			w.want("k", "k@0", c)
			time.Sleep(time.Minute)
		case "a value with other tags":
			w.want("k", "k@0", c)
			time.Sleep(time.Minute)
		}
		tags = []string{"t"}
		var joined sync.WaitGroup
		joined.Go(func() { w.want("k", "k@0", c) })
		time.Sleep(500 * time.Millisecond)
		w.origin.version.Add(1)
		testkit.Must(t, other.InvalidateTag(t.Context(), "t"))
		if before == "a value with other tags" { // it may be served, but what is loaded is not
			time.Sleep(time.Second)
			wantPeek(t, c, "k", "k@0", fetch.Stale, false)
			w.want("k", "k@0", c)
			time.Sleep(1500 * time.Millisecond)
		}
		w.want("k", "k@1", c, other)
		joined.Wait()
		if n := c.Stats().Outdated; n != 1 {
			t.Errorf("%d values were outdated", n)
		}
	})
}

// A key that is stored again with its tag, while an InvalidateTag has its entry invalidated and has not
// removed it from the tag yet, stays in the tag.
func TestAKeyThatIsTaggedAgainMeanwhile(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 0
		c, again := w.cache(tagged(options{Name: "user"}, "t")), 0
		w.want("k", "k@0", c)
		rdb := w.values.Client(t, honouring)
		invalidates := w.cacheOf(rdb, tagged(options{Name: "user"}, "t"))
		rdb.AddHook(before(func(cmds []redis.Cmder) {
			if last := cmds[len(cmds)-1].Args(); again < 2 && len(last) > 6 && last[5] == "k" { // leave.lua
				again++
				w.origin.version.Add(1)
				w.want("k", "k@1", c)
			}
		}))
		testkit.Must(t, invalidates.InvalidateTag(t.Context(), "t"))
		if again == 0 {
			t.Fatal("nothing came in between")
		}
		w.want("k", "k@1", c)
		w.origin.version.Store(7)
		testkit.Must(t, c.InvalidateTag(t.Context(), "t"))
		w.want("k", "k@7", c)
	})
}

// Tags that are bad, or are needed and not there, are ErrInvalid; a value with bad tags is served and not
// stored.
func TestBadTags(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(options{})
		wantIs(t, flightlock.ErrInvalid, c.InvalidateTag(t.Context(), "t"))
		var last atomic.Pointer[error]
		var names atomic.Pointer[[]string]
		c = w.cache(options{
			Tags:    func(string, string) []string { return *names.Load() },
			OnError: func(_, _ string, err error) { last.Store(&err) },
		})
		long := strings.Repeat("t", 513)
		wantIs(t, flightlock.ErrInvalid, c.InvalidateTag(t.Context(), ""), c.InvalidateTag(t.Context(), long),
			c.InvalidateTag(t.Context(), "\xff"))
		for _, bad := range [][]string{{""}, {long}, make([]string, 33)} {
			names.Store(&bad)
			w.want("k", "k@0", c)
			time.Sleep(time.Second)
			wantIs(t, flightlock.ErrInvalid, *last.Load(), c.Set(t.Context(), "k", "v"))
			wantPeek(t, c, "k", "", fetch.Miss, false)
		}
		testkit.Must(t, c.InvalidateTag(t.Context()))
		testkit.Must(t, c.Close(t.Context()))
		wantIs(t, flightlock.ErrClosed, c.InvalidateTag(t.Context(), "t"))
	})
}

// A tag forgets keys whose entries are over, and is gone when all are.
func TestTagsForget(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 0
		c := w.cache(tagged(options{Name: "user", Fresh: time.Minute, LoadTimeout: time.Second,
			LockTTL: time.Second}, "t"))
		tag := "flightlock:{tag:5:user:t"
		most := 0
		for i := range 500 {
			w.want(fmt.Sprint("k", i), fmt.Sprint("k", i, "@0"), c)
			time.Sleep(time.Second)
			members, _ := w.values.Mini.ZMembers(tag)
			most = max(most, len(members))
		}
		if most < 60 || most > 80 {
			t.Errorf("a tag of some 60 values has had %d", most)
		}
		time.Sleep(3 * time.Minute)
		if w.values.Mini.Exists(tag) {
			t.Error("the tag is still there")
		}
	})
}

// InvalidateTag fails if it cannot know which values there are, or cannot invalidate them, and succeeds
// afterwards.
func TestInvalidateTagInAnOutage(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(tagged(options{}, "t"))
		w.want("k", "k@0", c)
		w.origin.version.Add(1)
		w.values.Down(true)
		err := c.InvalidateTag(t.Context(), "t")
		wantText(t, err, `invalidate tag "t"`, "call it again")
		testkit.Must(t, c.InvalidateTag(t.Context())) // of no tag
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		wantIs(t, context.Canceled, c.InvalidateTag(ended, "t"))
		w.values.Down(false)
		redistest.Eventually(t, time.Minute, "an InvalidateTag", func() bool {
			return c.InvalidateTag(t.Context(), "t") == nil
		})
		w.want("k", "k@1", c)
	})
}

// Clear deletes the entries of its Cache and Version, and nothing else, and loads that are under way are not
// stored.
func TestClear(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		named := func(name, version string) *rediscache.Cache[string] {
			return w.cache(options{Name: name, Version: version, Local: time.Second})
		}
		c, v2, like := named("user*", ""), named("user*", "v2"), named("users", "")
		many := map[string]string{}
		for _, key := range someKeys(1000) {
			many[key] = "old"
		}
		for _, c := range []*rediscache.Cache[string]{c, v2, like} {
			testkit.Must(t, c.SetMany(t.Context(), many))
		}
		w.rdb.Set(t.Context(), "user*:mine", "not an entry", 0)
		w.rdb.HSet(t.Context(), "user*:hash", "not", "an entry")
		want(t, "k1", "old", c)
		var joined sync.WaitGroup
		joined.Go(func() { w.want("loading", "loading@0", c) })
		time.Sleep(500 * time.Millisecond)
		w.origin.version.Add(1)
		deleted, calls := 0, 0
		testkit.Must(t, c.Clear(t.Context(), func(n int) {
			if calls++; n <= deleted || n-deleted > 200 {
				t.Errorf("%d after %d", n, deleted)
			}
			deleted = n
		}))
		if deleted < 1001 || calls < 5 {
			t.Errorf("%d deleted, %d calls", deleted, calls)
		}
		w.want("loading", "loading@1", c)
		w.want("k1", "k1@1", c)
		w.want("k1", "old", v2, like)
		joined.Wait()
		if v := w.rdb.Get(t.Context(), "user*:mine").Val(); v != "not an entry" {
			t.Errorf("%q", v)
		}
		wantIs(t, flightlock.ErrInvalid, w.cache(options{}).Clear(t.Context(), nil))
		w.values.Down(true)
		wantText(t, c.Clear(t.Context(), nil), `clear "user*:"`, "call it again")
		w.values.Down(false)
		testkit.Must(t, c.Close(t.Context()))
		wantIs(t, flightlock.ErrClosed, c.Clear(t.Context(), nil))
	})
}

// Tags and Clear reach the masters of a Cluster.
func TestTagsOfACluster(t *testing.T) {
	t.Parallel()
	c, o := realCache(t, cluster.Get(t).Client(t, func(*redis.ClusterOptions) {}), options{Tags: byKey})
	keys := append(someKeys(300), "other")
	_, err := c.GetMany(t.Context(), keys)
	testkit.Must(t, err)
	o.version.Add(1)
	testkit.Must(t, c.InvalidateTag(t.Context(), "k"))
	values, err := c.GetMany(t.Context(), keys)
	if testkit.Must(t, err); values["other"] != "other@0" {
		t.Errorf("%q", values["other"])
	}
	for _, key := range someKeys(300) {
		if values[key] != key+"@1" {
			t.Errorf("%s: %q", key, values[key])
		}
	}
	o.version.Add(1)
	deleted := 0
	testkit.Must(t, c.Clear(t.Context(), func(n int) { deleted = n }))
	if deleted != len(keys) {
		t.Errorf("%d deleted", deleted)
	}
	want(t, "other", "other@2", c)
}
