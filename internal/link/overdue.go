package link

import (
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
)

// Overdue is when those give up who wait for something that is not there, and the timer that comes then. The zero
// value: nobody waits. A mutex of its owner's guards it.
type Overdue struct {
	at     time.Time
	putOff bool        // at was, because this process was late
	timer  *time.Timer // nil until it was needed
}

// IsSet reports whether somebody waits.
func (o *Overdue) IsSet() bool { return !o.at.IsZero() }

// Set has fire called at that time, on a goroutine of its own. It is to call Passed, and is always the same function.
func (o *Overdue) Set(at time.Time, fire func()) {
	o.at = at
	if o.timer == nil {
		o.timer = clock.AfterFunc(time.Until(at), fire)
	} else {
		o.timer.Reset(time.Until(at))
	}
}

// Stop has nobody give up.
func (o *Overdue) Stop() {
	if o.timer != nil {
		o.timer.Stop()
	}
	o.at, o.putOff = time.Time{}, false
}

// Passed is for fire, and reports whether it is time to give up: then nobody waits any more. If this process was
// stopped meanwhile, there is that much time once more.
func (o *Overdue) Passed(more time.Duration, fire func()) bool {
	now := time.Now()
	switch {
	case o.at.IsZero() || now.Before(o.at): // it was stopped, or set again, just as the timer came
		return false
	case now.Sub(o.at) >= conn.MinGrace && !o.putOff:
		o.putOff = true
		o.Set(now.Add(more), fire)
		return false
	}
	o.Stop()
	return true
}
