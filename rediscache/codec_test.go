package rediscache_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/flightlock/flightlock"
)

var errBad = errors.New("bad value")

// badValue is the error of a codec for values that begin so.
func badValue(v string) error {
	if strings.HasPrefix(v, "bad") {
		return errBad
	}
	return nil
}

// What cannot be decoded is a miss, and the loaded value replaces it. A key that is not a string is
// an error.
func TestWhatCannotBeDecoded(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(options{Codec: textCodec(badValue)})
		stamp := strings.Repeat("s", 32)
		for i, foreign := range []string{
			"", "something else", "fl1:", "fl1:x" + stamp, "fl1:v" + stamp + "short",
			"fl1:v" + stamp + strings.Repeat("9", 42) + "bad",
		} {
			key := fmt.Sprint("foreign", i)
			w.values.Mini.Set(c.Key(key), foreign)
			w.want(key, key+"@0", c, c)
			w.wantLoads(int64(i) + 1)
		}
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
		c := w.cache(options{MaxValue: 10, Codec: textCodec(badValue), ErrorHold: -1})
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
		err := c.Set(t.Context(), "k", "a value of 30 bytes, more or less")
		wantIs(t, flightlock.ErrInvalid, err)
		wantText(t, err, "MaxValue is 10")
		w.want("k", "k@1", c)
		w.origin.version.Add(1)
		wantIs(t, errBad, c.Set(t.Context(), "k", "bad"))
		w.want("k", "k@2", c)
	})
}
