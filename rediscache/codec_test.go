package rediscache_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/rediscache"
)

// What cannot be decoded is a miss, and the loaded value replaces it. A key that is not a string is
// an error.
func TestWhatCannotBeDecoded(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		codec := rediscache.Text()
		codec.Decode = func(b []byte) (string, error) {
			if strings.HasPrefix(string(b), "bad") {
				return "", errors.New("bad")
			}
			return string(b), nil
		}
		c := w.cache(options{Codec: codec})
		for i, foreign := range []string{"", "something else", "fl1:", "fl1:x" + strings.Repeat("s", 32),
			"fl1:v" + strings.Repeat("s", 32) + "short"} {
			key := fmt.Sprint("foreign", i)
			w.values.Mini.Set(c.Key(key), foreign)
			w.want(key, key+"@0", c)
			w.want(key, key+"@0", c)
			w.wantLoads(int64(i) + 1)
		}
		testkit.Must(t, c.Set(t.Context(), "k", "bad"))
		w.want("k", "k@0", c)
		w.want("k", "k@0", c)
		w.wantLoads(6)
		if n := c.Stats().Undecodable; n < 6 {
			t.Errorf("%d undecodable", n)
		}
		w.values.Mini.RPush(c.Key("list"), "x")
		w.want("list", "list@0", c)
		if got := c.Stats(); got.LookupErrors == 0 || got.Down != 0 {
			t.Errorf("%+v", got)
		}
		if kind, _ := w.values.Mini.List(c.Key("list")); len(kind) != 1 {
			t.Error("somebody else's list was overwritten")
		}
	})
}

// A value that is too long, or cannot be encoded, is served and not stored. Set of one removes the old
// value.
func TestWhatCannotBeStored(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		codec := rediscache.Text()
		codec.Encode = func(v string) ([]byte, error) {
			if v == "bad" {
				return nil, errors.New("bad value")
			}
			return []byte(v), nil
		}
		c := w.cache(options{MaxValue: 10, Codec: codec, ErrorHold: -1})
		for range 2 {
			w.want("a long key", "a long key@0", c)
			synctest.Wait() // until its run is over
		}
		w.wantLoads(2)
		if got := c.Stats(); got.TooLong != 2 {
			t.Errorf("%+v", got)
		}
		w.want("k", "k@0", c)
		w.origin.version.Add(1)
		if err := c.Set(t.Context(), "k", "a value of 30 bytes, more or less"); !errors.Is(err, flightlock.ErrInvalid) ||
			!strings.Contains(err.Error(), "MaxValue is 10") {
			t.Error(err)
		}
		w.want("k", "k@1", c)
		w.origin.version.Add(1)
		if err := c.Set(t.Context(), "k", "bad"); err == nil || !strings.Contains(err.Error(), "bad value") {
			t.Error(err)
		}
		w.want("k", "k@2", c)
	})
}
