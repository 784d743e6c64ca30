package demo

import (
	"context"
	"io"
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// A load is a miss's first if the cache can have nothing and nobody else is loading; all others are surplus.
func TestTheOriginCountsLoadsPerMiss(t *testing.T) {
	for _, c := range []struct {
		name        string
		play        func(o *origin)
		loads, miss int
	}{
		{"one", func(o *origin) { one(o, "k", true) }, 1, 1},
		{"another while the value is fresh", func(o *origin) {
			one(o, "k", true)
			time.Sleep(time.Second)
			one(o, "k", true)
		}, 2, 1},
		{"another when it is not fresh any more", func(o *origin) {
			one(o, "k", true)
			time.Sleep(3 * time.Second)
			one(o, "k", true)
		}, 2, 2},
		{"another key", func(o *origin) { one(o, "k", true); one(o, "l", true) }, 2, 2},
		{"another after one that failed", func(o *origin) { one(o, "k", false); one(o, "k", true) }, 2, 2},
		{"two at once", func(o *origin) { o.begin("k", time.Now()); one(o, "k", true) }, 2, 1},
		{"three at once", func(o *origin) {
			o.begin("k", time.Now())
			o.begin("k", time.Now())
			one(o, "k", true)
		}, 3, 1},
		{"another after a flush", func(o *origin) {
			one(o, "k", true)
			time.Sleep(1)
			o.cacheFlushed()
			one(o, "k", true)
		}, 2, 2},
		{"another after one during which there was a flush", func(o *origin) {
			o.begin("k", time.Now())
			time.Sleep(1)
			o.cacheFlushed()
			o.end("k", true, false, time.Now().Add(1))
			one(o, "k", true)
		}, 2, 2},
		{"another after one that was on its way to the origin at a flush", func(o *origin) {
			o.cacheFlushed()
			time.Sleep(onItsWay - 1)
			one(o, "k", true)
			one(o, "k", true)
		}, 2, 2},
		{"another after one that looked into the cache after a flush", func(o *origin) {
			o.cacheFlushed()
			time.Sleep(onItsWay)
			one(o, "k", true)
			one(o, "k", true)
		}, 2, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := &origin{fresh: 3 * time.Second, keys: map[string]*originKey{}}
				c.play(o)
				if got := o.snapshot(); got.Loads != c.loads || got.First != c.miss {
					t.Errorf("%d loads, %d misses; want %d, %d", got.Loads, got.First, c.loads, c.miss)
				}
				if surplus := len(o.takeSurplus()); surplus != c.loads-c.miss {
					t.Errorf("%d surplus loads are told, want %d", surplus, c.loads-c.miss)
				}
			})
		})
	}
}

func one(o *origin, key string, well bool) {
	o.begin(key, time.Now())
	o.end(key, well, false, time.Now())
}

// The origin counts loads, refuses wrong credentials, fails when told to, and notices callers who leave.
func TestTheOriginCountsWhatComes(t *testing.T) {
	o, err := startOrigin("right", 0, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer o.close()
	get := func(ctx context.Context, key, token string) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, o.url+"/load/"+key, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return 0, err.Error()
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(body)
	}
	if status, body := get(t.Context(), "a", "right"); status != http.StatusOK || body != "a#1" {
		t.Error(status, body)
	}
	if status, _ := get(t.Context(), "b", "right"); status != http.StatusOK {
		t.Error(status)
	}
	if status, _ := get(t.Context(), "c", "right"); status != http.StatusOK {
		t.Error(status)
	}
	if status, _ := get(t.Context(), "d", "wrong"); status != http.StatusUnauthorized {
		t.Error(status)
	}
	o.setFailing(true)
	if status, _ := get(t.Context(), "e", "right"); status != http.StatusInternalServerError {
		t.Error(status)
	}
	o.setFailing(false)
	o.setLatency(time.Hour)
	ctx, leave := context.WithCancel(t.Context())
	go func() {
		for o.snapshot().Loads < 5 && t.Context().Err() == nil {
			time.Sleep(time.Millisecond)
		}
		leave()
	}()
	if status, _ := get(ctx, "f", "right"); status != 0 {
		t.Error(status)
	}
	want := loadCounts{Loads: 5, First: 5, Failed: 1, Left: 1, Refused: 1}
	for got := o.snapshot(); got != want; got = o.snapshot() {
		if pause(t.Context(), time.Millisecond) || got.Left > want.Left {
			t.Fatalf("%+v, want %+v", got, want)
		}
	}
}
