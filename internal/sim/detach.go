package sim

import (
	"errors"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/node"
)

// A parcel is a detached lock on its way to whoever attaches it: usually another process. Sometimes two get
// it.
type parcel struct {
	d      flightlock.Detached
	key    string
	fence  int64
	copies int
	tries  int // of who has it
}

const (
	maxCopies = 2
	maxTries  = 4
)

// detaches reports whether a lock is detached now, and not released, in some of the worlds. It draws nothing:
// a seed that has found something is to find it again. A detached lock is nobody's for a while, so not where
// patience is measured; and a lease that may be retained cannot be detached, nor a read lock.
func (w *world) detaches(h *hold) bool {
	return w.plan.seed%4 == 1 && w.plan.patience == 0 && w.now()/time.Microsecond%4 == 1 &&
		!node.Retains(h.owner) && !h.read
}

// drifts notes that key may be there for a ttl, although it is nobody's: it was detached, or an attempt to
// attach it may have reached some nodes.
func (ch *checker) drifts(key string) {
	if ch.adrift == nil {
		ch.adrift = map[string]time.Duration{}
	}
	ch.adrift[key] = ch.w.now() + ch.w.plan.maxTTL + time.Second
}

// detach detaches the worker's lock.
func (k *worker) detach() {
	h, w := k.hold, k.c.w
	w.checker.letsGo(h)
	var d flightlock.Detached
	var err error
	k.do(func() { d, err = h.lock.Detach() }, func() {
		w.logf("%v detaches %q: %v", k, h.key, err)
		w.checker.drifts(h.key)
		switch {
		case err == nil && h.lost:
			w.checker.violation("%v: Detach of %q says nil, but it was lost", k, h.key)
		case err == nil && h.ctx.Err() == nil:
			w.checker.violation("%v: %q is detached, and its Context has not ended", k, h.key)
		case err == nil:
			w.parcels = append(w.parcels, &parcel{d: d, key: h.key, fence: h.lock.Fence()})
			if w.healed {
				w.lapsing++
			}
		}
		k.hold = nil
		k.cancel()
		k.later(k.next)
	})
}

// receives has the operation that is about to begin attach a lock, if there is one.
func (k *worker) receives(op *operation) {
	w := k.c.w
	if k.parcel == nil && len(w.parcels) > 0 && op.how != "fetch" {
		p := *w.parcels[0]
		if p.tries = 0; p.copies < maxCopies && w.now()/time.Microsecond%3 == 0 {
			w.parcels[0].copies++
		} else {
			w.parcels = w.parcels[1:]
		}
		k.parcel = &p
	}
	if k.parcel != nil {
		op.how, op.key, op.endless = "attach", k.parcel.key, false
	}
}

// attached continues when Attach has returned: if its outcome is not known, the next operation settles it.
func (k *worker) attached(err error) {
	k.c.w.checker.drifts(k.parcel.key)
	k.c.w.checker.attaches++
	if p := k.parcel; err == nil || errors.Is(err, flightlock.ErrNotHeld) || p.tries >= maxTries {
		k.parcel = nil
	} else {
		p.tries++
	}
}
