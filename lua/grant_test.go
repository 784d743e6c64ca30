package lua_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

const span = 30_000 // a busy machine needs some of it

// offer is the offer of a contender whose name begins with that letter: the first poll, of node 0, a span
// of 30 s, three tokens, an epoch that does not matter, and the owner "o" and the letter.
func offer(contender string) string { return "1 0 30000 3 - o" + contender[:1] }

// offers makes contenders wait with an offer, in that order, for a key that "a" holds.
func (s *store) offers(contenders ...string) {
	s.t.Helper()
	s.offersIn("-", contenders...)
}

// offersIn is offers for nodes in that epoch.
func (s *store) offersIn(epoch string, contenders ...string) {
	s.t.Helper()
	s.queue("a", contenders...)
	for _, c := range contenders {
		text := strings.Replace(offer(c), "-", epoch, 1)
		s.wantHeld(s.contend("again-"+c, c, text, "waits"), "a", minute)
	}
}

// grant is a release that may grant the key; more is what comes after the turn's length.
func (s *store) grant(owner string, more ...any) any {
	s.t.Helper()
	return s.must(lua.Release, all, releasing(owner, more...)...)
}

// as is a client whose user may do everything but for that rule of the ACL.
func (s *store) as(rule string) *store {
	s.t.Helper()
	name := "u" + strings.TrimPrefix(rule, "-")
	if err := s.Do(s.t.Context(), "ACL", "SETUSER", name, "on", "nopass", "~*", "&*", "+@all",
		rule).Err(); err != nil {
		s.t.Fatal(err)
	}
	o := *s.Options()
	o.Username, o.Password = name, "x"
	c := redis.NewClient(&o)
	s.t.Cleanup(func() { c.Close() })
	return &store{t: s.t, Client: c, real: s.real}
}

// granted is the message about a grant.
func (s *store) granted(contender, follower string) string {
	s.t.Helper()
	return fmt.Sprintf("%s: 1 grant %s - 0 %d 2 1 0 30000 3 %so%slock:k",
		contender[:1], s.value(bucket), len(follower), follower, contender[:1])
}

// A release gives the key to the next contender's offer: with its span, its tokens and a message
// with all that makes a vote. The contender waits no more.
func TestReleaseGrantsTheKey(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.offers("z-1", "y-1", "x-1")
		told := s.listen()
		before := s.must(lua.Refresh, []string{key, bucket}, "a", minute, 0, 0).(int64)
		s.want(s.grant("a", "a-1"), int64(1))
		s.want(s.value(key), "oz")
		s.wantTTL(span)
		s.wantCounter(before + 3)
		s.wantWaiting("y-1", "x-1")
		s.want(s.offerOf("z-1"), "<none>")
		if all := s.heard(told); !slices.Equal(all, []string{s.granted("z-1", "y-1")}) {
			t.Errorf("messages %q, want %q", all, s.granted("z-1", "y-1"))
		}

		s.want(s.grant("oz", "z-1", "x-1", "", "leaves"), int64(1)) // whom it names
		s.want(s.value(key), "ox")
		if all := s.heard(told); !slices.Equal(all, []string{s.granted("x-1", "y-1")}) {
			t.Errorf("messages %q", all)
		}
		s.want(s.grant("ox", "x-1", "z-1", "", "leaves"), int64(1)) // the one that is gone: then the first
		s.want(s.value(key), "oy")
		s.want(s.grant("oy", "y-1"), int64(1))
		s.want(s.value(key), "<none>")
		s.wantWaiting()
	})
}

