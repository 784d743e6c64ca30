// Package histogram counts how long things took, for benches and demos.
package histogram

import (
	"encoding/json"
	"fmt"
	"math/bits"
	"sync/atomic"
	"time"
)

// Histogram counts durations in logarithmic buckets: each power of two is cut into 32, so a
// quantile is at most 1/32 too high and never too low, from a nanosecond to centuries, in a fixed
// 15 KiB. Recording is one atomic add. Many goroutines may record while others read; the zero value
// is ready.
type Histogram struct {
	counts [histBuckets]atomic.Uint64
	top    atomic.Uint64 // longest, exact
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

// Record counts d; one below zero counts as zero.
func (h *Histogram) Record(d time.Duration) {
	h.counts[bucketOf(uint64(max(0, d)))].Add(1)
	h.AtLeast(d)
}

// AtLeast raises the maximum only: for a wait that was cut short by the end of the run, whose
// length nobody knows.
func (h *Histogram) AtLeast(d time.Duration) {
	for v := uint64(max(0, d)); ; {
		top := h.top.Load()
		if v <= top || h.top.CompareAndSwap(top, v) {
			return
		}
	}
}

// Merge adds what o has counted.
func (h *Histogram) Merge(o *Histogram) {
	for i := range o.counts {
		if n := o.counts[i].Load(); n > 0 {
			h.counts[i].Add(n)
		}
	}
	h.AtLeast(o.Max())
}

// Count is how many were recorded.
func (h *Histogram) Count() (n uint64) {
	for i := range h.counts {
		n += h.counts[i].Load()
	}
	return n
}

// Max is the longest, exact.
func (h *Histogram) Max() time.Duration { return time.Duration(h.top.Load()) }

// Quantile returns the duration that a share q of all recorded ones do not exceed; 0 if nothing was
// recorded.
func (h *Histogram) Quantile(q float64) time.Duration {
	total := h.Count()
	rank := max(1, uint64(q*float64(total)+0.5))
	var seen uint64
	for i := range h.counts {
		if seen += h.counts[i].Load(); total > 0 && seen >= rank {
			return min(time.Duration(bucketTop(i)), h.Max())
		}
	}
	return 0
}

// histogramJSON is how a histogram travels between processes: only buckets that hold something.
type histogramJSON struct {
	Max     uint64      `json:"max"`
	Buckets [][2]uint64 `json:"buckets"` // bucket, count
}

// MarshalJSON writes the buckets that hold something.
func (h *Histogram) MarshalJSON() ([]byte, error) {
	j := histogramJSON{Max: h.top.Load()}
	for i := range h.counts {
		if n := h.counts[i].Load(); n > 0 {
			j.Buckets = append(j.Buckets, [2]uint64{uint64(i), n})
		}
	}
	return json.Marshal(j)
}

// UnmarshalJSON adds what MarshalJSON wrote.
func (h *Histogram) UnmarshalJSON(data []byte) error {
	var j histogramJSON
	if err := json.Unmarshal(data, &j); err != nil {
		return err
	}
	for _, b := range j.Buckets {
		if b[0] >= histBuckets {
			return fmt.Errorf("histogram: bucket %d of %d", b[0], histBuckets)
		}
		h.counts[b[0]].Add(b[1])
	}
	h.AtLeast(time.Duration(j.Max))
	return nil
}
