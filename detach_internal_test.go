package flightlock

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/redis/go-redis/v9"
)

// An attempt to attach of which nothing was sent when its ctx ended is remembered as any other whose outcome is not
// known: it may be sent just then.
func TestAnAttachThatWasNotSentIsRemembered(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c, err := New(Options{}, clients...)
		testkit.Must(t, err)
		l, err := c.TryLock(t.Context(), "k", time.Minute)
		testkit.Must(t, err)
		d, err := l.Detach()
		testkit.Must(t, err)
		testkit.Down(true, nodes...)
		time.Sleep(time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if _, err := c.Attach(ctx, d); !errors.Is(err, ErrUnavailable) && !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("without a node: %v", err)
		}
		if owners := c.unsettled.owners(d.of()); len(owners) != 2 {
			t.Errorf("the next attempt accepts %q", owners)
		}
		testkit.Down(false, nodes...)
		testkit.Must(t, c.Close(t.Context()))
	})
}
