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

// What resembles a refusal of a command is none.
func TestRefusalsOfACommand(t *testing.T) {
	for text, want := range map[string]bool{
		"ERR unknown command 'EVALSHA', with args beginning with: '00' ":                                true,
		"ERR unknown command `evalsha`, with args beginning with: ":                                     true,
		"NOPERM this user has no permissions to run the 'evalsha' command or its subcommand":            true,
		"ERR EVALSHA is not supported":                                                                  true,
		"ERR unknown command 'eval', with args beginning with: 'evalsha' ":                              false,
		"NOSCRIPT No matching script. Please use EVALSHA.":                                              false,
		"ERR Error running script (call to f_evalshaffff): @user_script:1: NOPERM":                      false,
		"NOPERM this user has no permissions to access one of the keys used as arguments":               false,
		"READONLY You can't write against a read only replica.":                                         false,
		"ERR Error running script: NOPERM this user has no permissions to run the 'get' command or its": false,
	} {
		if got := RefusesCommand(ServerError(text), "evalsha"); got != want {
			t.Errorf("%s: %v", text, got)
		}
	}
	if RefusesCommand(errors.New("evalsha"), "evalsha") {
		t.Error("what is no reply is none")
	}
}
