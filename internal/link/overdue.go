package link

import (
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
)

// overdue is when those give up who wait for something that is not there, and the timer that comes then. The
// zero value: nobody waits. A mutex of its owner's guards it.
type overdue struct {
	at     time.Time
	putOff bool        // at was, because this process was late
	timer  *time.Timer // nil until it was needed
}

// isSet reports whether somebody waits.
func (o *overdue) isSet() bool { return !o.at.IsZero() }

// set has fire called at that time, on a goroutine of its own. It is to call passed, and is always the same
// function.
func (o *overdue) set(at time.Time, fire func()) {
	o.at = at
	if o.timer == nil {
		o.timer = clock.AfterFunc(time.Until(at), fire)
	} else {
		o.timer.Reset(time.Until(at))
	}
}

// stop has nobody give up.
func (o *overdue) stop() {
	if o.timer != nil {
		o.timer.Stop()
	}
	o.at, o.putOff = time.Time{}, false
}

// passed is for fire, and reports whether it is time to give up: then nobody waits any more. If this process
// was stopped meanwhile, there is that much time once more.
func (o *overdue) passed(more time.Duration, fire func()) bool {
	now := time.Now()
	switch {
	case o.at.IsZero() || now.Before(o.at): // it was stopped, or set again, just as the timer came
		return false
	case now.Sub(o.at) >= conn.MinGrace && !o.putOff:
		o.putOff = true
		o.set(now.Add(more), fire)
		return false
	}
	o.stop()
	return true
}
