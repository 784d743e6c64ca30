package link

import "time"

// queue is the calls without an answer, in order: a ring.
type queue struct {
	ring  []sent
	first int
	n     int
}

func (q *queue) len() int { return q.n }

func (q *queue) at(i int) *sent { return &q.ring[(q.first+i)&(len(q.ring)-1)] }

func (q *queue) push(x sent) {
	if q.n == len(q.ring) {
		ring := make([]sent, max(16, 2*q.n))
		for i := range q.n {
			ring[i] = *q.at(i)
		}
		q.ring, q.first = ring, 0
	}
	q.n++
	*q.at(q.n - 1) = x
}

// front is the oldest; nil: there is none.
func (q *queue) front() *sent {
	if q.n == 0 {
		return nil
	}
	return q.at(0)
}

func (q *queue) pop() sent {
	x := *q.at(0)
	*q.at(0) = sent{}
	q.first, q.n = (q.first+1)&(len(q.ring)-1), q.n-1
	return x
}

// takeBack takes the last n out.
func (q *queue) takeBack(n int) []sent {
	taken := make([]sent, n)
	for i := range n {
		x := q.at(q.n - n + i)
		taken[i], *x = *x, sent{}
	}
	q.n -= n
	return taken
}

// all takes all out.
func (q *queue) all() []sent { return q.takeBack(q.n) }

// sent notes that the last n are about to be written.
func (q *queue) sent(n int, at time.Time) {
	for i := q.n - n; i < q.n; i++ {
		q.at(i).at = at
	}
}

// restart has the time of the first n begin then, if they were written.
func (q *queue) restart(n int, at time.Time) {
	for i := range n {
		if x := q.at(i); !x.at.IsZero() {
			x.at = at
		}
	}
}

// unsend notes that the n before the last after ones were not written.
func (q *queue) unsend(after, n int) {
	for i := q.n - after - n; i < q.n-after; i++ {
		q.at(i).at = time.Time{}
	}
}

// late returns those that were written before then, and were not told that they are late, and when the next
// one was written; zero: there is none.
func (q *queue) late(then time.Time) (tell []Call, next time.Time) {
	for i := range q.n {
		x := q.at(i)
		if x.at.IsZero() || x.at.After(then) {
			return tell, x.at
		}
		if !x.told {
			x.told = true
			tell = append(tell, x.call)
		}
	}
	return tell, time.Time{}
}
