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
		tier := New[int](time.Second, 100)
		_, r, ok := tier.Get("k")
		if ok {
			t.Error("a value from nowhere")
		}
		time.Sleep(300 * time.Millisecond)
		tier.Put("k", 1, r)
		time.Sleep(500 * time.Millisecond)
		if v, _, ok := tier.Get("k"); v != 1 || !ok {
			t.Errorf("%d, %v", v, ok)
		}
		time.Sleep(100 * time.Millisecond) // 900ms
		sent := 0
		for range 10 {
			if _, _, ok := tier.Get("k"); !ok {
				sent++
			}
		}
		if sent != 1 {
			t.Errorf("%d readers were sent to renew it", sent)
		}
		time.Sleep(100 * time.Millisecond)
		_, r, ok = tier.Get("k")
		if ok {
			t.Error("it is over")
		}
		time.Sleep(time.Second)
		tier.Put("k", 2, r)
		if _, _, ok := tier.Get("k"); ok {
			t.Error("it was over when it came")
		}
	})
}

// A sleep of the machine, in which only the wall clock continues, is part of a value's age, and of that of a
// value that is still being read.
func TestASleepOfTheMachineIsPartOfTheAge(t *testing.T) {
	defer clocks.Reset()
	tier := New[int](time.Hour, 100)
	_, r, _ := tier.Get("k")
	_, slow, _ := tier.Get("slow")
	tier.Put("k", 1, r)
	if v, _, ok := tier.Get("k"); v != 1 || !ok {
		t.Errorf("%d, %v", v, ok)
	}
	clocks.Sleep(time.Hour)
	if _, _, ok := tier.Get("k"); ok {
		t.Error("a value is served that is older than the machine's sleep")
	}
	tier.Put("slow", 1, slow)
	if _, _, ok := tier.Get("slow"); ok {
		t.Error("a value was kept that was read before the machine's sleep")
	}
}

// What was read before a removal does not enter after it, nor what was read before what is there.
func TestLateReaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tier := New[int](time.Second, 100)
		_, r, _ := tier.Get("k")
		tier.Remove("k")
		tier.Put("k", 1, r)
		if _, _, ok := tier.Get("k"); ok {
			t.Error("it was read before the removal")
		}
		_, early, _ := tier.Get("k")
		time.Sleep(time.Millisecond)
		_, late, _ := tier.Get("k")
		tier.Put("k", 2, late)
		tier.Put("k", 1, early)
		if v, _, _ := tier.Get("k"); v != 2 {
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
			tier := New[int](time.Second, keys)
			for i := range 10_000 {
				key := fmt.Sprint(i)
				_, r, _ := tier.Get(key)
				tier.Put(key, i, r)
				if v, _, ok := tier.Get(key); v != i || !ok {
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