// A contender that no longer wants the key is removed by its release wherever it is among those that wait,
// and its offer with it: if the key is granted, if it is given as a turn, and if nobody else waits.
func TestReleaseRemovesItsContender(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		for _, waits := range [][]string{{"a-1", "z-1", "y-1", "x-1"}, {"z-1", "y-1", "x-1", "a-1"}, {"a-1"}} {
			for _, offered := range []bool{true, false} {
				s.Del(context.Background(), key, wants, offers)
				s.offers(waits...)
				told := s.listen()
				if !offered {
					s.Del(context.Background(), offers)
				}
				s.want(s.grant("a", "a-1"), int64(1))
				others := slices.DeleteFunc(slices.Clone(waits), func(c string) bool { return c == "a-1" })
				switch {
				case len(others) == 0:
					s.want(s.value(key), "<none>")
				case offered:
					s.want(s.value(key), "oz")
					others = others[1:]
				default:
					s.wantTurn("z-1")
				}
				s.wantWaiting(others...)
				s.want(s.offerOf("a-1"), "<none>")
				s.heard(told)
			}
		}
	})
}

// A release that is executed again, or late, grants nothing.
func TestALateReleaseGrantsNothing(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.offers("z-1", "y-1")
		s.listen()
		s.grant("a", "a-1")
		s.wantHeld(s.grant("a", "a-1"), "oz", span)
		s.wantHeld(s.grant("a", "a-1", "y-1", "", "leaves"), "oz", span)
		s.wantWaiting("y-1")
	})
}

// If nobody receives the message, the contender's process is gone: the next one is granted the key,
// without delay. If none is left, the key is free.
func TestAGrantThatNobodyReceivesGoesToTheNext(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.offers("z-1", "y-1", "x-1")
		told := s.Subscribe(context.Background(), inbox+"x")
		defer told.Close()
		if _, err := told.Receive(context.Background()); err != nil {
			t.Fatal(err)
		}
		s.want(s.grant("a", "a-1"), int64(1))
		s.want(s.value(key), "ox")
		s.wantWaiting()
		s.offers("z-1", "y-1")
		s.want(s.grant("a", "a-1"), int64(1))
		s.want(s.value(key), "<none>")
		s.wantWaiting()
	})
}

// For contenders without an offer, releases that report a failure, and nodes that do not vote,
// there is only a turn.
func TestWhereNothingIsGrantedATurnIsMade(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.listen()
		s.queue("a", "z-1")
		s.grant("a", "a-1")
		s.wantTurn("z-1")
		for _, news := range []string{"look", "failed"} {
			s.offers("z-1")
			s.grant("a", "a-1", "", news)
			s.wantTurn("z-1")
		}
		s.offers("z-1")
		s.grant("a") // it never had to wait
		s.want(s.value(key), "oz")
		s.offers("z-1")
		s.leave("a", "a-1") // no offers
		s.wantTurn("z-1")
		s.offersIn("!", "z-1")
		s.set(lua.Marker, "!", 0)
		nothing := lua.GrantNothing
		s.must(lua.Release, all, nothing[0], nothing[1], nothing[2], "a", "PUBLISH", turn, "a-1")
		s.wantTurn("z-1")
		s.offers("z-1")
		s.HSet(t.Context(), offers, "z-1", "no offer")
		s.grant("a", "a-1")
		s.wantTurn("z-1")
	})
}

// A release grants only in the epoch of its script, and only offers of that, and names it to the contender.
func TestReleaseGrantsOnlyInItsEpoch(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		told := s.listen()
		for _, tc := range []struct {
			marker, offer string
			grants        bool
		}{
			{"m1", "m1", true}, {"m1", "m0", false}, {"m1", "-", false},
			{"m2", "m1", false}, {"m2", "m2", false}, {"", "m1", false},
		} {
			s.offersIn(tc.offer, "z-1")
			if tc.marker != "" {
				s.set(lua.Marker, tc.marker, 0)
			}
			epoch := lua.Epoch{Name: "m1"}
			s.must(lua.Release.In("r"), all, in(epoch, false, "a", "PUBLISH", turn, "a-1")...)
			all := strings.Join(s.heard(told), "\n")
			if !tc.grants {
				s.wantTurn("z-1")
			} else if s.want(s.value(key), "oz"); !strings.Contains(all, " m1 ") {
				t.Errorf("messages %q", all)
			}
		}
		s.offers("z-1")
		epoch := lua.Epoch{Since: 1 << 52}
		s.must(lua.Release.In("r"), all, in(epoch, false, "a", "PUBLISH", turn, "a-1")...)
		s.want(s.value(key), "oz")
		s.wantCounter(1<<52 + 3) // above the beginning of the epoch
	})
}

