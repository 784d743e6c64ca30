package flight

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// sleepWatch calls flights whose time has come by the wall clock alone. Timers go by the
// monotonic clock, which stands still while the machine sleeps, and a lease does not: those who
// wait for the end of a lock, or behind it, would learn of it later than Err says it, by as long
// as the machine has slept.
//
// While there are flights, one timer for the whole Group compares the two clocks, twice a second. If
// the wall clock has got ahead of the monotonic one, the alarms of all flights are due at once; each
// does what is due by either clock, and sets its next alarm for when the first of the two will say
// so. So an end is noticed at most a second after the machine continues, and a lock costs nothing
// for that. If each alarm came as often by itself, it would wake the process for each lock, and no
// timer of Go's goes by the wall clock.
//
// The wall clock has to have got ahead since an alarm was set, so what counts is the least by
// which it was ahead since flights were called: one that is set back, and forward again, is
// noticed, unless both happen between two comparisons.
type sleepWatch struct {
	g  *Group
	on atomic.Bool // the timer will fire, or a comparison will look whether there are flights

	mu    sync.Mutex // guards what follows; a leaf
	timer *time.Timer
	ahead time.Duration // how far the wall clock was ahead of the monotonic one, at least
}

const (
	compareEvery = 500 * time.Millisecond
	// A wall clock that is slewed gets ahead without a sleep. Flights are not called for less than
	// that.
	minSleep = 50 * time.Millisecond
)

// start has the clocks compared while there are flights.
func (w *sleepWatch) start() {
	if w.on.Load() || w.on.Swap(true) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer == nil {
		w.timer = clock.AfterFunc(compareEvery, w.compare)
	} else {
		w.timer.Reset(compareEvery)
	}
}

// compare compares the clocks, and calls flights if the machine slept.
func (w *sleepWatch) compare() {
	now, epoch := clock.Now(), w.g.epoch
	ahead := time.Duration(now.UnixNano()-epoch.UnixNano()) - now.Sub(epoch)
	w.mu.Lock()
	slept := ahead-w.ahead > minSleep
	if slept || ahead < w.ahead {
		w.ahead = ahead
	}
	w.mu.Unlock()
	w.on.Store(false) // a flight that comes from now on starts it
	if !w.g.any() {
		return
	}
	w.start()
	if slept {
		for _, f := range w.g.all() {
			f.callNow()
		}
	}
}

// stop is called when there are no flights, and will be none.
func (w *sleepWatch) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer != nil {
		w.timer.Stop()
	}
}

// callNow has the alarm go off now, if it is set. It is not put off by another one that is set before it does.
func (f *flight) callNow() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.armed != 0 {
		f.armed = clock.InstantNow(f.g.epoch)
		f.alarm.Reset(0)
	}
}
