package lua_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

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
	s.want(s.offerOf("a-1"), offer("a-1"))
}

// A release that rejoins grants the key as ever, and its contender waits again, behind all others. The next
// one learns of it.
func TestRejoin(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.acquire("a", minute, 3)
		s.want(s.rejoin(""), int64(1))
		s.want(s.value(key), "<none>")
		s.wantWaiting()
		s.want(s.offerOf("a-1"), "<none>")

		s.queue("a", "a-1")
		s.want(s.rejoin("b-1"), int64(1))
		s.want(s.value(key), "<none>")
		s.wantWaiting()
	})
}

// A want of before goes to the end.
func TestRejoinMovesTheWant(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
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
	t.Parallel()
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

// Whatever is refused, the release succeeds; and where nobody would tell the contender that the key is free,
// it does not wait.
func TestRejoinSucceedsWhateverIsRefused(t *testing.T) {
	t.Parallel()
	s := onServer(t)
	for rule, want := range map[string]struct {
		reply int64
		key   string
	}{
		"-set": {1, "<none>"}, "-zadd": {1, "oz"}, "-incrby": {1, "<none>"}, "-publish": {1, "<none>"},
		"resetchannels": {1, "<none>"}, "-hget": {2, "flightlock:turn:z-1"}, "-pexpire": {3, "oz"},
		"-zrem": {3, "oz"},
		"-time": {3, "oz"}, "-hset": {1, "oz"}, "-hdel": {2, "flightlock:turn:z-1"}, "-exists": {3, "oz"},
	} {
		s.reset()
		s.offers("z-1")
		s.listen()
		got, err := s.as(rule).run(lua.Release, all, releasing("a", "a-1", "", "", "leaves", offer("a-1"))...)
		if err != nil || got != want.reply {
			t.Errorf("%s: %v %v, want %d", rule, got, err, want.reply)
		}
		if v := s.value(key); v != want.key {
			t.Errorf("%s: the key holds %q, want %q", rule, v, want.key)
		}
	}
}

// Nothing about wants can keep a release that yields, or an undo, from its work: not a user who may not ask
// for the time.
func TestReleasesAndUndosWithoutTIME(t *testing.T) {
	t.Parallel()
	s := onServer(t)
	s.reset()
	s.offers("z-1")
	s.listen()
	app := s.as("-time")
	got, err := app.run(lua.Release, all, releasing("a", "a-1", "z-1")...)
	if v := s.value(key); err != nil || v == "a" {
		t.Errorf("a release that yields: %v %v, the key holds %q", got, err, v)
	}
	s.offers("z-1")
	info := map[string]string{"run_id": "", "process_id": "7", "uptime_in_seconds": "1"}
	epoch := in(lua.Epoch{Run: "7@1"}, true, "a", "PUBLISH", turn, "a-1") // whose process is known by its clock
	got, err = app.run(saying(lua.Release, info), all, epoch...)
	if err != nil {
		t.Errorf("a release that checks the process: %v %v", got, err)
	}
	s.wantTurn("z-1")
	s.reset()
	s.acquire("a", minute, 1)
	got, err = app.run(lua.Undo, undone, "a", "a-1")
	if v := s.value(key); err != nil || v == "a" {
		t.Errorf("an undo: %v %v, the key holds %q", got, err, v)
	}
}

// Release, done and undo delete our key, and report for other cases which one it was.
func TestReleaseTellsWhatItFound(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		for _, end := range []func() any{
			func() any { return s.leave("o") },
			func() any { return s.undo("o") },
			func() any { return s.done("o") },
		} {
			s.reset()
			s.want(end(), 0)
			s.set(key, "other", time.Minute)
			s.wantHeld(end(), "other", minute)
			s.want(s.value(key), "other")
			s.set(key, "o", time.Minute)
			s.want(end(), 1)
			s.want(end(), 0)
		}
	})
}

// A lock that never had to wait is deleted only if nobody waits for it, as far as the node can tell: else the
// reply is that release.lua is to follow, and nothing was written.
func TestDoneLeavesTheKeyToThoseThatWait(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.offers("z-1", "y-1")
		s.want(s.done("a"), -1)
		s.want(s.value(key), "a")
		s.wantTTL(minute)
		s.wantWaiting("z-1", "y-1")
		s.want(s.offerOf("z-1"), offer("z-1"))
		s.wantHeld(s.done("other"), "a", minute)
		s.set(key, "flightlock:turn:z-1", time.Minute)
		s.wantHeld(s.done("a"), "flightlock:turn:z-1", minute)
		s.Del(t.Context(), key)
		s.want(s.done("a"), 0)
		s.wantWaiting("z-1", "y-1")

		s.set(key, "a", time.Minute)
		s.set(wants, "no set", 0)
		s.want(s.done("a"), -1)
		s.want(s.value(key), "a")
		s.Del(t.Context(), wants)
		s.want(s.done("a"), 1)
		s.want(s.value(key), "<none>")
	})
	t.Run("rights", func(t *testing.T) {
		s := onServer(t)
		s.acquire("a", minute, 1)
		s.want(s.as("-exists").done("a"), -1)
		s.want(s.value(key), "a")
		if v, err := s.as("-get").run(lua.Done, []string{key, wants}, "a"); err == nil {
			t.Errorf("without GET: %v", v)
		}
		if v, err := s.as("-del").run(lua.Done, []string{key, wants}, "a"); err == nil {
			t.Errorf("without DEL: %v", v)
		}
	})
}

