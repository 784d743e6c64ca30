package flight

import (
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// timerHeap calls flights when it is time for them: one timer and a heap for all flights of a
// shard. Nearly every lock is released long before its Until; a timer each, made to be
// stopped, costs more than the rest of what a flight does about time. The timer is early
// rather than moved: it is set back only when a flight wants to be called before all
// others, and when it fires and nothing is due, it waits for the first.
//
// What a flight does when it is called may include callbacks of the user's. So that a slow one does
// not delay the other flights, the timer fires again while flights are called, after slowCallback:
// the rest is called beside it.
//
// The timer does not notice a sleep of the machine: sleepWatch does.
//
// It is guarded by the shard's mu.
type timerHeap struct {
	epoch time.Time // of instants
	heap  []alarm   // each not before its parent, which stands at half its place
	timer *time.Timer
	fires clock.Instant // when timer will; 0: it does not
	wake  func()        // what it does

	watch   func() // has the shard looked after by the sleepWatch
	watched bool   // it is
}

type alarm struct {
	at clock.Instant
	f  *flight // whose place is this alarm's place in the heap, counted from 1
}

// set has f called at that time, and not at the time that was set before.
func (h *timerHeap) set(f *flight, at clock.Instant) {
	if f.alarmAt == 0 {
		h.heap = append(h.heap, alarm{})
		f.alarmAt = int32(len(h.heap))
	}
	h.sift(int(f.alarmAt), alarm{at, f})
	h.arm()
}

// drop removes f.
func (h *timerHeap) drop(f *flight) {
	if f.alarmAt == 0 {
		return
	}
	last := h.heap[len(h.heap)-1]
	h.heap[len(h.heap)-1] = alarm{}
	h.heap = h.heap[:len(h.heap)-1]
	if last.f != f {
		h.sift(int(f.alarmAt), last)
	}
	f.alarmAt = 0
}

// slowCallback is how long a flight's call may take until others are called beside it.
const slowCallback = 10 * time.Millisecond

// due takes out a flight whose time has come. If there is none, the timer waits for the
// first that will be.
func (h *timerHeap) due() *flight {
	if len(h.heap) == 0 {
		return nil
	}
	now := h.now()
	first := h.heap[0]
	if first.at > now {
		h.fires = 0
		h.arm()
		return nil
	}
	h.drop(first.f)
	if len(h.heap) > 0 && h.fires == 0 {
		h.fire(now + clock.Instant(slowCallback))
	}
	return first.f
}

// arm sees to it that the timer fires when the first alarm is due, or earlier.
func (h *timerHeap) arm() {
	at := h.heap[0].at
	if h.fires != 0 && h.fires <= at {
		return
	}
	h.fire(at)
}

// all has every flight called now that has an alarm.
func (h *timerHeap) all() {
	now := h.now()
	for i := range h.heap { // each stays not before its parent
		h.heap[i].at = min(h.heap[i].at, now)
	}
	h.fire(now)
}

// fire has the timer fire at that time, and the shard looked after as long as any flight has an
// alarm.
func (h *timerHeap) fire(at clock.Instant) {
	h.fires = at
	if !h.watched {
		h.watched = true
		h.watch()
	}
	if wait := time.Duration(at - h.now()); h.timer == nil {
		h.timer = clock.AfterFunc(wait, h.wake)
	} else {
		h.timer.Reset(wait)
	}
}

func (h *timerHeap) now() clock.Instant { return clock.InstantNow(h.epoch) }

// sift puts a in that place, which is free, or as far up or down from it as its time
// wants.
func (h *timerHeap) sift(place int, a alarm) {
	for place > 1 && a.at < h.heap[place/2-1].at {
		place = h.move(place/2, place)
	}
	for {
		child := 2 * place
		if child < len(h.heap) && h.heap[child].at < h.heap[child-1].at {
			child++
		}
		if child > len(h.heap) || a.at <= h.heap[child-1].at {
			break
		}
		place = h.move(child, place)
	}
	h.heap[place-1] = a
	a.f.alarmAt = int32(place)
}

// move takes the alarm of one place to another, and says which place is free then.
func (h *timerHeap) move(from, to int) int {
	h.heap[to-1] = h.heap[from-1]
	h.heap[to-1].f.alarmAt = int32(to)
	return from
}

// arm has f called at that time, or earlier if its alarm is: all may have moved it. The caller
// holds f.mu.
func (sh *shard) arm(f *flight, at clock.Instant) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if h := &sh.alarms; f.alarmAt == 0 || at < h.heap[f.alarmAt-1].at {
		h.set(f, at)
	}
}

// wake calls the flights that are due.
func (sh *shard) wake() {
	sh.mu.Lock()
	sh.alarms.fires = 0
	f := sh.alarms.due()
	sh.mu.Unlock()
	for f != nil {
		f.tick()
		sh.mu.Lock()
		f = sh.alarms.due()
		sh.mu.Unlock()
	}
}

// stop stops the timer. No flight is left.
func (sh *shard) stop() {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sh.alarms.timer != nil {
		sh.alarms.timer.Stop()
	}
}
