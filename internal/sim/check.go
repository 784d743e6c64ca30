package sim

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/node"
)

// A checker checks the invariants after every step:
//
//   - a Lock is valid when it is given;
//   - at most one Lock of a key is valid, by its own Err, over all clients; or any number of read locks;
//   - tokens strictly rise, in the order in which locks are had, but that an attached lock may have that of
//     the one that was detached, if nobody has had the key in between; those of read locks are between those
//     of the locks before and after them;
//   - a lease that was recalled while its process retained leases, and neither held nor wanted the key, is
//     not used any more;
//   - a Lock that is over stays over, and its Context has ended by then, unless the process
//     pauses;
//   - a Release that succeeded has freed the key, or handed it over, or its process retains a lease;
//   - no key is free for longer than the plan's patience while somebody waits for it;
//   - no Get that began after an invalidation has an older value.
//
// And at the end, without faults: every waiter is served, and no key is left.
type checker struct {
	w       *world
	holds   []*hold          // acquired, and not released yet
	fences  map[string]int64 // the largest token of each key
	written map[string]int64 // the largest token of a lock of it that is no read lock
	// owners of leases that were recalled while nobody of their process wanted the key
	recalled   map[string]bool
	adrift     map[string]time.Duration // until when keys may be there that were detached: see drifts
	grants     int
	attaches   int // calls of Attach
	attached   int // of these, those that had the lock
	violations []string

	taken   map[string]time.Duration // when each key was not free, the last time that was looked
	longest time.Duration            // for which one was free while somebody waited
}

// hold is a lock that a worker has.
type hold struct {
	k     *worker
	lock  *flightlock.Lock
	ctx   context.Context
	key   string
	owner string
	end   time.Duration // when the worker releases it
	read  bool          // it is a read lock
	lost  bool
}

func (ch *checker) violation(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	ch.w.logf("VIOLATION  %s", text)
	ch.violations = append(ch.violations, text)
}

func (ch *checker) broken() bool { return len(ch.violations) > 0 }

// granted notes that a worker has got a lock, which it may have attached.
func (ch *checker) granted(k *worker, l *flightlock.Lock, received *parcel) *hold {
	h := &hold{k: k, lock: l, key: k.op.key, owner: l.Owner(), ctx: l.Context(context.Background()),
		read: k.op.how == "read"}
	ch.w.logf("%v HAS %q fence=%d owner=%s for %v", k, h.key, l.Fence(), short(h.owner), time.Until(l.Until()))
	ch.grants++
	if received != nil {
		ch.attached++
	}
	if ch.fences == nil {
		ch.fences, ch.written = map[string]int64{}, map[string]int64{}
	}
	last := ch.fences[h.key]
	if h.read {
		last = ch.written[h.key]
	}
	same := received != nil && l.Fence() == received.fence && last == received.fence // nobody had it in between
	if l.Fence() <= last && !same && !ch.w.plan.loose {
		ch.violation("%v: the token of %q does not rise: %d after %d", k, h.key, l.Fence(), last)
	}
	ch.fences[h.key] = max(ch.fences[h.key], l.Fence())
	if !h.read {
		ch.written[h.key] = ch.fences[h.key]
	}
	if ch.recalled[h.owner] {
		ch.violation("%v: the lease of %q was given after its recall: %s", k, h.key, short(h.owner))
	}
	if err := l.Err(); err != nil {
		ch.violation("%v: the lock of %q was over when it was given: %v", k, h.key, err)
	}
	ch.holds = append(ch.holds, h)
	return h
}

// arrives notes a message that is about to arrive at a client. If it is a recall, and none of the client's
// workers is about the key, the lease that it names is given to none of them from now on. (A lease that is
// being refreshed for a caller who has left is not retained: it may still be handed on, within the turn.)
func (ch *checker) arrives(k *conn, message string) {
	r, is := node.ParseRecall(message)
	if !is || k.broken() || k.client.lib.Stats().Retained == 0 {
		return
	}
	for _, other := range k.client.workers {
		if other.busy && other.op.how != "fetch" && "lock:"+other.op.key == r.Key {
			return
		}
	}
	if ch.recalled == nil {
		ch.recalled = map[string]bool{}
	}
	ch.recalled[r.Owner] = true
}

// letsGo notes that a worker is about to release.
func (ch *checker) letsGo(h *hold) {
	ch.holds = slices.DeleteFunc(ch.holds, func(o *hold) bool { return o == h })
}

// forgetHolds forgets the holds of a client that has ended.
func (ch *checker) forgetHolds(c *client) {
	ch.holds = slices.DeleteFunc(ch.holds, func(o *hold) bool { return o.k.c == c })
}

// released checks the keys after a Release.
func (ch *checker) released(h *hold, err error) {
	ch.w.logf("%v releases %q: %v", h.k, h.key, err)
	if err == nil && h.lost {
		ch.violation("%v: Release of %q says nil, but it was lost", h.k, h.key)
	}
	if err != nil || ch.w.plan.copies > 0 || ch.handedOver(h) || h.k.c.lib.Stats().Retained > 0 {
		return
	}
	with := 0
	for _, s := range ch.w.servers {
		if s.holds(h.key, h.owner) && !s.freed[h.owner] { // else it has come back by a request that was late
			with++
		}
	}
	if n := len(ch.w.servers); n-with < n/2+1 {
		ch.violation("%v: Release of %q says nil, but %d of %d nodes still have the key", h.k, h.key, with, n)
	}
}

