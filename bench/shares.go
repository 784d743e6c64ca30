package main

import (
	"fmt"
	"slices"
	"time"
)

// This file says how evenly the hot key was shared: over processes, or over clients where all run in one.

// shareFigures is what one sharer got: a process, or a client if all of them are in one process.
type shareFigures struct {
	Name           string        `json:"name"`
	Clients        int           `json:"clients"`
	Polling        int           `json:"polling"` // of the clients
	Locks          uint64        `json:"locks"`
	ShareOfLocks   float64       `json:"share_of_locks"`
	Held           time.Duration `json:"held_ns"`
	ShareOfHolding float64       `json:"share_of_holding"`
	LongestWait    time.Duration `json:"longest_wait_ns"` // of any goroutine
	Commands       uint64        `json:"commands"`
	Handoffs       uint64        `json:"handoffs"`
}

// sharesOf adds the clients up by process, or lists them.
func sharesOf(clients []clientOutcome, byProcess bool) (all []shareFigures) {
	var total shareFigures
	for i, c := range clients {
		name := fmt.Sprintf("client %d", i)
		if byProcess {
			name = fmt.Sprintf("process %d", c.Proc)
		}
		at := slices.IndexFunc(all, func(s shareFigures) bool { return s.Name == name })
		if at < 0 {
			at = len(all)
			all = append(all, shareFigures{Name: name})
		}
		all[at].add(c)
		total.add(c)
	}
	for i := range all {
		s := &all[i]
		s.ShareOfLocks = ratio(s.Locks, total.Locks)
		s.ShareOfHolding = ratio(uint64(s.Held), uint64(total.Held))
	}
	return all
}

func (s *shareFigures) add(c clientOutcome) {
	s.Clients++
	if c.Polling {
		s.Polling++
	}
	s.Locks += c.Locks
	s.Held += c.Held
	s.LongestWait = max(s.LongestWait, c.LongestWait)
	s.Commands += c.Commands
	s.Handoffs += c.Handoffs
}

// jain is Jain's fairness index of the holding times: 1 if all are equal, 1/n if one of n has all,
// 0 if nobody has any.
func jain(all []shareFigures) float64 {
	var sum, squares float64
	for _, s := range all {
		x := s.Held.Seconds()
		sum, squares = sum+x, squares+x*x
	}
	if squares == 0 {
		return 0
	}
	return sum * sum / (float64(len(all)) * squares)
}
