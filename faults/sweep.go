//go:build linux

package main

import (
	"fmt"
	"slices"
	"time"
)

// meetings reports all pairs of holders that met within their validity, and all tokens that did not
// rise from one valid holder to the next. porcupine finds the same; this says who, when and for how
// long.
func (h *history) meetings() (overlaps, falls []string) {
	for key, holds := range byKey(h.holds, func(h hold) string { return h.Key }) {
		holds = slices.DeleteFunc(holds, func(h hold) bool { return !h.granted() || h.end() < h.start() })
		slices.SortFunc(holds, func(a, b hold) int { return int(a.start() - b.start()) })
		last := -1 // the earlier hold that lasts longest
		for i, h := range holds {
			if last >= 0 {
				if o := holds[last]; o.end() > h.start() {
					overlaps = append(overlaps,
						fmt.Sprintf("%q: process %d (token %d) and process %d (token %d) both held it for %v",
							key, o.Proc, o.Fence, h.Proc, h.Fence, time.Duration(min(o.end(), h.end())-h.start())))
				}
				if o := holds[i-1]; o.Fence >= h.Fence {
					falls = append(falls, fmt.Sprintf("%q: process %d got token %d after process %d had %d", key, h.Proc,
						h.Fence, o.Proc, o.Fence))
				}
			}
			if last < 0 || h.end() > holds[last].end() {
				last = i
			}
		}
	}
	return overlaps, falls
}
