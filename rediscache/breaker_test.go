package rediscache

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/group"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// breakerBubble runs a test of a breaker in a bubble.
func breakerBubble(t *testing.T, test func(t *testing.T, b *breaker, n *redistest.MemNode, rdb *redis.Client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := redistest.StartMemNode(t, "10.0.0.1:6379")
		rdb := n.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		closed := make(chan struct{})
		var tasks group.Group
		b := &breaker{s: newServer(rdb, "", time.Second, time.Minute), tasks: &tasks, closed: closed,
			servers: map[string]*health{}}
		defer func() {
			n.Stall(false)
			close(closed)
			tasks.Close()
			if err := tasks.Wait(context.Background()); err != nil {
				t.Error(err)
			}
		}()
		test(t, b, n, rdb)
	})
}

// Lookups that fail because this process is busy do not make a server that answers look down. One that
// does not answer a probe either is, until it does.
func TestProbesConfirmFailures(t *testing.T) {
	breakerBubble(t, func(t *testing.T, b *breaker, n *redistest.MemNode, _ *redis.Client) {
		for range 10 {
			for range 2 * maxFailed {
				b.failed("k")
			}
			if b.down() != 0 {
				t.Fatal("it is down without a probe")
			}
			synctest.Wait()
			if b.down() != 0 || b.troubled.Load() {
				t.Fatal("it is down, and answers")
			}
		}
		n.Stall(true)
		for range maxFailed {
			b.failed("k")
		}
		time.Sleep(time.Second)
		if b.down() != 1 {
			t.Error("it is not down, and does not answer")
		}
		n.Stall(false)
		time.Sleep(time.Second)
		if b.down() != 0 || b.troubled.Load() {
			t.Error("it is down, and answers again")
		}
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
	breakerBubble(t, func(t *testing.T, b *breaker, _ *redistest.MemNode, rdb *redis.Client) {
		rdb.AddHook(queue{})
		keys := []string{"k"}
		for range 5 {
			if failed := send(t.Context(), b, keys, b.s.reserve, func(string, found) {}); len(failed) == 0 {
				t.Fatal("the lookup was answered")
			}
			time.Sleep(time.Second)
			if b.down() != 0 || b.troubled.Load() {
				t.Fatal("it is down, and answers")
			}
		}
	})
}

// A server that has answered a lookup while a probe was under way is not down if that fails, however long ago
// the lookup began. It is when another probe fails.
func TestAnAnswerToALookupOutweighsAProbe(t *testing.T) {
	breakerBubble(t, func(t *testing.T, b *breaker, n *redistest.MemNode, _ *redis.Client) {
		n.Stall(true)
		answer := make(chan struct{})
		go func() { // before there was any trouble
			failed := send(t.Context(), b, []string{"k"}, func(context.Context, []string) ([]int, map[string]error) {
				<-answer
				return []int{0}, nil
			}, func(string, int) {})
			if len(failed) > 0 {
				t.Error(failed)
			}
		}()
		synctest.Wait()
		b.failed("k")
		time.Sleep(100 * time.Millisecond)
		close(answer)
		synctest.Wait()
		for range maxFailed {
			b.failed("k")
		}
		time.Sleep(200 * time.Millisecond)
		if b.down() != 0 {
			t.Error("it is down, and has answered a lookup")
		}
		time.Sleep(300 * time.Millisecond)
		if b.down() != 1 {
			t.Error("it is not down, and has not answered the second probe")
		}
	})
}

// A probe that has failed says nothing of the lookups that fail after one was answered.
func TestAnAnswerTakesTheConfirmationBack(t *testing.T) {
	breakerBubble(t, func(t *testing.T, b *breaker, n *redistest.MemNode, _ *redis.Client) {
		n.Stall(true)
		for range maxFailed {
			b.failed("k")
		}
		time.Sleep(time.Second)
		if b.down() != 1 {
			t.Fatal("it is not down")
		}
		b.succeeded("")
		for range 2 * maxFailed {
			if why := b.reason(t.Context(), b.failed("k"), errTimeout); why != nil {
				t.Fatalf("down without a probe: %v", why)
			}
		}
	})
}

// A server that needs more than half of a lookup's time is left alone for a while, and not for ever.
func TestASlowServerIsNotLeftAloneForEver(t *testing.T) {
	breakerBubble(t, func(t *testing.T, b *breaker, n *redistest.MemNode, _ *redis.Client) {
		n.SetDelay(b.s.lookups * 2 / 5) // in each direction
		for range maxFailed {
			b.failed("k")
		}
		time.Sleep(b.s.lookups) // the bubble's time
		if b.down() != 1 {
			t.Error("it is not down")
		}
		time.Sleep(pingSteps * b.s.lookups) // the bubble's time
		if b.down() != 0 || b.troubled.Load() {
			t.Error("it is down for ever")
		}
	})
}

// A server that answers again leaves the trouble of the others.
func TestEachServerOfAClusterHasItsOwnTrouble(t *testing.T) {
	breakerBubble(t, func(t *testing.T, b *breaker, _ *redistest.MemNode, _ *redis.Client) {
		one, other := &health{probed: make(chan struct{})}, &health{probed: make(chan struct{})}
		b.servers = map[string]*health{"one": one, "other": other}
		b.troubled.Store(true)
		if b.judge(one, "one", nil, nil) != over || !b.troubled.Load() {
			t.Error("nobody looks at the other server")
		}
		if b.judge(other, "other", nil, nil) != over || b.troubled.Load() {
			t.Error("there is trouble without a server that has any")
		}
	})
}

// A request that is made while a server is probed ends also if a hook of the client's ends its goroutine, or panics.
func TestAHookThatEndsTheGoroutineOfARequest(t *testing.T) {
	for what, hook := range map[string]func(){"Goexit": runtime.Goexit, "panic": func() { panic("a bug in a hook") }} {
		ended := make(chan error, 1)
		go func() {
			request := func(context.Context, []string) ([]int, map[string]error) {
				hook()
				return []int{0}, nil
			}
			_, failed := untilFailed(t.Context(), make(chan struct{}), []string{"k"}, request)
			ended <- failed["k"]
		}()
		select {
		case err := <-ended:
			var p *flightlock.PanicError
			if !errors.Is(err, errGoexit) && !errors.As(err, &p) {
				t.Errorf("%s: %v", what, err)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("%s: the caller waits for ever", what)
		}
	}
}
