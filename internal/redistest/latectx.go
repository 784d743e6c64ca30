package redistest

import (
	"context"
	"time"
)

// LateCtx is a context that ends a millisecond after its deadline: so late may its timer be. A request fails
// by the deadline of its socket before that.
type LateCtx struct{ context.Context }

// Deadline is a millisecond before the end.
func (c LateCtx) Deadline() (time.Time, bool) {
	deadline, ok := c.Context.Deadline()
	return deadline.Add(-time.Millisecond), ok
}