// Whatever is refused while the key is granted, the release succeeds, and nobody has the key.
func TestReleaseSucceedsWhateverBecomesOfAGrant(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.listen()
		s.offers("z-1")
		s.set(bucket, "no counter", 0)
		s.want(s.grant("a", "a-1"), int64(1))
		s.want(s.value(key), "<none>")
		s.want(s.value(bucket), "no counter")
	})
	t.Run("rights", func(t *testing.T) {
		s := onServer(t)
		for rule, want := range map[string]string{
			"-hget": "flightlock:turn:z-1", "-hdel": "flightlock:turn:z-1", "-zrem": "oz",
			"-incrby": "<none>", "-set": "<none>", "-publish": "<none>", "resetchannels": "<none>",
		} {
			s.offers("z-1")
			s.listen()
			got, err := s.as(rule).run(lua.Release, all, releasing("a", "a-1")...)
			if err != nil || got != int64(1) {
				t.Errorf("%s: %v %v", rule, got, err)
			}
			if v := s.value(key); v != want {
				t.Errorf("%s: the key holds %q, want %q", rule, v, want)
			}
		}
	})
}

// A free key stays free if its new owner is not told: because its process is gone, or nobody may tell it.
func TestAFreeNodeIsNotGivenInSilence(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.offers("z-1")
		s.Del(t.Context(), key)
		s.want(s.grant("b", "b-1", "z-1", "", "leaves"), int64(0))
		s.want(s.value(key), "<none>")
	})
	t.Run("rights", func(t *testing.T) {
		s := onServer(t)
		s.listen()
		for _, rule := range []string{"-incrby", "-set", "-publish", "resetchannels"} {
			s.offers("z-1")
			s.Del(t.Context(), key)
			got, err := s.as(rule).run(lua.Release, all, releasing("b", "b-1", "z-1", "", "leaves")...)
			if err != nil || got != int64(0) {
				t.Errorf("%s: %v %v", rule, got, err)
			}
			s.want(s.value(key), "<none>")
		}
	})
}

// A node on which the owner never had the key gives it to the contender that is named, if it is
// free.
func TestAFreeNodeTakesPartAgain(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		told := s.listen()
		s.offers("z-1", "y-1")
		s.Del(t.Context(), key)
		s.want(s.grant("b", "b-1"), int64(0)) // names nobody
		s.want(s.value(key), "<none>")
		s.want(s.grant("b", "b-1", "y-1"), int64(0)) // goes on waiting itself
		s.want(s.value(key), "<none>")
		s.want(s.grant("b", "b-1", "x-1", "", "leaves"), int64(0)) // does not wait here
		s.want(s.value(key), "<none>")
		s.want(s.grant("b", "b-1", "y-1", "look", "leaves"), int64(0)) // with an event
		s.want(s.value(key), "<none>")
		s.want(s.grant("b", "b-1", "y-1", "", "leaves"), int64(0))
		s.want(s.value(key), "oy")
		if all := s.heard(told); !slices.Equal(all, []string{s.granted("y-1", "z-1")}) {
			t.Errorf("messages %q", all)
		}
	})
}

