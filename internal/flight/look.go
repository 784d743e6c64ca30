package flight

import (
	"context"
	"time"
)

// AcquireUnless is Acquire for a caller that may find that it needs the key no more, because
// another process has done the work meanwhile: whenever there is news of the key, or an
// attempt after the first is due, needless is called on the caller's goroutine. True ends
// the wait, with stopped and without the key; news that the work has failed elsewhere ends it with
// Config.Failed. So does that too few nodes can be reached: such
// a caller has other ways. As long as needless takes its time no attempt is made, unless
// others wait behind: they are not held up.
func (g *Group) AcquireUnless(ctx context.Context, key string, h *Hold, ttl time.Duration, pace Pace, needless func(context.Context) bool) (stopped bool, err error) {
	began := g.begins()
	stopped, err = g.acquireUnless(ctx, key, h, ttl, pace, needless)
	if stopped {
		return true, nil
	}
	return false, g.tell(began, h, err)
}

func (g *Group) acquireUnless(ctx context.Context, key string, h *Hold, ttl time.Duration, pace Pace, needless func(context.Context) bool) (stopped bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, g.cfg.GaveUp(key, err, nil)
	}
	h.ttl, h.wait = ttl, g.waiting(pace)
	h.news, h.looks = make(chan struct{}, 1), true
	h.traits |= FailFast
	f, err := g.join(key, h, Queue, g.mayBlock(ctx))
	if err != nil {
		h.refusal = err
		return false, g.answered(h)
	}
	for {
		select {
		case <-h.ready:
			return false, g.answered(h)
		case <-ctx.Done():
			return false, f.quit(h, ctx.Err())
		case <-h.news:
			select { // the key is ours: whoever has it looks anyway
			case <-h.ready:
				return false, g.answered(h)
			default:
			}
			if ctx.Err() == nil && needless(ctx) {
				_ = f.quit(h, context.Canceled)
				return true, nil
			}
			if ctx.Err() == nil { // else the next round ends it
				f.proceed()
			}
		}
	}
}

// tryLocked begins an attempt, when the front waiter has seen that it is needed.
func (f *flight) tryLocked() {
	if looks := f.tellLocked(); f.n > 1 || !looks {
		f.askLocked(f.head)
		return
	}
	f.looking = true
}

// sendLocked is tryLocked for a turn that is ours, a time in which nobody holds the key. With
// one node, the front waiter makes the attempt on its own goroutine, like one that comes to
// a free key: that saves two switches between goroutines.
func (f *flight) sendLocked() {
	h := f.head
	if !f.g.cfg.Alone || h.news != nil || h.sent {
		f.tryLocked()
		return
	}
	f.tellLocked()
	h.sent, f.looking = true, true
	h.ready <- struct{}{}
}

// goes has h, which was sent, make the attempt, unless another goroutine was faster. It
// says whether h's wait is over already.
func (f *flight) goes(h *Hold, inline bool) (over bool) {
	f.mu.Lock()
	defer f.unlockInline(inline)
	h.sent = false
	if h.state != waiting {
		return true
	}
	f.proceedLocked()
	return false
}

// wakeLocked tells h that its wait is over. If it was sent, it is about to see.
func (h *Hold) wakeLocked() {
	if !h.sent {
		h.ready <- struct{}{}
	}
}

// tellLocked tells all who look that there is news, and says whether the front waiter is one of them.
func (f *flight) tellLocked() (front bool) {
	h := f.head
	for left := f.lookers; left > 0; h = h.next {
		if h.news == nil {
			continue
		}
		left--
		select {
		case h.news <- struct{}{}:
		default:
		}
	}
	return f.lookers > 0 && f.head.news != nil
}

// lookerLocked reports whether h is of AcquireUnless.
func (h *Hold) lookerLocked() bool { return h.news != nil }

// proceed makes the attempt that has waited for the front waiter to look.
func (f *flight) proceed() {
	f.mu.Lock()
	defer f.unlock()
	f.proceedLocked()
}

func (f *flight) proceedLocked() {
	if f.looking && f.pausingLocked() {
		f.askLocked(f.head)
	}
}
