package lua_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

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
	eachStore(t, func(t *testing.T, s *store) {
		for _, c := range []struct {
			contender, rival string
			queue, want      []string
			turn             string
		}{
			{"", "", nil, nil, ""},
			{"", "", []string{"x-1", "y-1"}, []string{"x: 1 failed a", "y: 1 failed a", "x: 1 turn", "y: 1 other"}, "x-1"},
			{"me-1", "", []string{"x-1"}, []string{"x: 1 failed a", "x: 1 turn"}, "x-1"},
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

// A failure in a batch is notified, and does not affect the operations after it.
func TestAFailureInABatch(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		s.reset()
		for _, k := range []string{"k1", "k2", "k3", "k4"} {
			s.set(k, "o-"+k, time.Minute)
		}
		s.must(lua.Acquire, []string{"k3", bucket, "wants-k3"}, "other", minute, 1, 0, "x-1")
		told := s.listen()
		release := func(k string, more ...any) operation {
			return operation{lua.Release, []string{k, "wants-" + k}, append([]any{"o-" + k, "PUBLISH", turn}, more...)}
		}
		s.batch(release("k1"), release("k2"), release("k3", "", "", "failed"), release("k4", "", ""))
		if got := s.heard(told); !slices.Equal(got, []string{"x: 1 failed o-k3", "x: 1 turn"}) {
			t.Errorf("notices %q", got)
		}
		for _, k := range []string{"k1", "k2", "k4"} {
			s.want(s.value(k), "<none>")
		}
	})
}

// A user without PUBLISH notifies nobody, and releases the key all the same.
func TestAFailureThatMayNotBeTold(t *testing.T) {
	server := redistest.StartServer(t)
	s := &store{t: t, Client: server.Client(t), real: true}
	s.queue("a", "x-1")
	server.Do(t, "ACL", "SETUSER", "default", "-publish")
	s.want(s.leave("a", "", "", "failed"), int64(1))
	s.wantTurn("x-1")
}

// The contender whose turn it is, and the next one, are notified; the others are not woken. One
// that is not subscribed is skipped by the second message, not by the turn: it may be about to
// subscribe.
func TestOnlyTheNextTwoAreTold(t *testing.T) {
	ctx := context.Background()
	listens := func(s *store, clients ...string) {
		for _, c := range clients {
			p := s.Subscribe(ctx, inbox+c)
			s.t.Cleanup(func() { p.Close() })
			if _, err := p.Receive(ctx); err != nil {
				s.t.Fatal(err)
			}
		}
	}
	t.Run("all listen", func(t *testing.T) {
		s := &store{t: t, Client: redistest.StartServer(t).Client(t), real: true}
		s.queue("a", "v-1", "w-1", "x-1", "y-1")
		listens(s, "v", "w", "x", "y")
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
		{"a lock that never had to wait", nil, []string{"v: 1 turn", "w: 1 other", "x: 1 other"}},
		{"the others yield", []any{"me-1", "w-1"}, []string{"w: 1 turn", "v: 1 other"}},
	} {
		t.Run(c.what, func(t *testing.T) {
			s := &store{t: t, Client: redistest.StartServer(t).Client(t), real: true}
			s.queue("a", "v-1", "w-1", "x-1")
			told := s.listen()
			s.leave("a", c.release...)
			if got := s.heard(told); !slices.Equal(got, c.want) {
				t.Errorf("notices %q, want %q", got, c.want)
			}
		})
	}
	// A contender that did not come for its turn is gone, and so may be the others that were notified.
	t.Run("a turn was not taken", func(t *testing.T) {
		s := &store{t: t, Client: redistest.StartServer(t).Client(t), real: true}
		s.queue("a", "gone-1", "v-1", "w-1", "x-1")
		s.leave("a", "me-1")
		s.wantTurn("gone-1")
		if err := s.Del(ctx, key).Err(); err != nil { // as by its ttl
			t.Fatal(err)
		}
		s.ask("b", "y-1")
		told := s.listen()
		s.leave("b", "y-1")
		if got := s.heard(told); !slices.Equal(got, []string{"v: 1 turn", "w: 1 other", "x: 1 other"}) {
			t.Errorf("notices %q", got)
		}
	})
	t.Run("some are gone", func(t *testing.T) {
		s := &store{t: t, Client: redistest.StartServer(t).Client(t), real: true}
		s.queue("a", "v-1", "w-1", "x-1", "y-1")
		x := s.Subscribe(ctx, inbox+"x")
		y := s.Subscribe(ctx, inbox+"y")
		for _, p := range []*redis.PubSub{x, y} {
			defer p.Close()
			if _, err := p.Receive(ctx); err != nil {
				t.Fatal(err)
			}
		}
		s.leave("a", "me-1")
		s.wantTurn("v-1")
		if m, err := x.ReceiveTimeout(ctx, 10*time.Second); err != nil || m.(*redis.Message).Payload != "1 other" {
			t.Errorf("x is notified of %v, %v", m, err)
		}
		if err := s.Publish(ctx, inbox+"y", "the end").Err(); err != nil {
			t.Fatal(err)
		}
		if m, err := y.ReceiveTimeout(ctx, 10*time.Second); err != nil || m.(*redis.Message).Payload != "the end" {
			t.Errorf("y is notified of %v, %v", m, err)
		}
	})
}

// A client is notified whatever its label is made of, and a long one costs the server no more.
func TestInboxOfAnyLabel(t *testing.T) {
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
