package flight

import (
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// sleepWatch calls flights whose time has come by the wall clock alone. Timers go by the
// monotonic clock, which stands still while the machine sleeps, and a lease does not: those who
// wait for the end of a lock, or behind it, would learn of it later than Err says it, by as long
// as the machine has slept.
//
// While any flight has an alarm, one timer for the whole Group compares the two clocks, twice a
// second. If the wall clock has got ahead of the monotonic one, all flights that have an alarm are
// called at once; each does what is due by either clock, and sets its next alarm for when the first
// of the two will say so. So an end is noticed at most a second after the machine continues, and a
// lock costs nothing for that. If each shard's timer came as often by itself, it would wake the
// process 64 times for it, and no timer of Go's goes by the wall clock.
//
// The wall clock has to have got ahead since an alarm was set, so what counts is the least by
// which it was ahead since flights were called: one that is set back, and forward again, is
// noticed, unless both happen between two comparisons.
//
//	off --a shard's timer is set--> on --no flight has an alarm--> off
type sleepWatch struct {
	epoch time.Time

	mu      sync.Mutex // guards what follows; taken after a shard's mu, never before
	shards  []*shard   // with alarms, for the next comparison
	timer   *time.Timer
	on      bool          // the timer will fire
	stopped bool          // for good
	ahead   time.Duration // how far the wall clock was ahead of the monotonic one, at least
}

const (
	compareEvery = 500 * time.Millisecond
	// A wall clock that is slewed gets ahead without a sleep. Flights are not called for less than
	// that.
	minSleep = 50 * time.Millisecond
)

// add adds sh, whose alarms are marked as watched, so nobody else adds it.
func (w *sleepWatch) add(sh *shard) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.shards = append(w.shards, sh)
	switch {
	case w.on || w.stopped:
		return
	case w.timer == nil:
		w.timer = clock.AfterFunc(compareEvery, w.compare)
	default:
		w.timer.Reset(compareEvery)
	}
	w.on = true
}

// compare compares the clocks, and calls flights if the machine slept.
func (w *sleepWatch) compare() {
	now := clock.Now()
	ahead := time.Duration(now.UnixNano()-w.epoch.UnixNano()) - now.Sub(w.epoch)
	w.mu.Lock()
	shards := w.shards
	w.shards, w.on = nil, false
	slept := ahead-w.ahead > minSleep
	if slept || ahead < w.ahead {
		w.ahead = ahead
	}
	w.mu.Unlock()
	for _, sh := range shards {
		if sh.awake(slept) {
			w.add(sh)
		}
	}
}

// stop is for good.
func (w *sleepWatch) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stopped, w.on = true, false
	if w.timer != nil {
		w.timer.Stop()
	}
}

// awake calls all flights that have an alarm, if the machine slept. If none has one, it stops
// the timer, and says that the shard need not be looked after.
func (sh *shard) awake(slept bool) (watched bool) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	h := &sh.alarms
	switch {
	case len(h.heap) == 0:
		h.timer.Stop() // if it has just fired, nothing is due
		h.fires, h.watched = 0, false
	case slept:
		h.all()
	}
	return h.watched
}
