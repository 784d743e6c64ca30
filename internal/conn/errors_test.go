package conn

import (
	"context"
	"errors"
	"testing"
)

// Every request classifies its error, and nearly always there is none: that allocates nothing.
func TestNoErrorCostsNothing(t *testing.T) {
	if n := testing.AllocsPerRun(100, func() {
		if IsReply(nil) || HasCode(nil, "NOSCRIPT") || NotLoggedIn(nil) || TimedOut(nil) {
			t.Error("nil is an error")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Only what servers say of keys that a script may not access makes a node one of those whose scripts may
// access only what they declare.
func TestRefusesKeys(t *testing.T) {
	for _, tc := range []struct {
		err         error
		several, is bool
	}{
		{ServerError("ERR Error running script (call to 5c): script tried accessing undeclared key"), false, true},
		{ServerError("script tried accessing undeclared key"), false, true},
		{ServerError("CROSSSLOT Keys in request don't hash to the same slot"), true, true},
		{ServerError("ERR Script attempted to access a non local key in a cluster node script: abc"), true, true},
		{ServerError("ERR Script attempted to access keys that do not hash to the same slot"), true, true},
		{ServerError("READONLY You can't write against a read only replica."), false, false},
		{ServerError("NOPERM No permissions to access a key"), false, false},
		{ServerError("MOVED 3999 127.0.0.1:6381"), false, false},
		{ServerError("OOM command not allowed when used memory > 'maxmemory'."), false, false},
		{errors.New("a dialer that says undeclared key"), false, false},
		{context.DeadlineExceeded, false, false},
		{nil, false, false},
	} {
		if several, is := RefusesKeys(tc.err); several != tc.several || is != tc.is {
			t.Errorf("%v: %v, %v", tc.err, several, is)
		}
	}
}
