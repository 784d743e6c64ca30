package prom

import (
	"maps"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/flightlock/flightlock"
	"github.com/prometheus/client_golang/prometheus"
)

// maxClasses is how many classes there are. Those that come later are "other": a Class that returns keys by
// mistake must not make a time series of each.
const maxClasses = 100

const otherClass = "other"

// waits are how long callers have waited. A lock that is handed over is observed without a mutex or garbage.
type waits struct {
	acquire *prometheus.HistogramVec

	mu      sync.Mutex                                  // taken to write classes
	classes atomic.Pointer[map[string]*acquiredOfClass] // never changed, but replaced
}

// acquiredOfClass are the members of acquire for locks that were acquired.
type acquiredOfClass struct {
	label string
	by    map[flightlock.WaitCause]prometheus.Observer
}

func (w *waits) init() {
	w.acquire = histogram("acquire_duration_seconds",
		"How long callers waited for a lock, by outcome and by what they waited for: "+
			"remote (no other caller of this process), queue (other callers of this process, then remote) "+
			"or handoff (other callers of this process, without Redis).",
		"outcome", "wait", "class")
	w.classes.Store(&map[string]*acquiredOfClass{"": w.of(""), otherClass: w.of(otherClass)})
	for _, cause := range causes { // of those without a class rates begin at 0
		w.acquire.WithLabelValues(string(flightlock.OutcomeAcquired), string(cause), "")
	}
}

var causes = []flightlock.WaitCause{flightlock.WaitRemote, flightlock.WaitQueue, flightlock.WaitHandoff}

// of makes what is needed for a class; other has no series until it is used.
func (w *waits) of(label string) *acquiredOfClass {
	c := &acquiredOfClass{label: strings.ToValidUTF8(label, "\uFFFD")}
	if label == otherClass {
		return c
	}
	c.by = make(map[flightlock.WaitCause]prometheus.Observer, len(causes))
	for _, cause := range causes {
		c.by[cause] = w.acquire.WithLabelValues(string(flightlock.OutcomeAcquired), string(cause), c.label)
	}
	return c
}

// class gives what is known of a class, which is "other" when there are too many.
func (w *waits) class(class string) *acquiredOfClass {
	known := *w.classes.Load()
	if c := known[class]; c != nil {
		return c
	}
	if len(known) >= maxClasses+2 { // with "" and other
		return known[otherClass]
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	known = *w.classes.Load()
	if c := known[class]; c != nil || len(known) >= maxClasses+2 {
		if c == nil {
			c = known[otherClass]
		}
		return c
	}
	more := maps.Clone(known)
	more[class] = w.of(class)
	w.classes.Store(&more)
	return more[class]
}

// label is the value of the label for a class.
func (w *waits) label(class string) string { return w.class(class).label }

func (w *waits) observe(e flightlock.Event) {
	c := w.class(e.Class)
	if e.Outcome == flightlock.OutcomeAcquired {
		if o := c.by[e.Cause]; o != nil {
			o.Observe(e.Took.Seconds())
			return
		}
	}
	w.acquire.WithLabelValues(string(e.Outcome), string(e.Cause), c.label).Observe(e.Took.Seconds())
}
