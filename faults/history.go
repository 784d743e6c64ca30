//go:build linux

package main

import "math"

// A hold is one try for a lock, and what became of it. All times are the machine's.
//
// What the lock promised its holder is the stretch from start to end: it was valid at every
// moment in between, by its own word. Nothing is claimed for the time before the call had
// returned, nor for the time after the holder last saw it valid; but one that ran out
// had been promised until its deadline, whether its holder was looking or stopped.
type hold struct {
	Proc  int
	Key   string
	Asked int64
	Given int64  // when the call returned, with the lock or an error
	Err   string `json:",omitempty"` // why there is no lock

	Fence    int64
	Reused   bool   `json:",omitempty"` // the lease was retained since the last lock of this process
	Until    int64  // validity deadline, in its final value
	Valid    int64  // when the holder last saw that it was valid; 0: never
	Lost     string `json:",omitempty"` // why it ended before its release
	Expired  bool   `json:",omitempty"` // Lost because Until had passed
	Done     int64  // when Release returned
	Released bool   // Release said nil
}

func (h hold) granted() bool { return h.Err == "" }

// start is when the lock was granted at the latest.
func (h hold) start() int64 { return min(h.Given, h.Until) }

// end is until when its holder was promised the lock.
func (h hold) end() int64 {
	if h.Expired {
		return h.Until
	}
	return min(h.Valid, h.Until)
}

// gone is when the lock was released at the latest: nobody knows when a release that was not
// confirmed takes effect.
func (h hold) gone() int64 {
	if h.Released {
		return h.Done
	}
	return math.MaxInt64
}

// An access is one operation on the register that a lock protects.
type access struct {
	Proc         int
	Key          string
	Set          bool // or a Get
	Fence        int64
	Value        int // written or read
	Stale        bool
	Unknown      bool  `json:",omitempty"` // it failed: it may have happened, and may still
	Write        int64 `json:",omitempty"` // of a Set: its number in that process
	Call, Return int64
}

// An event is a line that a process writes.
type event struct {
	Ready   bool    `json:",omitempty"`
	Fatal   string  `json:",omitempty"`
	Hold    *hold   `json:",omitempty"`
	Access  *access `json:",omitempty"`
	Begun   *access `json:",omitempty"` // a Set that is about to be sent
	Working bool    `json:",omitempty"` // the lists are read and will be written
	Append  *added  `json:",omitempty"`
}

// A history is the events of several processes.
type history struct {
	holds    []hold
	accesses []access
	appends  []added
}
