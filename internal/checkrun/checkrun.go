// Package checkrun is what the commands have in common that report whether nodes are fit for locking:
// `flightlock check` and `bench -check`.
package checkrun

import (
	"context"
	"time"

	"github.com/flightlock/flightlock"
)

// Nodes is Client.Check of a Client for these nodes, which it opens and closes. Its error is that of Open, or
// of ctx.
func Nodes(ctx context.Context, opts flightlock.Options, urls []string) (rep flightlock.Report, err error) {
	c, err := flightlock.Open(opts, urls...)
	if err != nil {
		return rep, err
	}
	rep, err = c.Check(ctx)
	// Not ctx: after an interrupt the connections are closed all the same. What hangs in a socket is
	// dropped.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = c.Close(ctx)
	return rep, err
}
