package quorum

import (
	"math"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/list"
)

// deadlines decides rounds of releases whose timeout has passed. All have the same timeout, so
// they are due in the order in which they began: a list and one timer suffice. A timer for each
// would cost more than the rest of the round.
//
// If the timer is late, this process was stopped, or short of processor time, and the answers may wait in
// the sockets. So rounds that are due then have the timeout once more, from when the timer came. That is
// the latest deadline in the list, which remains in order.
type deadlines struct {
	timeout time.Duration
	began   time.Time // zero of its clock

	mu     sync.Mutex // guards what follows, and the links of the rounds
	rounds list.List[round, *round]
	timer  *time.Timer   // nil until the first round
	armed  bool          // the timer will fire
	at     time.Duration // armed: for when
}

// add calls r.expire after the timeout, unless remove is called before. The caller has not sent r
// yet.
func (d *deadlines) add(r *round) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Since(d.began)
	d.pushLocked(r, now)
	if !d.armed {
		d.armLocked(now, d.timeout)
	}
}

func (d *deadlines) pushLocked(r *round, now time.Duration) {
	r.due = now + d.timeout
	d.rounds.PushBack(r)
	r.listed = true
}

func (d *deadlines) armLocked(now, wait time.Duration) {
	d.armed, d.at = true, now+wait
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
func (d *deadlines) fire() {
	d.mu.Lock()
	now := time.Since(d.began) // under mu, as in add: what is put off is the last in the list
	d.expireAndUnlock(now, now-d.at >= conn.MinGrace)
}

// stop expires all rounds in the list, since nothing would do so later. No round may be added
// afterwards.
func (d *deadlines) stop() {
	d.mu.Lock()
	d.expireAndUnlock(math.MaxInt64, false)
}

// expireAndUnlock expires the rounds that are due by now, and arms the timer for the next. If the timer was late,
// those that have not been put off before are put off.
func (d *deadlines) expireAndUnlock(now time.Duration, late bool) {
	var due []*round
	first := d.rounds.Front()
	for ; first != nil && first.due <= now; first = d.rounds.Front() {
		d.removeLocked(first)
		if late && !first.putOff {
			first.putOff = true
			d.pushLocked(first, now)
			continue
		}
		due = append(due, first)
	}
	d.armed = false
	if first != nil {
		d.armLocked(now, first.due-now)
	} else if d.timer != nil {
		d.timer.Stop()
	}
	d.mu.Unlock()
	for _, r := range due {
		r.expire()
	}
}
