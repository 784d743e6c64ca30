package flight

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

func (f *flight) hasAlarm() bool {
	f.shard().mu.Lock()
	defer f.shard().mu.Unlock()
	return f.alarmAt != 0
}

// silence makes the flight's timer fire too late, as a timer may.
func (f *flight) silence() {
	f.shard().mu.Lock()
	defer f.shard().mu.Unlock()
	f.shard().alarms.drop(f)
}

// Whatever is set, moved and dropped, in whatever order: flights are called at their time,
// once, and those that were dropped are not.
func TestAlarmsComeInTime(t *testing.T) {
	for seed := range uint64(50) {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			h := &timerHeap{epoch: time.Now().Add(-1), watch: func() {}}
			want := map[*flight]time.Time{}
			var mu sync.Mutex // as a shard's
			h.wake = func() {
				mu.Lock()
				defer mu.Unlock()
				h.fires = 0
				for f := h.due(); f != nil; f = h.due() {
					if at, set := want[f]; !set || !at.Equal(time.Now()) {
						t.Errorf("seed %d: called at %v, want %v (%t)", seed, time.Now(), at, set)
					}
					delete(want, f)
				}
			}
			flights := make([]flight, 1+rnd.IntN(40))
			for range 500 {
				if rnd.IntN(4) == 0 {
					time.Sleep(time.Duration(rnd.IntN(10)) * ms)
					synctest.Wait()
				}
				f := &flights[rnd.IntN(len(flights))]
				mu.Lock()
				if rnd.IntN(3) == 0 {
					h.drop(f)
					delete(want, f)
				} else {
					want[f] = time.Now().Add(time.Duration(1+rnd.IntN(50)) * ms)
					h.set(f, clock.Instant(want[f].Sub(h.epoch)))
				}
				mu.Unlock()
			}
			time.Sleep(time.Second)
			synctest.Wait()
			if len(want) != 0 || len(h.heap) != 0 {
				t.Errorf("seed %d: %d alarms did not come, %d are left", seed, len(want), len(h.heap))
			}
		})
	}
}

// One timer serves all flights of a shard, however many come and go.
func TestAShardHasOneTimer(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		var all []*caller
		for i := 0; len(all) < 1000; i++ {
			if k := strconv.Itoa(i); w.g.shardIndex(k) == w.g.shardIndex("a") {
				all = append(all, w.start(key(k)))
			}
		}
		sh := all[0].h.f.shard()
		is(t, "alarms", len(sh.alarms.heap), len(all))
		timer, fires := sh.alarms.timer, sh.alarms.fires
		for _, c := range all {
			c.releases()
			w.start(key("a")).releases()
		}
		is(t, "the timer is the same", sh.alarms.timer == timer, true)
		is(t, "it was not moved", sh.alarms.fires, fires)
		is(t, "alarms", len(sh.alarms.heap), 0)
	})
}

// Many Tickets that end in the same instant all do.
func TestManyHoldsEndInTime(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		var all []*caller
		for i := range 500 {
			all = append(all, w.launch(key(strconv.Itoa(i)), ttl(time.Duration(1+i%3)*time.Second)))
		}
		slices.Reverse(all)
		synctest.Wait()
		for d := range 3 {
			time.Sleep(validity(time.Duration(1+d)*time.Second) - time.Since(all[0].began))
			synctest.Wait()
			for _, c := range all {
				w.mu.Lock()
				is(t, "ended", c.ends == 1, c.h.ttl <= time.Duration(1+d)*time.Second)
				w.mu.Unlock()
			}
		}
	})
}
