package rediscache_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/rediscache"
)

// What Compressed encodes it decodes, at the lengths around its limit, by many at the same time; what is
// shorter so is compressed, and nothing gets longer by more than a byte.
func TestCompressed(t *testing.T) {
	t.Parallel()
	codec := rediscache.Compressed(rediscache.Text(), 100)
	random := make([]byte, 10_000)
	for i, x := 0, uint32(1); i < len(random); i++ {
		x = x*1664525 + 1013904223
		random[i] = byte(x >> 24)
	}
	var all sync.WaitGroup
	for _, v := range []string{"", "a", strings.Repeat("a", 99), strings.Repeat("a", 100),
		strings.Repeat("ab", 1e6), string(random)} {
		for range 8 {
			all.Go(func() {
				b, err := codec.Encode(v)
				testkit.Must(t, err)
				if len(b) > len(v)+1 || len(v) >= 100 && v[:2] != string(random[:2]) && len(b) > len(v)/3 {
					t.Errorf("%d bytes became %d", len(v), len(b))
				}
				if got, err := codec.Decode(slices.Clone(b)); got != v || err != nil {
					t.Errorf("%d bytes became %d, %v", len(v), len(got), err)
				}
			})
		}
	}
	all.Wait()
}

// What is no value of Compressed is an error, as is one that is cut off, and nothing is kept from that.
func TestCompressedWithBadBytes(t *testing.T) {
	t.Parallel()
	codec := rediscache.Compressed(rediscache.Bytes(), 0)
	good, err := codec.Encode(bytes.Repeat([]byte("ab"), 1000))
	testkit.Must(t, err)
	for _, bad := range [][]byte{nil, {7}, []byte(`{"Name":"Ada"}`), {1}, {1, 255, 255}, good[:len(good)-3]} {
		if v, err := codec.Decode(bad); err == nil {
			t.Errorf("%q was decoded as %q", bad, v)
		}
		if v, err := codec.Decode(good); err != nil || len(v) != 2000 {
			t.Errorf("%d bytes, %v", len(v), err)
		}
	}
	if half := rediscache.Compressed(rediscache.Codec[string]{}, 0); half.Encode != nil || half.Decode != nil {
		t.Error("a Codec of nothing")
	}
}

// A value that does not decode, as after a change of the Codec, is a miss, and counted.
func TestACodecThatFailsIsAMiss(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		before := w.cache(options{})
		w.want("k", "k@0", before)
		w.origin.version.Add(1)
		after := w.cache(options{Codec: rediscache.Compressed(rediscache.Text(), 0)})
		w.want("k", "k@1", after, after)
		if s := after.Stats(); s.Undecodable < 1 || s.Hits != 1 || s.Misses != 1 {
			t.Errorf("%+v", s)
		}
		if v, _ := w.values.Mini.Get("k"); len(v) != 79+1+len("k@1") {
			t.Errorf("%q", fmt.Sprint(v))
		}
	})
}

func FuzzCompressed(f *testing.F) {
	codec := rediscache.Compressed(rediscache.Bytes(), 0)
	f.Add([]byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, b []byte) {
		if v, err := codec.Decode(b); err == nil && len(b) < 1 {
			t.Errorf("%q was decoded as %q", b, v)
		}
		encoded, err := codec.Encode(b)
		testkit.Must(t, err)
		if v, err := codec.Decode(encoded); err != nil || !bytes.Equal(v, b) {
			t.Errorf("%q became %q, %v", b, v, err)
		}
	})
}

func BenchmarkCompressed(b *testing.B) {
	codec := rediscache.Compressed(rediscache.Text(), 0)
	v := strings.Repeat(`{"ID":42,"Name":"Ada Lovelace","Roles":["admin","author"]},`, 200)
	encoded, _ := codec.Encode(v)
	b.Run("encode", func(b *testing.B) {
		b.SetBytes(int64(len(v)))
		for b.Loop() {
			_, _ = codec.Encode(v)
		}
		b.ReportMetric(float64(len(v))/float64(len(encoded)), "ratio")
	})
	b.Run("decode", func(b *testing.B) {
		b.SetBytes(int64(len(v)))
		for b.Loop() {
			_, _ = codec.Decode(encoded)
		}
	})
}
