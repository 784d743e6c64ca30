package hot

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/clocktest"
	"go.uber.org/goleak"
)

var clocks clocktest.Clocks

func TestMain(m *testing.M) {
	clocks.Install()
	goleak.VerifyTestMain(m)
}

// A value is served until its ttl is over, counted from when its reader began; shortly before, one
// reader is sent to renew it.
func TestAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tier := New[int](time.Second, 100, 1<<20)
		_, r, ok := get(tier, "k")
		if ok {
			t.Error("a value from nowhere")
		}
		time.Sleep(300 * time.Millisecond)
		tier.Put("k", 1, r, time.Hour, 1)
		time.Sleep(500 * time.Millisecond)
		if v, _, ok := get(tier, "k"); v != 1 || !ok {
			t.Errorf("%d, %v", v, ok)
		}
		time.Sleep(100 * time.Millisecond) // 900ms
		sent := 0
		for range 10 {
			if _, _, ok := get(tier, "k"); !ok {
				sent++
			}
		}
		if sent != 1 {
			t.Errorf("%d readers were sent to renew it", sent)
		}
		time.Sleep(100 * time.Millisecond)
		_, r, ok = get(tier, "k")
		if ok {
			t.Error("it is over")
		}
		time.Sleep(time.Second)
		tier.Put("k", 2, r, time.Hour, 1)
		if _, _, ok := get(tier, "k"); ok {
			t.Error("it was over when it came")
		}
	})
}

// A sleep of the machine, in which only the wall clock continues, is part of a value's age, and of that of a
// value that is still being read.
func TestASleepOfTheMachineIsPartOfTheAge(t *testing.T) {
	defer clocks.Reset()
	tier := New[int](time.Hour, 100, 1<<20)
	_, r, _ := get(tier, "k")
	_, slow, _ := get(tier, "slow")
	tier.Put("k", 1, r, time.Hour, 1)
	if v, _, ok := get(tier, "k"); v != 1 || !ok {
		t.Errorf("%d, %v", v, ok)
	}
	clocks.Sleep(time.Hour)
	if _, _, ok := get(tier, "k"); ok {
		t.Error("a value is served that is older than the machine's sleep")
	}
	tier.Put("slow", 1, slow, time.Hour, 1)
	if _, _, ok := get(tier, "slow"); ok {
		t.Error("a value was kept that was read before the machine's sleep")
	}
}

// What was read before a removal does not enter after it, nor what was read before what is there.
func TestLateReaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tier := New[int](time.Second, 100, 1<<20)
		_, r, _ := get(tier, "k")
		tier.Remove("k")
		tier.Put("k", 1, r, time.Hour, 1)
		if _, _, ok := get(tier, "k"); ok {
			t.Error("it was read before the removal")
		}
		_, early, _ := get(tier, "k")
		time.Sleep(time.Millisecond)
		_, late, _ := get(tier, "k")
		tier.Put("k", 2, late, time.Hour, 1)
		tier.Put("k", 1, early, time.Hour, 1)
		if v, _, _ := get(tier, "k"); v != 2 {
			t.Errorf("%d", v)
		}
		tier.Remove("k")
		if tier.Len() != 0 {
			t.Error("it is still there")
		}
	})
}

// There are never more values than keys allows, and those that are over go first.
func TestRoom(t *testing.T) {
	for _, keys := range []int{1, 5, 20, 160} {
		synctest.Test(t, func(t *testing.T) {
			tier := New[int](time.Second, keys, 1<<20)
			for i := range 10_000 {
				key := fmt.Sprint(i)
				_, r, _ := get(tier, key)
				tier.Put(key, i, r, time.Hour, 1)
				if v, _, ok := get(tier, key); v != i || !ok {
					t.Fatalf("%d, %v", v, ok)
				}
				if tier.Len() > keys {
					t.Fatalf("%d values of %d", tier.Len(), keys)
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
}

// A value is served for no longer than it may be, which others may exceed.
func TestAValueThatMayBeServedForLess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tier := New[int](time.Minute, 100, 1<<20)
		for key, most := range map[string]time.Duration{"short": time.Second, "long": time.Hour} {
			_, r, _ := get(tier, key)
			tier.Put(key, 1, r, most, 1)
		}
		time.Sleep(time.Second)
		if _, _, ok := get(tier, "short"); ok {
			t.Error("it may not be served any more")
		}
		time.Sleep(50 * time.Second)
		if _, _, ok := get(tier, "long"); ok {
			t.Error("nothing is heard of changes")
		}
		tier.Heard(time.Now().Add(-unheard))
		if _, _, ok := get(tier, "long"); ok {
			t.Error("what was heard of changes is too old")
		}
		tier.Heard(time.Now().Add(1 - unheard))
		if _, _, ok := get(tier, "long"); !ok {
			t.Error("it may be served for longer")
		}
	})
}

// The values have no more bytes than the Tier may have, whatever they are replaced by; what is too large for
// a shard is not kept, and keeps nothing else out.
func TestBytes(t *testing.T) {
	const most = 16_000
	tier := New[int](time.Hour, 1000, most)
	x, held := uint32(1), map[string]int{}
	for range 20_000 {
		x = x*1664525 + 1013904223
		key, size := fmt.Sprint(x>>16%500), int(x>>8%1200)
		_, r, _ := get(tier, key)
		if tier.Put(key, size, r, time.Hour, size); x>>24%8 == 0 {
			tier.Remove(key)
		}
	}
	sum := 0
	for i := range tier.shard {
		in := 0
		for key, v := range tier.shard[i].values {
			held[key] = v.size
			in += v.size
		}
		if in != tier.shard[i].bytes || in > most/shards {
			t.Errorf("shard %d has %d bytes, and counts %d", i, in, tier.shard[i].bytes)
		}
		sum += in
	}
	if sum > most || sum < most/3 || len(held) != tier.Len() {
		t.Errorf("%d bytes of %d keys", sum, len(held))
	}
	_, r, _ := get(tier, "huge")
	tier.Put("huge", 1, r, time.Hour, most)
	if _, _, ok := get(tier, "huge"); ok {
		t.Error("a value that is larger than a shard")
	}
}

// get is Get: ok is whether there is a value.
func get[V any](t *Tier[V], key string) (v V, r Reading, ok bool) {
	x, r := t.Get(key)
	if x != nil {
		v = *x
	}
	return v, r, x != nil
}

// Len is how many values there are, those that are over and have not made room yet included.
func (t *Tier[V]) Len() (n int) {
	for i := range t.shard {
		s := &t.shard[i]
		s.mu.RLock()
		n += len(s.values)
		s.mu.RUnlock()
	}
	return n
}
