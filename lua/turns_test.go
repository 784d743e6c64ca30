package lua_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

const turn = 10_000 // a busy machine needs some of it

// ask is an attempt of a contender that has lost one before.
func (s *store) ask(owner, contender string) any {
	s.t.Helper()
	return s.must(lua.Acquire, waiting, anyEpoch(owner, minute, 1, 0, contender)...)
}

// leave is a release that passes the turn on, where no offers are made; more is contender and rival.
func (s *store) leave(owner string, more ...any) any {
	s.t.Helper()
	return s.must(lua.Release, waiting, releasing(owner, more...)...)
}

// releasing are the arguments of a release; more is contender, which is ” if it is left out, and so on.
func releasing(owner string, more ...any) []any {
	if len(more) == 0 {
		more = []any{""}
	}
	return anyEpoch(append([]any{owner, "PUBLISH", turn}, more...)...)
}

// look is a refresh that asks for rivals.
func (s *store) look(owner, asker string) any {
	s.t.Helper()
	return s.must(lua.Refresh, []string{key, bucket, wants}, owner, minute, 1, 0, asker)
}

func (s *store) wantWaiting(want ...string) {
	s.t.Helper()
	got, err := s.ZRange(context.Background(), wants, 0, -1).Result()
	if err != nil || !slices.Equal(got, want) {
		s.t.Errorf("waiting: %q %v, want %q", got, err, want)
	}
}

func (s *store) wantTurn(contender string) {
	s.t.Helper()
	s.want(s.value(key), "flightlock:turn:"+contender)
	s.wantTTL(turn)
}

// queue makes contenders wait, in that order, for a key that owner holds.
func (s *store) queue(owner string, contenders ...string) {
	s.t.Helper()
	s.reset()
	s.acquire(owner, minute, 1)
	for i, c := range contenders {
		s.wantHeld(s.ask(fmt.Sprint("attempt-", i), c), owner, minute)
	}
}

// The turn goes round in order of arrival, nobody else can take it, and every release notifies
// whose it is.
func TestTurnsGoRoundInOrder(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.queue("a", "z-1", "y-1", "x-1")
		told := s.listen()
		s.wantWaiting("z-1", "y-1", "x-1")
		for i, c := range []string{"z-1", "y-1", "x-1"} {
			s.want(s.leave([]string{"a", "o0", "o1"}[i], c+"0"), int64(1))
			s.wantTurn(c)
			if all := s.heard(told); len(all) == 0 || all[0] != c[:1]+": 1 turn" {
				t.Errorf("notices %q, want the turn of %s", all, c)
			}
			s.wantHeld(s.acquire("thief", minute, 1), "flightlock:turn:"+c, turn)
			s.wantHeld(s.ask("thief", c+"1"), "flightlock:turn:"+c, turn)
			s.leave("x", c+"1") // a want can be removed while another has the turn
			reply := s.ask(fmt.Sprint("o", i), c)
			if got, next := granted(reply); got <= 0 || next != []string{"y-1", "x-1", ""}[i] {
				t.Errorf("the turn of %s: %v", c, reply)
			}
			s.wantTTL(minute)
		}
		s.wantWaiting()
		s.want(s.leave("o2"), int64(1))
		s.want(s.value(key), "<none>")
	})
}

// Another attempt does not lose the contender's place, and leaves only one want.
func TestAskingAgainKeepsThePlace(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.queue("a", "x-1", "y-1")
		s.ask("o9", "x-1")
		s.wantWaiting("x-1", "y-1")
	})
}

