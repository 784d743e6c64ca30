package demo

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// histogram counts durations in logarithmic buckets: each power of two is cut into 32, so a quantile is at most 1/32
// too high and never too low, in a fixed 15 KiB. Many goroutines may record while others read; the zero value is ready.
type histogram struct {
	counts [histBuckets]atomic.Uint64
	top    atomic.Uint64 // the longest, exact
}

const (
	subBits     = 5
	histBuckets = (64-subBits)<<subBits + 1<<subBits
)

// bucketOf is exact below 2^(subBits+1); above, it keeps the subBits bits after the leading one.
func bucketOf(v uint64) int {
	shift := max(0, bits.Len64(v)-subBits-1)
	return shift<<subBits + int(v>>shift)
}

// bucketTop is the largest value in bucket i.
func bucketTop(i int) uint64 {
	shift := max(0, i>>subBits-1)
	return uint64(i-shift<<subBits+1)<<shift - 1
}

func (h *histogram) record(d time.Duration) {
	v := uint64(max(0, d))
	h.counts[bucketOf(v)].Add(1)
	for {
		top := h.top.Load()
		if v <= top || h.top.CompareAndSwap(top, v) {
			return
		}
	}
}

func (h *histogram) count() (n uint64) {
	for i := range h.counts {
		n += h.counts[i].Load()
	}
	return n
}

func (h *histogram) max() time.Duration { return time.Duration(h.top.Load()) }

// quantile returns the duration that a share q of all recorded ones do not exceed; 0 if nothing was recorded.
func (h *histogram) quantile(q float64) time.Duration {
	total := h.count()
	rank := max(1, uint64(q*float64(total)+0.5))
	var seen uint64
	for i := range h.counts {
		if seen += h.counts[i].Load(); total > 0 && seen >= rank {
			return min(time.Duration(bucketTop(i)), h.max())
		}
	}
	return 0
}
