package rediscache

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/group"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// breakerOf is a breaker whose server is well until it fails.
type breakerOf struct {
	*breaker
	t *testing.T
	n *redistest.MemNode
}

// breakerBubble runs a test of a breaker in a bubble.
func breakerBubble(t *testing.T, test func(t *testing.T, b breakerOf, rdb *redis.Client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := redistest.StartMemNode(t, "10.0.0.1:6379")
		rdb := n.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		ended, end := context.WithCancel(context.Background())
		var tasks group.Group
		b := &breaker{s: newServer(rdb, "", time.Second, time.Minute), tasks: &tasks, ended: ended}
		defer func() {
			n.Stall(false)
			end()
			tasks.Close()
			if err := tasks.Wait(context.Background()); err != nil {
				t.Error(err)
			}
		}()
		test(t, breakerOf{b, t, n}, rdb)
	})
}

// fail counts failed requests.
func (b breakerOf) fail(requests int) {
	for range requests {
		b.failed(b.s.only, "k")
	}
}

// want checks whether the server is down, and if it is not, whether it is probed.
func (b breakerOf) want(down, probed bool) {
	b.t.Helper()
	if b.down() != map[bool]int64{true: 1}[down] || b.troubled.Load() != map[bool]int32{true: 1}[probed] {
		b.t.Fatalf("%d are down and %d are probed; want it down: %v, probed: %v", b.down(), b.troubled.Load(), down, probed)
	}
}

// Lookups that fail because this process is busy do not make a server that answers look down. One that
// does not answer a probe either is, until it does.
func TestProbesConfirmFailures(t *testing.T) {
	breakerBubble(t, func(t *testing.T, b breakerOf, _ *redis.Client) {
		for range 10 {
			b.fail(2 * maxFailed)
			if b.down() != 0 {
				t.Fatal("it is down without a probe")
			}
			synctest.Wait()
			b.want(false, false)
		}
		b.n.Stall(true)
		b.fail(maxFailed)
		time.Sleep(time.Second)
		b.want(true, true)
		b.n.Stall(false)
		time.Sleep(time.Second)
		b.want(false, false)
	})
}

// queue is requests that wait in this process, as for the connections of a pool, until their time is over.
type queue struct{}

func (queue) DialHook(next redis.DialHook) redis.DialHook { return next }

func (queue) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

func (queue) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		<-ctx.Done()
		for _, cmd := range cmds {
			cmd.SetErr(ctx.Err())
		}
		return ctx.Err()
	}
}

// Lookups that wait for this process, and not for the server, until their time is over do not make it look down: a
// probe does not wait behind them.
func TestAProbeDoesNotWaitBehindLookups(t *testing.T) {
	breakerBubble(t, func(t *testing.T, b breakerOf, rdb *redis.Client) {
		rdb.AddHook(queue{})
		for range 5 {
			if _, failed := send(t.Context(), b.breaker, []string{"k"}, b.s.reserve); len(failed) == 0 {
				t.Fatal("the lookup was answered")
			}
			time.Sleep(time.Second)
			b.want(false, false)
		}
	})
}

// A server that has answered a lookup while a probe was under way is not down if that fails, however long ago
// the lookup began. It is when another probe fails.
func TestAnAnswerToALookupOutweighsAProbe(t *testing.T) {
	breakerBubble(t, func(t *testing.T, b breakerOf, _ *redis.Client) {
		b.n.Stall(true)
		answer := make(chan struct{})
		go send(t.Context(), b.breaker, []string{"k"}, func(context.Context, []string) (map[string]int, map[string]error) {
			<-answer // to a lookup that began before there was any trouble
			return nil, nil
		})
		synctest.Wait()
		b.fail(1)
		time.Sleep(100 * time.Millisecond)
		close(answer)
		synctest.Wait()
		b.fail(maxFailed)
		time.Sleep(200 * time.Millisecond)
		b.want(false, true)
		time.Sleep(300 * time.Millisecond)
		b.want(true, true)
		b.s.only.succeeded() // that takes the confirmation back
		b.fail(2 * maxFailed)
		b.want(false, true)
	})
}

// A server that needs more than half of a lookup's time is left alone for a while, and not for ever.
func TestASlowServerIsNotLeftAloneForEver(t *testing.T) {
	breakerBubble(t, func(_ *testing.T, b breakerOf, _ *redis.Client) {
		b.n.SetDelay(b.s.lookups * 2 / 5) // in each direction
		b.fail(maxFailed)
		time.Sleep(b.s.lookups) // the bubble's time
		b.want(true, true)
		time.Sleep(pingSteps * b.s.lookups) // the bubble's time
		b.want(false, false)
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