// The order of arrival does not depend on the server's clock, which may stand still: five contenders that
// take turns without end come one after the other, whichever way they wait again, and not two of them in
// alternation.
func TestTheOrderNeedsNoClock(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.stood = true
		s.listen()
		contenders := []string{"z-1", "y-1", "x-1", "w-1", "v-1"}
		for how, again := range map[string]func(owner, contender, offer string){
			"rejoins": func(owner, contender, offer string) {
				s.want(s.grant(owner, contender, "", "", "leaves", offer), int64(3))
			},
			"yields": func(owner, contender, offer string) {
				first := s.ZRange(t.Context(), wants, 0, 0).Val()[0]
				s.want(s.grant(owner, contender, first), int64(1))
				s.contend("again", contender, offer, "waits")
			},
			"acquires": func(owner, contender, offer string) {
				s.contend("again", contender, offer, "waits")
				s.want(s.grant(owner, "me-1"), int64(1))
			},
			"is undone": func(owner, contender, offer string) {
				s.want(s.must(lua.Undo, undone, owner, contender, offer), int64(1))
				first := s.ZRange(t.Context(), wants, 0, 0).Val()[0]
				s.contend("o"+first[:1], first, offer, "waits")
			},
		} {
			s.offers(contenders...)
			s.wantWaiting(contenders...)
			s.grant("a", "a-1")
			order := slices.Clone(contenders)
			for turn := range 12 {
				owner := s.value(key)
				if !strings.HasPrefix(owner, "o"+order[0][:1]) {
					t.Fatalf("who %s, turn %d: %q has the key, not %s", how, turn, owner, order[0])
				}
				again(owner, order[0], fmt.Sprint("1 0 30000 3 - o", order[0][:1], turn))
				order = append(order[1:], order[0])
			}
			s.wantWaiting(order[1:]...)
		}
	})
}

// A contender that did not take its turn goes to the end when it wants the key again, and one that is the
// only one, or the last one, stays where it is.
func TestTheLastOneIsBehindAllOthers(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		scores := func(want ...string) {
			t.Helper()
			var got []string
			for _, z := range s.ZRangeWithScores(t.Context(), wants, 0, -1).Val() {
				got = append(got, fmt.Sprint(z.Member, " ", z.Score))
			}
			if !slices.Equal(got, want) {
				t.Errorf("%q, want %q", got, want)
			}
		}
		s.queue("a", "x-1", "y-1")
		scores("x-1 1", "y-1 2")
		s.leave("a", "me-1")
		s.set(key, "b", time.Minute) // the turn ran out
		s.ask("o", "x-1")
		scores("y-1 2", "x-1 3")
		s.ask("o", "y-1")
		s.ask("o", "z-1")
		scores("y-1 2", "x-1 3", "z-1 4")
		s.queue("a", "x-1")
		s.leave("a", "me-1")
		s.set(key, "b", time.Minute)
		scores("x-1 0")
		s.ask("o", "y-1")
		s.ask("o", "x-1")
		scores("y-1 1", "x-1 2")
		s.ZAdd(t.Context(), wants, redis.Z{Score: 1 << 52, Member: "w-1"})
		s.ask("o", "v-1")
		s.ask("o", "u-1")
		s.wantWaiting("y-1", "x-1", "w-1", "v-1", "u-1")
	})
}

// A contender that yields names the next one for all nodes, and goes to the end of the order.
func TestYieldNamesTheRival(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.queue("a", "x-1", "y-1")
		s.want(s.leave("a", "me-1", "y-1"), int64(1))
		s.wantTurn("y-1")
		s.ask("o", "y-1")
		s.wantWaiting("x-1", "me-1")

		// One that has left meanwhile does not leave the key idle: the next in order has it.
		s.queue("a", "x-1")
		s.leave("a", "me-1", "gone-1")
		s.wantTurn("x-1")

		// And with nobody left, the one who yields has it back.
		s.queue("a")
		s.leave("a", "me-1", "gone-1")
		s.wantTurn("me-1")
	})
}

// A contender that does not come for its turn is removed when it would be next again; one that comes late is
// registered again.
func TestWhoDoesNotComeIsForgotten(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.queue("a", "dead-1", "deaf-1", "y-1")
		s.leave("a")
		s.wantTurn("dead-1")
		s.set(key, "b", time.Minute) // the turn ran out, and another got the key
		s.leave("b")
		s.wantTurn("deaf-1")
		s.wantWaiting("deaf-1", "y-1")

		s.set(key, "c", time.Minute)
		s.ask("o", "deaf-1") // late, but alive
		s.leave("c")
		s.wantTurn("y-1")
		s.ask("d", "y-1")
		s.leave("d")
		s.wantTurn("deaf-1")
	})
}

