package rediscache

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// sick is a server that is well until it fails.
type sick struct {
	*server
	t *testing.T
	n *redistest.MemNode
}

// sickBubble runs a test of one in a bubble.
func sickBubble(t *testing.T, test func(t *testing.T, s sick)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := redistest.StartMemNode(t, "10.0.0.1:6379")
		rdb := n.Client(t, func(o *redis.Options) {
			o.ContextTimeoutEnabled, o.PoolSize, o.PipelinePoolSize = true, 1, -1
		})
		s := newServer(rdb, "", time.Second, time.Minute)
		defer func() {
			n.Stall(false)
			if err := s.close(context.Background()); err != nil {
				t.Error(err)
			}
		}()
		test(t, sick{s, t, n})
	})
}

// fail counts failed requests.
func (s sick) fail(requests int) {
	for range requests {
		s.note(s.t.Context(), []string{"k"}, map[string]error{"k": errTimeout})
	}
}

// want checks whether the server is down, and if it is not, whether it is probed.
func (s sick) want(down, probed bool) {
	s.t.Helper()
	if s.down() != map[bool]int64{true: 1}[down] || s.troubled.Load() != map[bool]int32{true: 1}[probed] {
		s.t.Fatalf("%d are down and %d are probed; want it down: %v, probed: %v", s.down(), s.troubled.Load(), down,
			probed)
	}
}

// Lookups that fail because this process is busy do not make a server that answers look down. One that
// does not answer a probe either is, until it does.
func TestProbesConfirmFailures(t *testing.T) {
	sickBubble(t, func(t *testing.T, s sick) {
		for range 10 {
			s.n.Stall(true) // so that the probe is under way
			s.fail(2 * maxFailed)
			s.want(false, true)
			s.n.Stall(false)
			synctest.Wait()
			s.want(false, false)
		}
		s.n.Stall(true)
		s.fail(maxFailed)
		time.Sleep(time.Second)
		s.want(true, true)
		s.n.Stall(false)
		time.Sleep(time.Second)
		s.want(false, false)
	})
}

// Lookups that wait for this process, and not for the server, until their time is over do not make it look
// down: a probe does not wait behind them.
func TestAProbeDoesNotWaitBehindLookups(t *testing.T) {
	sickBubble(t, func(t *testing.T, s sick) {
		only := s.rdb.(*redis.Client).Conn()
		defer only.Close()
		only.Ping(t.Context()) // has the connection of the pool
		for range 5 {
			if _, failed := s.reserve(t.Context(), []string{"k"}); len(failed) == 0 {
				t.Fatal("the lookup was answered")
			}
			time.Sleep(time.Second)
			s.want(false, false)
		}
	})
}

// A server that has answered a lookup while a probe was under way is not down if that fails, however long ago
// the lookup began. It is when another probe fails.
func TestAnAnswerToALookupOutweighsAProbe(t *testing.T) {
	sickBubble(t, func(t *testing.T, s sick) {
		s.n.Stall(true)
		answer := make(chan struct{})
		go send(t.Context(), s.server, []string{"k"},
			func(context.Context, []string) (map[string]int, map[string]error) {
				<-answer // to a lookup that began before there was any trouble
				return nil, nil
			})
		synctest.Wait()
		s.fail(1)
		time.Sleep(100 * time.Millisecond)
		close(answer)
		synctest.Wait()
		s.fail(maxFailed)
		time.Sleep(200 * time.Millisecond)
		s.want(false, true)
		time.Sleep(300 * time.Millisecond)
		s.want(true, true)
		s.only.succeeded() // that takes the confirmation back
		s.fail(2 * maxFailed)
		s.want(false, true)
	})
}

// A server that needs more than half of a lookup's time is left alone for a while, and not for ever.
func TestASlowServerIsNotLeftAloneForEver(t *testing.T) {
	sickBubble(t, func(_ *testing.T, s sick) {
		s.n.SetDelay(s.lookups * 2 / 5) // in each direction
		s.fail(maxFailed)
		time.Sleep(s.lookups) // the bubble's time
		s.want(true, true)
		time.Sleep(pingSteps * s.lookups) // the bubble's time
		s.want(false, false)
	})
}

// A request that is made while a server is probed ends also if a hook of the client's ends its goroutine.
func TestAHookThatEndsTheGoroutineOfARequest(t *testing.T) {
	_, failed := untilFailed(t.Context(), make(chan struct{}), []string{"k"},
		func(context.Context, []string) (map[string]int, map[string]error) {
			runtime.Goexit()
			return nil, nil
		})
	if !errors.Is(failed["k"], errNotSent) {
		t.Error(failed)
	}
}

// A server that answers the first key of a batch, and nothing behind it, has failed.
func TestAnAnswerSaysNothingOfWhatFailsBehindIt(t *testing.T) {
	sickBubble(t, func(t *testing.T, s sick) {
		s.n.Stall(true)
		s.note(t.Context(), []string{"answered", "k"}, map[string]error{"k": errTimeout})
		s.want(false, true)
	})
}

// A request whose caller has not waited for it reads nothing that the caller changes afterwards.
func TestTagsThatAreNotWaitedFor(t *testing.T) {
	sickBubble(t, func(t *testing.T, s sick) {
		s.honours = false
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for range 100 {
			ws := map[string]*writing{}
			for i := range 2 * perTag {
				ws[fmt.Sprint("k", i)] = &writing{tags: []string{"a", "b", "c"}}
			}
			if _, failed := (tags{s.server}).add(ctx, ws); len(failed) != len(ws) {
				t.Fatalf("%d of %d have failed", len(failed), len(ws))
			}
		}
	})
}
