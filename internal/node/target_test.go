package node

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/flightlock/flightlock/internal/redistest"
)

// oddKeys try the rule for hash tags and everything that might break a name.
var oddKeys = []string{
	"", "a", "lock:a", "{", "}", "{}", "}{", "{}x", "x{}", "{}{a}", "{a}", "a{b}c", "{a}{b}", "{{a}}", "{a{b}c}",
	"a{b", "a}b{c}d", "foo{{bar}}zap", "foo{bar}{zap}", "foo{}{bar}", "\x00", "\xff\xfe", "{\x00}", "{\xff}x",
	"a\r\nb", "k\u00e4se", "{\n}", strings.Repeat("x", 4096), strings.Repeat("{", 100), strings.Repeat("}", 100),
}

// The lock key and its bucket share a hash slot for every possible key: one script may use both on
// a Cluster. The server's own CLUSTER KEYSLOT is compared.
func TestTheBucketSharesTheKeysSlot(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t, "--cluster-enabled", "yes")
	c := s.Client(t)
	keys := append([]string{}, oddKeys...)
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		b := make([]byte, rnd.IntN(12))
		for i := range b {
			b[i] = "{}ab\x00\xff:"[rnd.IntN(7)]
		}
		keys = append(keys, string(b))
	}
	for _, key := range keys {
		target := newTarget(key, "o")
		slot := c.ClusterKeySlot(t.Context(), key).Val()
		if ours := SlotOf(key); int64(ours) != slot || target.slot != ours {
			t.Errorf("key %q: slot %d, the server says %d", key, ours, slot)
		}
		if theirs := c.ClusterKeySlot(t.Context(), bucketOf(target)).Val(); theirs != slot {
			t.Errorf("key %q in slot %d, its bucket %q in %d", key, slot, bucketOf(target), theirs)
		}
	}
}

// Every slot has a tag of three characters that hashes to it, and no two share one.
func TestEverySlotHasATag(t *testing.T) {
	seen := map[[3]byte]bool{}
	for slot, tag := range slotTags() {
		if got := SlotOf("{" + string(tag[:]) + "}"); int(got) != slot || tag[0] == 0 {
			t.Fatalf("tag %q of slot %d hashes to %d", tag, slot, got)
		}
		seen[tag] = true
	}
	if len(seen) != slots {
		t.Errorf("%d different tags", len(seen))
	}
}

// The names of buckets are shared by clients of all versions: they never change.
func TestBucketNamesNeverChange(t *testing.T) {
	for key, want := range map[string]string{
		"lock:a":      "flightlock:{0j4}:fence:8",
		"lock:{a}b":   "flightlock:{062}:fence:e",
		"lock:orders": "flightlock:{7PS}:fence:2",
	} {
		if got := bucketOf(newTarget(key, "o")); got != want {
			t.Errorf("key %q has bucket %q, want %q", key, got, want)
		}
	}
}

// Keys of one slot are spread over all of its buckets.
func TestKeysOfOneSlotUseAllItsBuckets(t *testing.T) {
	names := map[string]bool{}
	for i := range 1000 {
		names[bucketOf(newTarget("{t}"+strings.Repeat("x", i), "o"))] = true
	}
	if len(names) != bucketsPerSlot {
		t.Errorf("%d buckets are in use, want %d", len(names), bucketsPerSlot)
	}
}

// FuzzBucket tries any bytes as a key.
func FuzzBucket(f *testing.F) {
	for _, key := range oddKeys {
		f.Add(key)
	}
	f.Fuzz(func(t *testing.T, key string) {
		target := newTarget(key, "o")
		if slot := SlotOf(key); target.slot != slot || SlotOf(bucketOf(target)) != slot {
			t.Errorf("key %q in slot %d, its bucket %q in %d", key, slot, bucketOf(target), SlotOf(bucketOf(target)))
		}
		if !strings.HasPrefix(bucketOf(target), Reserved) {
			t.Errorf("bucket %q is not reserved", bucketOf(target))
		}
	})
}