// Removing a want that has become a turn passes the turn on.
func TestLeavingPassesTheTurnOn(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.queue("a", "x-1", "y-1")
		s.leave("a")
		s.wantTurn("x-1")
		s.want(s.leave("x-1", "x-1"), int64(0))
		s.wantTurn("y-1")
		s.want(s.leave("y-1", "y-1"), int64(0))
		s.want(s.value(key), "<none>")
		s.wantWaiting()
		s.wantHeld(func() any { s.acquire("b", minute, 1); return s.leave("x-1", "x-1") }(), "b", minute)
	})
}

// A refresh names the one that waits longest, except the caller itself.
func TestLookNamesTheRival(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.queue("a", "x-1", "y-1")
		for asker, want := range map[string]string{"me-1": "x-1", "x-1": "y-1"} {
			if got, ok := s.look("a", asker).([]any); !ok || len(got) != 2 || got[1] != want {
				t.Errorf("a check by %s: %v, want %s", asker, got, want)
			}
		}
		s.queue("a")
		if got, ok := s.look("a", "me-1").([]any); !ok || len(got) != 2 || got[1] != "" {
			t.Errorf("a check without contenders: %v", got)
		}
	})
}

// A repair takes over the turn that a node keeps for the holder, and registers no want.
func TestRepairTakesTheTurn(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.reset()
		s.set(key, "flightlock:turn:me-1", 10*time.Second)
		repair := anyEpoch("o", minute, 0, 700, "me-1")
		reply := s.must(lua.Acquire, waiting, repair...)
		if got, ok := reply.(int64); !ok || got < 700 {
			t.Errorf("repair: %v", got)
		}
		s.want(s.value(key), "o")
		s.set(key, "other", time.Minute)
		s.must(lua.Acquire, waiting, repair...)
		s.wantWaiting()
	})
}

// The undo of a lost attempt makes no turn.
func TestUndoMakesNoTurn(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.queue("a", "x-1")
		s.want(s.undo("a"), int64(1))
		s.want(s.value(key), "<none>")
		s.wantWaiting("x-1")
	})
}

// A contender whose attempt is undone has lost its want by the grant, and gets it back: the node
// must know it when it is named. An undo that finds nothing makes no want.
func TestUndoGivesTheWantBack(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.reset()
		s.ask("a", "me-1")
		s.want(s.must(lua.Undo, undone, "a", "me-1"), int64(1))
		s.want(s.value(key), "<none>")
		s.wantWaiting("me-1")

		s.reset()
		s.want(s.must(lua.Undo, undone, "a", "me-1"), int64(0))
		s.wantWaiting()
	})
}

// A contender that yields waits also on a node that had not granted its lease.
func TestYieldWithoutTheKeyWaitsToo(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.queue("other", "x-1")
		s.wantHeld(s.leave("a", "me-1", "x-1"), "other", minute)
		s.wantWaiting("x-1", "me-1")

		s.reset()
		s.want(s.leave("a", "me-1", "x-1"), int64(0))
		s.wantWaiting("me-1")
	})
}

// Nothing about wants can keep a release from its work: not a key of another type, not a lack of
// memory, not a missing right.
func TestReleaseSucceedsWhateverBecomesOfWants(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.reset()
		s.acquire("a", minute, 1)
		s.set(wants, "no set", 0)
		s.want(s.leave("a", "me-1", "x-1"), int64(1))
		s.reset()
		s.acquire("a", minute, 1)
		s.set(wants, "no set", 0)
		s.want(s.leave("a"), int64(1))
		s.want(s.value(key), "<none>")
	})
	t.Run("rights", func(t *testing.T) {
		s := onServer(t)
		for _, rule := range []string{"-zadd", "-zrem", "-zrange", "-zscore", "-exists", "-publish"} {
			s.queue("a", "x-1")
			got, err := s.as(rule).run(lua.Release, waiting, releasing("a")...)
			if err != nil || got != int64(1) {
				t.Errorf("%s: %v %v", rule, got, err)
			}
			if v := s.value(key); v == "a" {
				t.Errorf("%s: the key is still held", rule)
			}
		}
	})
}

