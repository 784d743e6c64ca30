package quorum

import (
	"math"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/list"
)

// deadlines decides rounds of releases whose timeout has passed. All have the same timeout, so
// they are due in the order in which they began: a list and one timer suffice. A timer for each
// would cost more than the rest of the round.
type deadlines struct {
	timeout time.Duration
	began   time.Time // zero of its clock

	mu     sync.Mutex // guards what follows, and the links of the rounds
	rounds list.List[round, *round]
	timer  *time.Timer // nil until the first round
	armed  bool        // the timer will fire
}

// add calls r.expire after the timeout, unless remove is called before. The caller has not sent r
// yet.
func (d *deadlines) add(r *round) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r.due = time.Since(d.began) + d.timeout
	d.rounds.PushBack(r)
	r.listed = true
	if !d.armed {
		d.armLocked(d.timeout)
	}
}

func (d *deadlines) armLocked(wait time.Duration) {
	d.armed = true
	if d.timer == nil {
		d.timer = clock.AfterFunc(wait, d.fire)
	} else {
		d.timer.Reset(wait)
	}
}

// remove takes r out, if it is still in.
func (d *deadlines) remove(r *round) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.removeLocked(r)
}

func (d *deadlines) removeLocked(r *round) {
	if !r.listed {
		return
	}
	r.listed = false
	d.rounds.Remove(r)
}

// fire expires the rounds that are due. The timer is not stopped when the list becomes empty: it
// fires once more, for nothing.
func (d *deadlines) fire() { d.expire(time.Since(d.began)) }

// stop expires all rounds in the list, since nothing would do so later. No round may be added
// afterwards.
func (d *deadlines) stop() { d.expire(math.MaxInt64) }

// expire expires the rounds that are due by now, and arms the timer for the next.
func (d *deadlines) expire(now time.Duration) {
	var due []*round
	d.mu.Lock()
	first := d.rounds.Front()
	for ; first != nil && first.due <= now; first = d.rounds.Front() {
		due = append(due, first)
		d.removeLocked(first)
	}
	d.armed = false
	if first != nil {
		d.armLocked(first.due - now)
	} else if d.timer != nil {
		d.timer.Stop()
	}
	d.mu.Unlock()
	for _, r := range due {
		r.expire()
	}
}
