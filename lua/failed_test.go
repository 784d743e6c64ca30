package lua_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// heard gives what was told on the key's channel until now.
func (s *store) heard(told *redis.PubSub) (all []string) {
	s.t.Helper()
	if err := s.Publish(context.Background(), key, "the end").Err(); err != nil {
		s.t.Fatal(err)
	}
	for {
		m, err := told.ReceiveMessage(context.Background())
		if err != nil {
			s.t.Fatal(err)
		}
		if m.Payload == "the end" {
			return all
		}
		all = append(all, m.Payload)
	}
}

func (s *store) listen() *redis.PubSub {
	s.t.Helper()
	told := s.Subscribe(context.Background(), key)
	s.t.Cleanup(func() { told.Close() })
	if _, err := told.Receive(context.Background()); err != nil {
		s.t.Fatal(err)
	}
	return told
}

// A release that says "failed" tells so, by a message that is no contender's name, and then does what
// a release does: also when nobody is known to wait, for somebody may listen all the same.
func TestAFailureIsToldBeforeTheTurn(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		for _, c := range []struct {
			contender, rival string
			queue, want      []string
			turn             string
		}{
			{"", "", nil, []string{"a failed"}, ""},
			{"", "", []string{"x-1", "y-1"}, []string{"a failed", "x-1"}, "x-1"},
			{"me-1", "", []string{"x-1"}, []string{"a failed", "x-1"}, "x-1"},
			{"me-1", "y-1", []string{"x-1", "y-1"}, []string{"a failed", "y-1"}, "y-1"},
		} {
			s.queue("a", c.queue...)
			told := s.listen()
			s.want(s.leave("a", c.contender, c.rival, "failed"), int64(1))
			if got := s.heard(told); !slices.Equal(got, c.want) {
				t.Errorf("%+v: told %q", c, got)
			}
			if c.turn == "" {
				s.want(s.value(key), "<none>")
			} else {
				s.wantTurn(c.turn)
			}
		}
	})
}

// A failure says nothing where the key is not the owner's any more, and a release that is not one
// of a failure says nothing of any.
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
		if got := s.heard(told); !slices.Equal(got, []string{"x-1"}) {
			t.Errorf("told %q", got)
		}
	})
}

// A failure in a batch says so, and nothing of it stays with the operations behind it.
func TestAFailureInABatch(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		s.reset()
		for _, k := range []string{"k1", "k2", "k3", "k4"} {
			s.set(k, "o-"+k, time.Minute)
		}
		told := s.PSubscribe(context.Background(), "*")
		defer told.Close()
		if _, err := told.Receive(context.Background()); err != nil {
			t.Fatal(err)
		}
		release := func(k string, more ...any) operation {
			return operation{lua.Release, []string{k, "wants-" + k}, append([]any{"o-" + k, "PUBLISH", turn}, more...)}
		}
		s.batch(release("k1"), release("k2"), release("k3", "", "", "failed"), release("k4", "", ""))
		if got := s.heard(told); !slices.Equal(got, []string{"o-k3 failed"}) {
			t.Errorf("told %q", got)
		}
		for _, k := range []string{"k1", "k2", "k3", "k4"} {
			s.want(s.value(k), "<none>")
		}
	})
}

// A user that may not PUBLISH tells nothing, and lets go of the key all the same.
func TestAFailureThatMayNotBeTold(t *testing.T) {
	server := redistest.StartServer(t)
	s := &store{t: t, Client: server.Client(t), real: true}
	s.queue("a", "x-1")
	server.Do(t, "ACL", "SETUSER", "default", "-publish")
	s.want(s.leave("a", "", "", "failed"), int64(1))
	s.wantTurn("x-1")
}