// Wants and offers never stay for longer than 10 s after the last contender has asked, whichever script has
// registered them.
func TestWantsExpire(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.listen() // or nobody would be granted anything
		for name, register := range map[string]func() (keys []string){
			"acquire": func() []string { s.ask("b", "b-1"); return []string{wants} },
			"an acquire with an offer": func() []string {
				s.contend("b", "b-1", offer("b-1"))
				return []string{wants, offers}
			},
			"an acquire that keeps its place": func() []string {
				s.contend("b", "b-1", offer("b-1"))
				s.Persist(t.Context(), wants)
				s.Persist(t.Context(), offers)
				s.contend("b", "b-1", offer("b-1"))
				return []string{wants, offers}
			},
			"a release that yields": func() []string {
				s.want(s.leave("a", "a-1", "z-1"), int64(1))
				return []string{wants}
			},
			"a release that rejoins": func() []string {
				s.offers("z-1")
				s.want(s.rejoin(""), int64(3))
				return []string{wants, offers}
			},
			"a release that rejoins where the key is another's": func() []string {
				s.set(key, "b", time.Minute)
				s.wantHeld(s.rejoin("z-1"), "b", minute)
				return []string{wants, offers}
			},
			"an undo": func() []string {
				s.want(s.must(lua.Undo, undone, "a", "a-1", offer("a-1")), int64(1))
				return []string{wants, offers}
			},
		} {
			s.queue("a")
			for _, k := range register() {
				left, err := s.PTTL(t.Context(), k).Result()
				if err != nil || left <= 0 || left > 10*time.Second {
					t.Errorf("%s: %s stays for %v, %v", name, k, left, err)
				}
			}
		}
	})
}

// A contender without an offer that did not take its turn costs no second one: the one after it is granted
// the key, though that was to be the one that is gone.
func TestWhoDoesNotComeCostsNoSecondTurn(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.listen()
		for _, rival := range []string{"", "dead-1"} {
			s.offers("dead-1", "y-1")
			s.HDel(t.Context(), offers, "dead-1")
			s.grant("a", "a-1")
			s.wantTurn("dead-1")
			s.set(key, "b", time.Minute) // the turn ran out
			s.want(s.grant("b", "b-1", rival, "", "leaves"), int64(1))
			s.want(s.value(key), "oy")
			s.wantWaiting()
		}
	})
}

// On a Cluster there are no offers, and one message on the key's channel for all: whose turn it is, and that
// the work has failed, although nobody is known to wait.
func TestReleaseOnACluster(t *testing.T) {
	t.Parallel()
	s := onServer(t)
	told := s.SSubscribe(t.Context(), key)
	defer told.Close()
	if _, err := told.Receive(t.Context()); err != nil {
		t.Fatal(err)
	}
	release := func(owner string, more ...any) any {
		keys := []string{key, key, key, wants}
		return s.must(lua.Release, keys, anyEpoch(append([]any{owner, "SPUBLISH", turn}, more...)...)...)
	}
	s.queue("a", "x-1", "y-1")
	s.want(release("a", "me-1"), int64(1))
	s.wantTurn("x-1")
	s.queue("a", "x-1", "y-1")
	s.want(release("a", "me-1", "y-1", "failed"), int64(1))
	s.wantTurn("y-1")
	s.wantWaiting("y-1", "x-1", "me-1")
	s.queue("a")
	s.want(release("a", "", "", "failed"), int64(1))
	s.want(s.value(key), "<none>")
	s.queue("a")
	s.want(release("a", "me-1"), int64(1))
	s.want(s.value(key), "<none>")
	if err := s.SPublish(t.Context(), key, "the end").Err(); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"x-1", "a failed", "y-1", "a failed", "the end"} {
		m, err := told.ReceiveTimeout(t.Context(), 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if m, is := m.(*redis.Message); !is || m.Payload != want {
			t.Errorf("message %v, want %q", m, want)
		}
	}
}