// An attempt with an offer leaves a free key to the one that waits longest, and takes it as soon as
// that one does not wait any more.
func TestAFreeKeyIsLeftToTheOneThatWaitsLongest(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.offers("z-1")
		s.Del(t.Context(), key)
		ask := func(more ...any) any {
			return s.contend("n", "y-1", offer("y-1"), more...)
		}
		s.wantHeld(ask("waits"), "flightlock:turn:", 1)
		s.want(s.value(key), "<none>")
		s.wantWaiting("z-1", "y-1")
		s.want(s.offerOf("y-1"), offer("y-1"))
		reply := s.contend("m", "z-1", offer("z-1"), "waits")
		if got, next := granted(reply); got <= 0 || next != "y-1" {
			t.Errorf("the one that waits longest: %v", reply)
		}
		s.want(s.offerOf("z-1"), "<none>")
		s.Del(t.Context(), key, wants)
		s.offers("z-1")
		s.Del(t.Context(), key)
		reply = ask()
		if got, next := granted(reply); got <= 0 || next != "z-1" {
			t.Errorf("without waiting: %v", reply)
		}
	})
}

// A contender whose offer was granted already, and that does not know it yet, does not wait again.
func TestTheOneThatWasGrantedTheKeyWaitsNoMore(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.listen()
		s.offers("z-1")
		s.grant("a", "a-1")
		ask := func(o string) any {
			return s.contend("n", "z-1", o, "waits")
		}
		s.wantHeld(ask(offer("z-1")), "oz", span)
		s.wantWaiting()
		s.want(s.offerOf("z-1"), "<none>")
		s.wantHeld(ask("2 0 30000 3 - other"), "oz", span) // another offer of its own
		s.wantWaiting("z-1")
	})
}

// The undo of an attempt restores the want with its offer; the undo of an offer removes the offer,
// no matter who has the key, and leaves the want.
func TestUndoAndOffers(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		undo := func(owner, o string) any {
			return s.must(lua.Undo, undone, owner, "z-1", o)
		}
		s.listen()
		s.reset()
		s.contend("n", "z-1", offer("z-1"))
		s.wantWaiting()
		s.want(undo("n", offer("z-1")), int64(1))
		s.wantWaiting("z-1")
		s.want(s.offerOf("z-1"), offer("z-1"))
		s.acquire("a", minute, 1)
		s.wantHeld(undo("oz", ""), "a", minute)
		s.wantWaiting("z-1")
		s.want(s.offerOf("z-1"), "<none>")
		s.offers("z-1")
		s.grant("a", "a-1")
		s.want(undo("oz", ""), int64(1))
		s.wantWaiting("z-1")
		s.want(s.offerOf("z-1"), "<none>")
	})
}

// One that leaves takes its offer with it, and one that yields, its old one.
func TestAnOfferGoesWithItsContender(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.offers("z-1", "y-1")
		s.wantHeld(s.grant("z-1", "z-1"), "a", minute)
		s.want(s.offerOf("z-1"), "<none>")
		s.wantWaiting("y-1")
		s.wantHeld(s.grant("b", "y-1", "x-1"), "a", minute)
		s.want(s.offerOf("y-1"), "<none>")
		s.wantWaiting("y-1")
	})
}

// granted is the counter that an acquire was granted with, 0 if it was not, and the contender that is next.
func granted(reply any) (c int64, next string) {
	if list, ok := reply.([]any); ok && len(list) == 2 {
		reply = list[0]
		next, _ = list[1].(string)
	}
	c, _ = reply.(int64)
	return max(c, 0), next
}

// A contender whose name is of another form has no inbox: it is granted nothing, and the release is no
// failure.
func TestNothingIsGrantedToAnUnknownName(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		told := s.listen()
		s.offers("odd", "y-1")
		s.want(s.grant("a", "a-1"), int64(1))
		s.want(s.value(key), "oy")
		s.wantWaiting()
		if all := s.heard(told); !slices.Equal(all, []string{s.granted("y-1", "")}) {
			t.Errorf("messages %q", all)
		}
		s.offers("odd")
		s.want(s.grant("a", "a-1"), int64(1))
		s.want(s.value(key), "<none>")
	})
}
