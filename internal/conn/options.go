// Package conn makes connections to one Redis server, with a deadline of our own for every step, and
// classifies the errors of go-redis and of servers.
//
// The links and Check share it. It does not depend on locks.
package conn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

const (
	// DialTimeout limits a dial: a SYN that was lost is sent again after a second.
	DialTimeout = 1500 * time.Millisecond

	// TransportTimeout is how long a connection may wait for an answer before it is closed. It is
	// far above any NodeTimeout, so that late answers arrive on the connection of their requests, in
	// order.
	TransportTimeout = 2 * time.Second

	// ReadBuffer and WriteBuffer are the sizes of the buffers of the connections that a client of Open makes itself: for
	// Check and the like. A link has buffers of its own.
	ReadBuffer, WriteBuffer = 8 << 10, 32 << 10
)

// Options returns the options of c for connections of our own. Each connection is a Conn, is dialed
// once without retries, and is passed to dialed; greeted is called when it is ready for use, with
// the error by which the server has refused its name, if it has (see Named). Until then, each step
// except the dial is limited by step. Hooks of c are not called.
func Options(c *redis.Client, step time.Duration, dials Limit, dialed func(*Conn), greeted func(unnamed error),
) *redis.Options {
	o := BareOptions(c)
	limit := DialTimeout
	if o.TLSConfig != nil {
		limit += step
	}
	dial, greet := o.Dialer, o.OnConnect
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		conn, err := Await(ctx, dials, func() (net.Conn, error) { return dial(ctx, network, addr) },
			func(late net.Conn) { _ = late.Close() })
		if err != nil && ctx.Err() != nil {
			return nil, fmt.Errorf("no connection within %v: %w", limit, ctx.Err())
		} else if err != nil {
			return nil, err
		}
		d, conn := newConn(conn, step)
		dialed(d)
		return conn, nil
	}
	o.OnConnect = func(ctx context.Context, conn *redis.Conn) error {
		var refused error
		if greet != nil {
			ctx = context.WithValue(ctx, unnamed{}, &refused)
			if err := Guard(func() error { return greet(ctx, conn) }); err != nil {
				return err
			}
		}
		greeted(refused)
		return nil
	}
	o.CredentialsProviderContext = awaitCredentials(o, dials)
	if o.StreamingCredentialsProvider != nil {
		o.StreamingCredentialsProvider = awaitedStream{o.StreamingCredentialsProvider, dials}
	}
	o.DialTimeout = limit
	o.MaxRetries, o.DialerRetries = -1, 1
	// After PoolSize failed dials, go-redis would start a goroutine that dials by itself and ends a
	// second after the pool.
	o.PoolSize, o.MaxConcurrentDials, o.MinIdleConns, o.PipelinePoolSize = 16, 16, 0, -1
	o.MaxIdleConns, o.MaxActiveConns, o.ConnMaxIdleTime = 0, 0, -1
	// An abandoned dial leaves a second connection, which may never be used: the last one that was is used again.
	o.PoolFIFO = false
	o.ReadBufferSize, o.WriteBufferSize = 4<<10, 4<<10
	o.ContextTimeoutEnabled = true
	o.Limiter = nil // a circuit breaker for other uses of the client must not stop a refresh or a release
	return o
}

// BareOptions returns a copy of c's options without client-side caching and maintenance
// notifications. Its ClientName is set by OnConnect: see Named.
func BareOptions(c *redis.Client) *redis.Options {
	o := *c.Options()
	o.ClientSideCacheConfig, o.ClientSideCache = nil, nil
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	o.OnConnect, o.ClientName = Named(o.ClientName, o.OnConnect), ""
	return &o
}

var errDialed = errors.New("the connection on which it was asked is gone")

// Once is a client with a single connection.
type Once struct {
	*redis.Client
	conn net.Conn
}

// Close closes the client and its connection, which it may not have used.
func (o *Once) Close() error {
	_ = o.conn.Close()
	return o.Client.Close()
}

// DialOnce dials, and returns a client like c with that connection alone: all its commands reach one process, or
// fail. Each answer must arrive within step. The caller closes it. Hooks of c are not called. dials limits how many
// such dials may hang at once. change may adapt its options.
//
// It does not leave the dial to the client: go-redis logs each one that fails, and what cannot be reached is dialed
// four times a second.
//
// unnamed is as greeted of Options.
func DialOnce(ctx context.Context, c *redis.Client, step time.Duration, dials Limit, unnamed func(error),
	change func(*redis.Options),
) (*Once, error) {
	var dialed *Conn
	o := Options(c, step, dials, func(c *Conn) { dialed = c }, func(err error) {
		dialed.Greeted()
		unnamed(err)
	})
	o.MaxActiveConns = 1
	o.ReadTimeout, o.WriteTimeout = TransportTimeout, TransportTimeout
	change(o)
	dial := o.Dialer
	conn, err := dial(ctx, o.Network, o.Addr)
	if err != nil {
		return nil, err
	}
	once := &Once{conn: conn}
	var taken atomic.Bool
	o.Dialer = func(context.Context, string, string) (net.Conn, error) {
		if taken.Swap(true) {
			return nil, errDialed
		}
		return struct{ net.Conn }{conn}, nil // go-redis is not to look whether it was closed: it could only dial again
	}
	once.Client = redis.NewClient(o)
	return once, nil
}

// WithTimeout returns a client over the connection pool of c, with that socket timeout and without
// retries: a request that is replayed on a new connection can overtake the release that undoes it.
// go-redis's WithTimeout gives the new client options of its own, and reads the number of retries
// from them at each call.
func WithTimeout(c *redis.Client, timeout time.Duration) *redis.Client {
	own := c.WithTimeout(timeout)
	own.Options().MaxRetries = 0
	own.Options().ContextTimeoutEnabled = true // so that a ctx bounds the whole exchange
	own.Options().Limiter = nil                // as in Options; and what is refused here is not to open it
	return own
}
