package histogram

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// A quantile is never below the exact one and at most 1/32 above it.
func TestQuantilesAreAtMostOneThirtySecondTooHigh(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		var h Histogram
		var all []time.Duration
		for range 1 + r.IntN(5000) {
			d := time.Duration(1) << r.IntN(40)
			d += time.Duration(r.Int64N(int64(d)))
			all = append(all, d)
			h.Record(d)
		}
		slices.Sort(all)
		for _, q := range []float64{0.01, 0.5, 0.9, 0.99, 1} {
			exact := all[max(1, int(q*float64(len(all))+0.5))-1]
			if got := h.Quantile(q); got < exact || got > exact+exact/32 {
				t.Errorf("quantile %v of %d values is %d, exactly %d", q, len(all), got, exact)
			}
		}
		if h.Max() != all[len(all)-1] {
			t.Errorf("max %d, want %d", h.Max(), all[len(all)-1])
		}
	}
}

// Every value lies in its bucket and above the bucket before it.
func TestBucketsCoverAllValuesInOrder(t *testing.T) {
	for i := 1; i < histBuckets; i++ {
		top, below := bucketTop(i), bucketTop(i-1)
		if top <= below || bucketOf(top) != i || bucketOf(below+1) != i {
			t.Fatalf("bucket %d: from %d to %d, but these go to %d and %d", i, below+1, top, bucketOf(below+1),
				bucketOf(top))
		}
	}
	if bucketOf(0) != 0 || bucketOf(1<<64-1) != histBuckets-1 {
		t.Error("the smallest or the largest value is outside")
	}
}

func TestMergingEqualsRecordingEverythingInOne(t *testing.T) {
	var a, b, both Histogram
	for i := range 1000 {
		d := time.Duration(i*i) * time.Microsecond
		both.Record(d)
		if i%3 == 0 {
			a.Record(d)
		} else {
			b.Record(d)
		}
	}
	a.Merge(&b)
	for _, q := range []float64{0.1, 0.5, 0.99} {
		if a.Quantile(q) != both.Quantile(q) {
			t.Errorf("quantile %v: merged %v, in one %v", q, a.Quantile(q), both.Quantile(q))
		}
	}
	if a.Count() != 1000 || a.Max() != both.Max() {
		t.Errorf("count %d max %v, want 1000 and %v", a.Count(), a.Max(), both.Max())
	}
}

func TestHistogramSurvivesJSON(t *testing.T) {
	var h, got Histogram
	h.Record(3 * time.Millisecond)
	h.Record(0)
	h.AtLeast(time.Second)
	data, err := json.Marshal(&h)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	if got.Count() != 2 || got.Max() != time.Second || got.Quantile(1) != h.Quantile(1) {
		t.Errorf("%s came back as count %d, max %v", data, got.Count(), got.Max())
	}
	if err := json.Unmarshal([]byte(`{"buckets":[[1920,1]]}`), &got); err == nil {
		t.Error("a bucket that does not exist was taken")
	}
}

func TestEmptyHistogramIsZero(t *testing.T) {
	var h Histogram
	if h.Quantile(0.99) != 0 || h.Max() != 0 || h.Count() != 0 {
		t.Error("an empty histogram shows something")
	}
}