// heard returns the messages in inboxes until now, each with the inbox's client.
func (s *store) heard(told *redis.PubSub) (all []string) {
	s.t.Helper()
	if err := s.Publish(context.Background(), inbox+"test", "the end").Err(); err != nil {
		s.t.Fatal(err)
	}
	for {
		m, err := told.ReceiveTimeout(context.Background(), 10*time.Second)
		if err != nil {
			s.t.Fatal(err)
		}
		if m, is := m.(*redis.Message); is {
			if m.Payload == "the end" {
				return all
			}
			all = append(all, strings.TrimPrefix(m.Channel, inbox)+": "+m.Payload)
		}
	}
}

const inbox = "flightlock:inbox:"

// listen listens to all inboxes.
func (s *store) listen() *redis.PubSub {
	s.t.Helper()
	told := s.PSubscribe(context.Background(), inbox+"*")
	s.t.Cleanup(func() { told.Close() })
	if _, err := told.Receive(context.Background()); err != nil {
		s.t.Fatal(err)
	}
	return told
}

// A release that says "failed" notifies all waiters of that, and then does what a release does.
func TestAFailureIsToldBeforeTheTurn(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		for _, c := range []struct {
			contender, rival string
			queue, want      []string
			turn             string
		}{
			{"", "", nil, nil, ""},
			{"", "", []string{"x-1", "y-1"}, []string{"x: 1 failed a", "y: 1 failed a", "x: 1 turn", "y: 1 other"},
				"x-1"}, {"me-1", "", []string{"x-1"}, []string{"x: 1 failed a", "x: 1 turn"}, "x-1"},
			{"me-1", "y-1", []string{"x-1", "y-1"},
				[]string{"x: 1 failed a", "y: 1 failed a", "me: 1 failed a", "y: 1 turn", "x: 1 other"},
				"y-1"},
		} {
			s.queue("a", c.queue...)
			told := s.listen()
			s.want(s.leave("a", c.contender, c.rival, "failed"), int64(1))
			if got := s.heard(told); !slices.Equal(got, c.want) {
				t.Errorf("%+v: notices %q", c, got)
			}
			if c.turn == "" {
				s.want(s.value(key), "<none>")
			} else {
				s.wantTurn(c.turn)
			}
		}
	})
}

// A failure notifies nobody where the key is not the owner's any more, nor does a release without a
// failure.
func TestOnlyAFailureIsTold(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.queue("a", "x-1")
		told := s.listen()
		s.leave("a")
		s.wantTurn("x-1")
		s.set(key, "b", time.Minute)
		s.wantHeld(s.leave("a", "", "", "failed"), "b", minute)
		s.reset()
		s.want(s.leave("a", "", "", "failed"), int64(0))
		s.queue("b", "y-1")
		s.set(key, "flightlock:turn:me-1", time.Minute) // which is passed on
		s.want(s.leave("a", "me-1", "", "failed"), int64(0))
		s.wantTurn("y-1")
		if got := s.heard(told); !slices.Equal(got, []string{"x: 1 turn", "y: 1 turn"}) {
			t.Errorf("notices %q", got)
		}
	})
}

// A user without PUBLISH notifies nobody, and releases the key all the same.
func TestAFailureThatMayNotBeTold(t *testing.T) {
	t.Parallel()
	server := server(t)
	s := &store{t: t, Client: server.Client(t), real: true}
	s.queue("a", "x-1")
	server.Do(t, "ACL", "SETUSER", "default", "-publish")
	s.want(s.leave("a", "", "", "failed"), int64(1))
	s.wantTurn("x-1")
}

// The contender whose turn it is, and the next one, are notified; the others are not woken, but by an event.
func TestOnlyTheNextTwoAreTold(t *testing.T) {
	t.Parallel()
	t.Run("all listen", func(t *testing.T) {
		s := onServer(t)
		s.queue("a", "v-1", "w-1", "x-1", "y-1")
		told := s.listen()
		s.leave("a", "me-1")
		if got := s.heard(told); !slices.Equal(got, []string{"v: 1 turn", "w: 1 other"}) {
			t.Errorf("notices %q", got)
		}
	})
	for _, c := range []struct {
		what    string
		release []any
		want    []string
	}{
		{"a look", []any{"me-1", "", "look"}, []string{"v: 1 turn", "w: 1 other", "x: 1 other"}},
		{"a lock that never had to wait", nil, []string{"v: 1 turn", "w: 1 other"}},
		{"the others yield", []any{"me-1", "w-1"}, []string{"w: 1 turn", "v: 1 other"}},
	} {
		t.Run(c.what, func(t *testing.T) {
			s := onServer(t)
			s.queue("a", "v-1", "w-1", "x-1")
			told := s.listen()
			s.leave("a", c.release...)
			if got := s.heard(told); !slices.Equal(got, c.want) {
				t.Errorf("notices %q, want %q", got, c.want)
			}
		})
	}
}

// A client is notified whatever its label is made of, and a long one costs the server no more.
func TestInboxOfAnyLabel(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		for name, want := range map[string]string{
			"#id-a-7z":                           "id-a: 7z turn",
			"host#id-7":                          "id: 7 turn",
			"a-1#b-2 turn\n##id-7":               "id: 7 turn",
			strings.Repeat("x-y ", 64) + "#id-7": "id: 7 turn",
			"%a+()#id-7":                         "id: 7 turn",
			"no number#id":                       "",
			"neither":                            "",
		} {
			s.queue("a", name)
			told := s.listen()
			s.leave("a", "me-1")
			s.wantTurn(name)
			if got := strings.Join(s.heard(told), ", "); got != want {
				t.Errorf("%q: notices %q, want %q", name, got, want)
			}
		}
	})
}