// handedOver reports whether somebody of the same client has the lease of h now, or waits for it.
func (ch *checker) handedOver(h *hold) bool {
	for _, k := range h.k.c.workers {
		if k != h.k && k.busy && k.op.how != "fetch" && k.op.key == h.key {
			return true
		}
	}
	return false
}

func (s *server) holds(key, owner string) bool {
	v := s.find("lock:" + key)
	return v != nil && (v.text == owner || v.text == node.Readers && slices.Contains(s.readers(key), owner))
}

// readers are the owners of the shares of a key that have not ended.
func (s *server) readers(key string) (owners []string) {
	set := s.find(node.Reserved + node.SlotTag("lock:"+key) + "}:readers:lock:" + key)
	if set == nil {
		return nil
	}
	for _, m := range set.members {
		if m.score >= float64(s.millis()) {
			owners = append(owners, m.name)
		}
	}
	return owners
}

// check runs after each step.
func (ch *checker) check() {
	ch.checkFree()
	for i, h := range ch.holds {
		switch err := h.lock.Err(); {
		case err != nil && !h.lost:
			h.lost = true
			ch.w.logf("%v LOSES %q: %v", h.k, h.key, err)
		case err == nil && h.lost:
			ch.violation("%v: the lock of %q is back", h.k, h.key)
		}
		if h.lost && h.ctx.Err() == nil && h.k.c.punctual() {
			ch.violation("%v: the lock of %q is over, its Context is not", h.k, h.key)
		}
		for _, o := range ch.holds[:i] {
			if !o.lost && !h.lost && o.key == h.key && !(o.read && h.read) {
				ch.violation("%v and %v both hold %q: %s and %s", o.k, h.k, h.key, short(o.owner), short(h.owner))
			}
		}
	}
}

// checkFree notes for how long keys have been free while somebody waits for them.
func (ch *checker) checkFree() {
	p := ch.w.plan
	if p.patience == 0 || ch.w.healed {
		return
	}
	if ch.taken == nil {
		ch.taken = map[string]time.Duration{}
	}
	now := ch.w.now()
	for i := range p.keys {
		key := fmt.Sprintf("k%d", i)
		held := slices.ContainsFunc(ch.holds, func(h *hold) bool { return h.key == key && !h.lost })
		if held {
			ch.taken[key] = now
			continue
		}
		free := now - max(ch.waitsSince(key), ch.taken[key])
		ch.longest = max(ch.longest, free)
		if free > p.patience {
			ch.violation("%q was free for %v while somebody waited", key, free)
		}
	}
}

// waitsSince is when the first of those began who wait for the lock of the key now; now, if nobody does.
func (ch *checker) waitsSince(key string) time.Duration {
	first := ch.w.now()
	for _, c := range ch.w.clients {
		for _, k := range c.workers {
			waits := k.busy && k.hold == nil && k.op.key == key && k.op.how != "fetch" && k.op.how != "try"
			if waits && !c.closing {
				first = min(first, k.began)
			}
		}
	}
	return first
}

// idle reports whether no worker has anything to do, or waits for anything.
func (ch *checker) idle() bool {
	for _, c := range ch.w.clients {
		if c.closing {
			if !c.ended {
				return false
			}
			continue
		}
		for _, k := range c.workers {
			if k.busy {
				return false
			}
		}
	}
	return true
}

// served runs at the end, when there was time enough for every waiter.
func (ch *checker) served() {
	for _, c := range ch.w.clients {
		if c.closing && !c.ended {
			ch.violation("%v does not close", c)
		}
		for _, k := range c.workers {
			if k.busy && !c.closing {
				ch.violation("%v still waits for %q", k, k.op.key)
			}
		}
	}
}

// clean runs when every lock was released a while ago. Keys of clients that were
// ended may be there until they expire, as those that were detached, and so may those that were released and
// then brought back by an old disk.
func (ch *checker) clean() {
	for _, s := range ch.w.servers {
		if !s.up || ch.w.plan.copies > 0 { // a key made by a repeated acquire lives for its ttl
			continue
		}
		for _, key := range s.sortedKeys() {
			v := s.find(key)
			if v == nil || v.old || !strings.HasPrefix(key, "lock:") &&
				!strings.HasPrefix(key, "flightlock:fetch:lock:") {
				continue
			}
			if ch.w.now() < ch.adrift[strings.TrimPrefix(key, "lock:")] {
				continue
			}
			owners := []string{v.text}
			if v.text == node.Readers {
				owners = s.readers(strings.TrimPrefix(key, "lock:"))
			}
			for _, owner := range owners {
				if c := ch.clientOf(owner); c != nil && !c.closing {
					ch.violation("%v still has %q, of %s", s, key, owner)
				}
			}
		}
	}
	for _, c := range ch.w.clients {
		st := c.lib.Stats()
		if c.closing {
			continue
		}
		if st.Waiters != 0 || st.Held != 0 || st.Retained != 0 {
			ch.violation("%v: %d waiters, %d holders and %d retained leases are left", c, st.Waiters, st.Held,
				st.Retained)
		}
		if st.Debts != 0 && len(ch.w.plan.down) == 0 {
			ch.violation("%v: %d debts are left", c, st.Debts)
		}
	}
}

// clientOf is whose owner that is.
func (ch *checker) clientOf(owner string) *client {
	for _, c := range ch.w.clients {
		if strings.HasPrefix(owner, c.String()+"#") {
			return c
		}
	}
	return nil
}

// short shortens UUIDs in a text.
func short(s string) string { return uuids.ReplaceAllString(s, "#") }
