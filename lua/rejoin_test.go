package lua_test

import (
	"context"
	"slices"
	"testing"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// rejoin is a release of "a", whose contender a-1 wants the key again.
func (s *store) rejoin(rival string) any {
	s.t.Helper()
	return s.grant("a", "a-1", rival, "", "leaves", offer("a-1"))
}

// wantRejoined says that a-1 waits with its offer, behind these.
func (s *store) wantRejoined(others ...string) {
	s.t.Helper()
	s.wantWaiting(append(others, "a-1")...)
	s.want(s.value(offerKey("a-1")), offer("a-1"))
}

// A release that rejoins grants the key as ever, and its contender waits again, behind all others. The next one
// learns of it.
func TestRejoin(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		told := s.listen()
		s.offers("z-1", "y-1")
		s.want(s.rejoin(""), int64(3))
		s.want(s.value(key), "oz")
		s.wantRejoined("y-1")
		if all := s.heard(told); !slices.Equal(all, []string{s.granted("z-1", "y-1")}) {
			t.Errorf("messages %q", all)
		}
		s.want(s.grant("oz", "z-1"), int64(1))
		s.want(s.grant("oy", "y-1"), int64(1))
		s.want(s.value(key), "oa")

		s.offers("z-1")
		s.want(s.rejoin("z-1"), int64(3))
		s.wantRejoined()
		if all := s.heard(told); all[len(all)-1] != s.granted("z-1", "a-1") {
			t.Errorf("messages %q", all)
		}
	})
}

// Where nobody else waits, nobody does afterwards, even if the contender's want is still there.
func TestRejoinAlone(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		s.must(lua.Acquire, []string{key, bucket}, "a", minute, 3)
		s.want(s.rejoin(""), int64(1))
		s.want(s.value(key), "<none>")
		s.wantWaiting()
		s.want(s.value(offerKey("a-1")), "<none>")

		s.queue("a", "a-1")
		s.want(s.rejoin("b-1"), int64(1))
		s.want(s.value(key), "<none>")
		s.wantWaiting()
	})
}

// A want of before goes to the end.
func TestRejoinMovesTheWant(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		s.listen()
		s.offers("a-1", "z-1", "y-1")
		s.want(s.rejoin(""), int64(3))
		s.want(s.value(key), "oz")
		s.wantRejoined("y-1")

		s.offers("z-1", "y-1", "a-1", "x-1")
		s.want(s.rejoin("y-1"), int64(3))
		s.want(s.value(key), "oy")
		s.wantRejoined("z-1", "x-1")
	})
}

// On a node where the key is another's the contender waits too; where there is none, it does only if the
// release grants the key.
func TestRejoinWhereTheKeyIsNotOurs(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		s.listen()
		s.queue("b", "z-1")
		s.wantHeld(s.rejoin("z-1"), "b", minute)
		s.wantRejoined("z-1")

		s.queue("oa", "z-1") // granted by that very offer
		s.wantHeld(s.rejoin("z-1"), "oa", minute)
		s.wantWaiting("z-1")

		s.reset()
		s.want(s.rejoin(""), int64(0))
		s.want(s.rejoin("z-1"), int64(0))
		s.wantWaiting()

		s.offers("z-1")
		s.Del(context.Background(), key)
		s.want(s.rejoin("z-1"), int64(0))
		s.want(s.value(key), "oz")
		s.wantRejoined()
	})
}

// A contender that gets a turn instead of a grant, or that is gone, is followed by the one that has rejoined.
func TestRejoinBehindATurn(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		told := s.listen()
		s.queue("a", "z-1")
		s.want(s.rejoin(""), int64(2))
		s.wantTurn("z-1")
		s.wantRejoined("z-1")
		if all := s.heard(told); !slices.Equal(all, []string{"z: 1 turn", "a: 1 other"}) {
			t.Errorf("messages %q", all)
		}
	})
	eachStore(t, func(t *testing.T, s *store) {
		told := s.Subscribe(context.Background(), inbox+"a")
		defer told.Close()
		if _, err := told.Receive(context.Background()); err != nil {
			t.Fatal(err)
		}
		s.offers("z-1")
		s.want(s.rejoin(""), int64(3))
		s.want(s.value(key), "oa")
		s.wantWaiting()
	})
}

