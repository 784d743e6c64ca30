package conn

import "testing"

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
