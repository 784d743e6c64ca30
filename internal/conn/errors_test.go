package conn

import (
	"context"
	"errors"
	"strings"
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

// Only what servers say of keys in other hash slots makes a node one of several.
func TestRefusesSlots(t *testing.T) {
	for _, tc := range []struct {
		err  error
		want bool
	}{
		{ServerError("CROSSSLOT Keys in request don't hash to the same slot"), true},
		{ServerError("ERR CROSSSLOT Keys in request don't hash to the same slot"), true},
		{ServerError("ERR Script attempted to access a non local key in a cluster node script: abc"), true},
		{ServerError("ERR Script attempted to access keys that do not hash to the same slot"), true},
		{ServerError("ERR Error running script (call to 5c): script tried accessing undeclared key"), false},
		{ServerError("script tried accessing undeclared key"), false},
		{ServerError("READONLY You can't write against a read only replica."), false},
		{ServerError("NOPERM No permissions to access a key"), false},
		{ServerError("MOVED 3999 127.0.0.1:6381"), false},
		{ServerError("OOM command not allowed when used memory > 'maxmemory'."), false},
		{errors.New("a dialer that says CROSSSLOT"), false},
		{context.DeadlineExceeded, false},
		{nil, false},
	} {
		if got := RefusesSlots(tc.err); got != tc.want {
			t.Errorf("%v: %v", tc.err, got)
		}
	}
}

// A server that refuses a long command because nobody has logged in says that as it does of a short one.
func TestALongCommandWithoutLogin(t *testing.T) {
	for text, want := range map[string]bool{
		"NOAUTH Authentication required.":                      true,
		"ERR Protocol error: unauthenticated multibulk length": true,
		"ERR Protocol error: unauthenticated bulk length":      true,
		"ERR Protocol error: invalid multibulk length":         false,
		"ERR unauthenticated":                                  false,
	} {
		if err := ReplyError(text); NotLoggedIn(err) != want || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", text, err)
		}
	}
}