// The arguments of a release that rejoins are not those of the next one in its batch.
func TestRejoinInABatch(t *testing.T) {
	s := &store{t: t, Client: redistest.StartServer(t).Client(t), real: true}
	s.listen()
	for _, next := range []string{"r34", "g20"} {
		s.offers("z-1")
		for _, k := range []string{"lock:2", "lock:3"} {
			s.set(k, "b", 0)
			s.ZAdd(t.Context(), k+"w", redis.Z{Score: 1, Member: "y-1"})
		}
		keys := []string{key, wants, bucket, "lock:2", "lock:2w", bucket}
		args := []any{"r38" + next, "a", "PUBLISH", turn, "a-1", "", "", "leaves", offer("a-1")}
		if next == "g20" {
			keys = []string{key, wants, bucket, "lock:2", "lock:3", "lock:2w", "lock:3w"}
			args = append(args, "b", "b", "PUBLISH", turn)
		} else {
			args = append(args, "b", "PUBLISH", turn, "b-1")
		}
		s.answers(lua.Batch, keys, args...)
		s.want(s.value(key), "oz")
		s.wantRejoined()
		s.want(s.ZScore(t.Context(), "lock:2w", "b-1").Err(), redis.Nil)
		s.want(s.value(offerKey("b-1")), "<none>")
	}
}

// Whatever is refused, the release succeeds; and where nobody would tell the contender that the key is free, it
// does not wait.
func TestRejoinSucceedsWhateverIsRefused(t *testing.T) {
	s := &store{t: t, Client: redistest.StartServer(t).Client(t), real: true}
	for rule, want := range map[string]struct {
		reply int64
		key   string
	}{
		"-set": {1, "<none>"}, "-zadd": {1, "oz"}, "-incrby": {1, "<none>"}, "-publish": {1, "<none>"},
		"resetchannels": {1, "<none>"}, "-getdel": {2, "flightlock:turn:z-1"}, "-pexpire": {3, "oz"}, "-zrem": {3, "oz"},
		"-time": {1, "oz"},
	} {
		s.reset()
		s.offers("z-1")
		s.listen()
		got, err := s.as(rule).Eval(t.Context(), lua.Release.Source, []string{key, wants, bucket},
			"a", "PUBLISH", turn, "a-1", "", "", "leaves", offer("a-1")).Result()
		if err != nil || got != want.reply {
			t.Errorf("%s: %v %v, want %d", rule, got, err, want.reply)
		}
		if v := s.value(key); v != want.key {
			t.Errorf("%s: the key holds %q, want %q", rule, v, want.key)
		}
	}
}

// Nothing about wants can keep a release that yields, or an undo, from its work: not a user who may not ask for the
// time.
func TestReleasesAndUndosWithoutTIME(t *testing.T) {
	s := &store{t: t, Client: redistest.StartServer(t).Client(t), real: true}
	s.reset()
	s.offers("z-1")
	s.listen()
	app := s.as("-time")
	got, err := app.Eval(t.Context(), lua.Release.Source, []string{key, wants, bucket},
		"a", "PUBLISH", turn, "a-1", "z-1").Result()
	if v := s.value(key); err != nil || v == "a" {
		t.Errorf("a release that yields: %v %v, the key holds %q", got, err, v)
	}
	s.reset()
	s.acquire("a", minute, 1)
	got, err = app.Eval(t.Context(), lua.Undo.Source, []string{key, wants}, "a", "a-1").Result()
	if v := s.value(key); err != nil || v == "a" {
		t.Errorf("an undo: %v %v, the key holds %q", got, err, v)
	}
}
