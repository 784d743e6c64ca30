package main

import "time"

// Who polls needs a delay between tries. There is no best one: on a hot key long delays let one
// caller take the lock again and again while the others sleep, for throughput; at a hand-over only
// a short delay finds the lock soon. The loads "delays" try those below, and RESULTS.md shows what
// came of it. What the rivals get here is, on the hot key, the delay with the most locks per second
// of those up to the mean of redsync's own default (longer ones gain a little more, by letting one
// goroutine starve the rest for longer), and the shortest one at a hand-over; elsewhere nobody
// waits for anybody and the delay does not matter.

var triedDelays = []time.Duration{200 * time.Microsecond, time.Millisecond, 5 * time.Millisecond,
	20 * time.Millisecond, 50 * time.Millisecond, 150 * time.Millisecond, 500 * time.Millisecond}

// bestDelay is what a rival gets in a load that does not try delays.
func bestDelay(rival string, k kind) time.Duration {
	switch {
	case k == handover || k == stampede || k == coldKeys || k == invalidation:
		return time.Millisecond / 5
	case rival == nameByHand:
		return time.Millisecond / 5 // one poller per process
	}
	return 150 * time.Millisecond
}
