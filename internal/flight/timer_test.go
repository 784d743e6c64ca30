package flight

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// bell is a Timer's callback, and records the time.
type bell struct {
	Timer
	w    *world
	rang []time.Time // guarded by w.mu
}

func (b *bell) Due() {
	b.w.mu.Lock()
	defer b.w.mu.Unlock()
	b.rang = append(b.rang, time.Now())
}

// times is how often b has rung by now.
func (b *bell) times() int {
	synctest.Wait()
	b.w.mu.Lock()
	defer b.w.mu.Unlock()
	return len(b.rang)
}

// A timer fires at its time, once, however many there are, and may be set again.
func TestRemindersComeInTime(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		h := &w.start(ttl(time.Minute)).h
		var bells [5]bell
		began := time.Now()
		for i := range bells {
			bells[i].w = w
			h.SetTimer(&bells[i].Timer, &bells[i], time.Duration(5-i)*time.Second)
		}
		h.SetTimer(&bells[0].Timer, &bells[0], 9*time.Second) // moved
		time.Sleep(6 * time.Second)
		is(t, "the one that was moved", bells[0].times(), 0)
		h.SetTimer(&bells[1].Timer, &bells[1], time.Second) // again
		time.Sleep(20 * time.Second)
		for i := range bells {
			is(t, "rang", bells[i].times(), map[int]int{1: 2}[i]+map[bool]int{true: 1}[i != 1])
		}
		is(t, "the first", bells[0].rang[0].Sub(began), 9*time.Second)
		is(t, "the second", bells[1].rang[0].Sub(began), 4*time.Second)
		is(t, "the second again", bells[1].rang[1].Sub(began), 7*time.Second)
		is(t, "the last", bells[4].rang[0].Sub(began), time.Second)
		h.Release()
	})
}

// Long waits that would end within one coalesceWindow end together, and none late. Short ones end
// when they would.
func TestLongWaitsEndTogether(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		const each = 7
		rang := map[time.Time]int{}
		var holds [3 * each]*caller
		var bells [len(holds)]bell
		var due [len(holds)]time.Time
		for i := range holds {
			holds[i] = w.start(key(fmt.Sprint(i)), ttl(time.Minute))
			bells[i].w, due[i] = w, time.Now().Add(longWait)
			holds[i].h.SetTimer(&bells[i].Timer, &bells[i], longWait)
			time.Sleep(coalesceWindow / each)
		}
		hasty, began := &bell{w: w}, time.Now()
		holds[0].h.SetTimer(&hasty.Timer, hasty, longWait-1)
		time.Sleep(longWait)
		for i := range bells {
			is(t, "rang", bells[i].times(), 1)
			early := due[i].Sub(bells[i].rang[0])
			is(t, "in time", early >= 0 && early < coalesceWindow, true)
			rang[bells[i].rang[0]]++
		}
		is(t, "beats", len(rang) <= len(holds)/each+1, true)
		is(t, "the short one", hasty.times(), 1)
		is(t, "the short one came after", hasty.rang[0].Sub(began), longWait-1)
		for _, c := range holds {
			c.h.Release()
		}
	})
}

// No timer fires for a Ticket that is over, or after StopTimer, whatever comes first.
func TestNoReminderAfterTheEnd(t *testing.T) {
	for name, end := range map[string]func(h *Ticket, b *bell){
		"released":             func(h *Ticket, _ *bell) { h.Release() },
		"lost":                 func(*Ticket, *bell) { time.Sleep(2 * time.Second) },
		"forgotten":            func(h *Ticket, b *bell) { h.StopTimer(&b.Timer) },
		"released, forgotten":  func(h *Ticket, b *bell) { h.Release(); h.StopTimer(&b.Timer) },
		"forgotten, set again": func(h *Ticket, b *bell) { h.StopTimer(&b.Timer); h.SetTimer(&b.Timer, b, 0) },
		"released, set again":  func(h *Ticket, b *bell) { h.Release(); h.SetTimer(&b.Timer, b, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				held := time.Minute
				if name == "lost" {
					held = time.Second
				}
				first, next := w.start(ttl(held)), w.start()
				others := [2]bell{{w: w}, {w: w}}
				b := &bell{w: w}
				first.h.SetTimer(&others[0].Timer, &others[0], ms)
				first.h.SetTimer(&b.Timer, b, 1500*ms)
				first.h.SetTimer(&others[1].Timer, &others[1], ms)
				time.Sleep(ms)
				is(t, "others", others[0].times()+others[1].times(), 2)
				end(&first.h, b)
				time.Sleep(3 * time.Second)
				is(t, "rang", b.times(), 0)
				_ = first.h.Release()
				next.holds().Release()
			})
		})
	}
}

// A timer that is due at the end of the lock does not fire: the end is seen first.
func TestAnOverdueHoldIsNotReminded(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.start(ttl(time.Second))
		b := &bell{w: w}
		c.h.SetTimer(&b.Timer, b, 500*ms)
		c.h.f.silence() // as in a process that is paused
		time.Sleep(2 * time.Second)
		c.h.f.shard().arm(c.h.f, c.h.f.g.at(time.Now()))
		is(t, "rang", b.times(), 0)
		is(t, "ends", c.ends, 1)
	})
}
