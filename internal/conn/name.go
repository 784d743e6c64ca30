package conn

import (
	"context"

	"github.com/redis/go-redis/v9"
)

// Named returns an OnConnect that gives the connection a name, for CLIENT LIST, and then calls next, if that
// is not nil. Where the server, or a proxy before it, refuses CLIENT SETNAME, the connection has no name.
// go-redis, which is told a ClientName, takes that for a refused login; so it is not told.
func Named(name string,
	next func(context.Context, *redis.Conn) error) func(context.Context, *redis.Conn) error {
	if name == "" {
		return next
	}
	return func(ctx context.Context, c *redis.Conn) error {
		if told, ok := ctx.Value(toName{}).(*string); ok {
			*told = name
		} else if err := c.ClientSetName(ctx, name).Err(); err != nil && !RefusesName(err) {
			return err
		}
		if next != nil {
			return next(ctx, c)
		}
		return nil
	}
}

// toName is the key of a context in which Named only says which name that is: see Once.
type toName struct{}

// RefusesName reports whether a server that answered CLIENT SETNAME with err may be used without a name. What
// it says of the login, or of its state, it says to every command.
func RefusesName(err error) bool {
	return IsReply(err) && !Says(err, Always)
}
