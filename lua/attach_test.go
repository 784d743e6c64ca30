package lua_test

import (
	"testing"
	"time"

	"github.com/flightlock/flightlock/lua"
)

// attach is an attempt as owner of the holders of the key that may be replaced.
func (s *store) attach(owner string, top int64, replaced ...any) any {
	s.t.Helper()
	return s.must(lua.Attach, alone, anyEpoch(append([]any{owner, minute, top}, replaced...)...)...)
}

// The key becomes the new owner's if it is one of those that are replaced, whole, and nobody else's (S1). The
// counter is that of the detached lease, unless somebody may have had tokens since.
func TestAttachReplacesTheDetachedOwnerOnly(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.set(bucket, 104, 0)
		s.want(s.attach("b", 104, "a"), int64(0))
		s.want(s.Exists(t.Context(), key).Val(), int64(0))
		for _, holder := range []string{"", "a1", "A", "flightlock:turn:a", "c"} {
			s.set(key, holder, time.Minute)
			s.wantHeld(s.attach("b", 104, "a"), holder, minute)
			s.want(s.value(key), holder)
		}
		s.set(key, "a", time.Second)
		s.want(s.attach("b", 104, "a"), int64(104))
		s.want(s.value(key), "b")
		s.wantTTL(minute)
		s.wantCounter(int64(104))
		s.want(s.attach("b", 104, "a"), int64(-104)) // a second name of the server, or a copy of the request
		s.wantHeld(s.attach("c", 104, "a"), "b", minute)
		s.want(s.attach("c", 104, "a", "x", "b"), int64(104)) // b is an earlier attempt of c's client
		s.want(s.value(key), "c")
		s.set(bucket, 110, 0)
		s.want(s.attach("d", 104, "c"), int64(111)) // others had tokens
		s.want(s.attach("e", 0, "d"), int64(112))   // it is not known whether they had
		s.set(bucket, 90, 0)
		s.want(s.attach("f", 104, "e"), int64(104)) // this node had fewer
		s.wantCounter(int64(104))
	})
}

// A late copy of a request that was executed before takes the key from nobody: not from its own lease's
// successor, and not from a later attempt of its client.
func TestALateAttachTakesNothing(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.set(bucket, 104, 0)
		s.set(key, "a", time.Minute)
		s.want(s.attach("b2", 104, "a", "b1"), int64(104))
		s.wantHeld(s.attach("b1", 104, "a"), "b2", minute)
		s.want(s.undo("b2"), int64(1))
		s.want(s.attach("b1", 104, "a"), int64(0))
		s.want(s.attach("b2", 104, "a", "b1"), int64(0))
	})
}

// A longer ttl stays, and one that is missing is made.
func TestAttachNeverShortensATTL(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.set(bucket, 104, 0)
		s.set(key, "a", 2*time.Minute)
		s.want(s.attach("b", 104, "a"), int64(104))
		s.wantTTL(2 * minute)
		s.set(key, "a", 0)
		s.want(s.attach("b", 104, "a"), int64(104))
		s.wantTTL(minute)
	})
}

// A counter that was lost starts at the node's clock (S10), so that the token is a new one.
func TestAttachWithoutACounter(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.set(key, "a", time.Minute)
		s.wantSeeded(s.attach("b", 104, "a").(int64), 1)
	})
}

// A node in another epoch than the caller knows writes nothing (S25).
func TestAttachOnlyInItsEpoch(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.set(bucket, 104, 0)
		s.set(key, "a", time.Minute)
		s.set(lua.Marker, "m2", 0)
		if _, err := s.run(lua.Attach, alone, in(lua.Epoch{Name: "m1"}, false, "b", minute, 104,
			"a")...); err == nil {
			t.Error("attached in another epoch")
		}
		s.want(s.value(key), "a")
		s.want(s.must(lua.Attach, alone, in(lua.Epoch{Name: "m2"}, false, "b", minute, 104, "a")...), int64(104))
	})
}

// Inspect reads what there is, writes nothing, and publishes for the owner that it is given only.
func TestInspectReads(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		seen := func(args ...any) any {
			got := s.must(lua.Inspect, []string{key, bucket, wants}, args...).([]any)
			if pttl := got[1].(int64); pttl > 40_000 && pttl <= minute { // it runs out meanwhile
				got[1] = "a minute"
			}
			return got
		}
		s.want(seen(), []any{"", int64(-2), "0"})
		s.set(key, "a", time.Minute)
		s.set(bucket, 104, 0)
		s.contend("b", "b-1", "")
		s.contend("c", "c-1", "")
		told := s.Subscribe(t.Context(), "inbox")
		defer told.Close()
		if _, err := told.Receive(t.Context()); err != nil {
			t.Fatal(err)
		}
		want := []any{"a", "a minute", "104", "b-1", "c-1"}
		s.want(seen(), want)
		s.want(seen("b", "inbox", "no"), want)
		s.want(seen("a", "inbox", "yes"), want)
		if m, err := told.ReceiveMessage(t.Context()); err != nil || m.Payload != "yes" {
			t.Errorf("%v, %v", m, err)
		}
	})
}
