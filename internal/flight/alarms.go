package flight

import (
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// alarms call flights when it is time for them: one timer and a heap for all flights of a
// shard. Nearly every lock is released long before its Until; a timer each, made to be
// stopped, costs more than the rest of what a flight does about time. The timer is early
// rather than moved: it is set back only when a flight wants to be called before all
// others, and when it fires and nothing is due, it waits for the first. What a flight does when it is
// called may include calls of the user's code. So that one that hangs does not hold the others up, the timer
// fires again while flights are called, after hangs: who is left is called beside it.
//
// The timer does not see a sleep of the machine: sleepWatch does.
//
// It is guarded by the shard's mu.
type alarms struct {
	epoch time.Time // of instants
	heap  []alarm   // each not before its parent, which stands at half its place
	timer *time.Timer
	fires instant // when timer will; 0: it does not
	wake  func()  // what it does

	watch   func() // has the shard looked after by the sleepWatch
	watched bool   // it is
}

type alarm struct {
	at instant
	f  *flight // whose place is this alarm's place in the heap, counted from 1
}

// set has f called at that time, and not at the time that was set before.
func (as *alarms) set(f *flight, at instant) {
	if f.alarmAt == 0 {
		as.heap = append(as.heap, alarm{})
		f.alarmAt = int32(len(as.heap))
	}
	as.settle(int(f.alarmAt), alarm{at, f})
	as.arm()
}

// drop forgets f.
func (as *alarms) drop(f *flight) {
	if f.alarmAt == 0 {
		return
	}
	last := as.heap[len(as.heap)-1]
	as.heap[len(as.heap)-1] = alarm{}
	as.heap = as.heap[:len(as.heap)-1]
	if last.f != f {
		as.settle(int(f.alarmAt), last)
	}
	f.alarmAt = 0
}

// hangs is how long a flight's call may take until others' are made beside it.
const hangs = 10 * time.Millisecond

// due takes out a flight whose time has come. If there is none, the timer waits for the
// first that will be.
func (as *alarms) due() *flight {
	if len(as.heap) == 0 {
		return nil
	}
	now := as.now()
	first := as.heap[0]
	if first.at > now {
		as.fires = 0
		as.arm()
		return nil
	}
	as.drop(first.f)
	if len(as.heap) > 0 && as.fires == 0 {
		as.fire(now + instant(hangs))
	}
	return first.f
}

// arm sees to it that the timer fires when the first alarm is due, or earlier.
func (as *alarms) arm() {
	at := as.heap[0].at
	if as.fires != 0 && as.fires <= at {
		return
	}
	as.fire(at)
}

// all has every flight called now that has an alarm.
func (as *alarms) all() {
	now := as.now()
	for i := range as.heap { // each stays not before its parent
		as.heap[i].at = min(as.heap[i].at, now)
	}
	as.fire(now)
}

// fire has the timer fire at that time, and the shard looked after as long as any flight has an
// alarm.
func (as *alarms) fire(at instant) {
	as.fires = at
	if !as.watched {
		as.watched = true
		as.watch()
	}
	if wait := time.Duration(at - as.now()); as.timer == nil {
		as.timer = clock.AfterFunc(wait, as.wake)
	} else {
		as.timer.Reset(wait)
	}
}

func (as *alarms) now() instant { return instant(clock.Since(as.epoch)) }

// settle puts a in that place, which is free, or as far up or down from it as its time
// wants.
func (as *alarms) settle(place int, a alarm) {
	for place > 1 && a.at < as.heap[place/2-1].at {
		place = as.move(place/2, place)
	}
	for {
		child := 2 * place
		if child < len(as.heap) && as.heap[child].at < as.heap[child-1].at {
			child++
		}
		if child > len(as.heap) || a.at <= as.heap[child-1].at {
			break
		}
		place = as.move(child, place)
	}
	as.heap[place-1] = a
	a.f.alarmAt = int32(place)
}

// move takes the alarm of one place to another, and says which place is free then.
func (as *alarms) move(from, to int) int {
	as.heap[to-1] = as.heap[from-1]
	as.heap[to-1].f.alarmAt = int32(to)
	return from
}

// arm has f called at that time, or earlier if its alarm is: all may have moved it. The caller holds f.mu.
func (sh *shard) arm(f *flight, at instant) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if as := &sh.alarms; f.alarmAt == 0 || at < as.heap[f.alarmAt-1].at {
		as.set(f, at)
	}
}

// wake calls whoever is due.
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

// rest stops the timer. No flight is left.
func (sh *shard) rest() {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sh.alarms.timer != nil {
		sh.alarms.timer.Stop()
	}
}
