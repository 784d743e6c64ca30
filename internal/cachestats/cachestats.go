// Package cachestats brings the counters of package rediscache into the metrics of its Client,
// without a word of that in the interface of either.
package cachestats

// Stats are the counters of a Cache which its Fetcher does not have.
type Stats struct {
	LocalHits, NotFound, Undecodable, TooLong, Dropped uint64

	Repeating, Down int64 // gauges
}

// Plus is the sum of both.
func (s Stats) Plus(o Stats) Stats {
	return Stats{
		LocalHits: s.LocalHits + o.LocalHits, NotFound: s.NotFound + o.NotFound,
		Undecodable: s.Undecodable + o.Undecodable, TooLong: s.TooLong + o.TooLong, Dropped: s.Dropped + o.Dropped,
		Repeating: s.Repeating + o.Repeating, Down: s.Down + o.Down,
	}
}

// Past is what remains of a Cache that was closed: its counters.
func (s Stats) Past() Stats {
	s.Repeating, s.Down = 0, 0
	return s
}

// Attach adds what read returns to the metrics of a *flightlock.Fetcher, until that is closed.
// Package flightlock sets it when the program starts.
var Attach func(fetcher any, read func() Stats)
