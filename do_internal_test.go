package flightlock

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
)

// inBubble runs f in virtual time, with a Client of n nodes.
func inBubble(t *testing.T, n int, f func(t *testing.T, c *Client)) {
	synctest.Test(t, func(t *testing.T) {
		_, clients := redistest.NewBubble(t, n)
		c, err := New(Options{}, clients...)
		testkit.Must(t, err)
		defer c.Close(context.Background())
		f(t, c)
	})
}

// fn, or a goroutine that it has started, may release the lock just between the two steps of finish. Then
// it was not lost.
func TestALockThatOthersReleaseIsNotLost(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *Client) {
		err := c.Do(t.Context(), "k", time.Second, nil, func(ctx context.Context, l *Lock) error {
			before := l.Err()
			testkit.Must(t, l.Release(ctx))
			if lost := l.lossBy(before, l.Release(ctx)); lost != nil {
				t.Error(lost)
			}
			return nil
		})
		testkit.Must(t, err)
	})
}

// uncomparable is an error whose type can be compared, and whose value cannot: errors.Is panics.
type uncomparable struct{ what any }

func (uncomparable) Error() string { return "uncomparable" }

// fn may return any error, also the cause of its ctx, where that cannot be compared.
func TestDoWhoseErrorCannotBeCompared(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *Client) {
		ctx, cancel := context.WithCancelCause(t.Context())
		why := uncomparable{[]int{1}}
		err := c.Do(ctx, "k", time.Second, nil, func(inner context.Context, l *Lock) error {
			cancel(why)
			time.Sleep(5 * time.Second)
			return context.Cause(inner)
		})
		var got uncomparable
		if !errors.Is(err, ErrLockLost) || !errors.As(err, &got) {
			t.Error(err)
		}
	})
}

// If ctx has ended, and the lock was lost for another reason, the error of Do matches both.
func TestDoWhoseLockIsLostAfterItsContextHasEnded(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	inner, end := context.WithCancelCause(ctx)
	defer end(nil)
	cancel()
	err := lostDuring(ctx, inner, inner.Err(), lockError("k", ErrLockLost, errExpired))
	if !errors.Is(err, ErrLockLost) || !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
