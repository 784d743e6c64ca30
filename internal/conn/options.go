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

	// ReadBuffer and WriteBuffer are the sizes of the buffers of the connections that a client of Open makes
	// itself: for Check and the like. A link has buffers of its own.
	ReadBuffer, WriteBuffer = 8 << 10, 32 << 10
)

// BareOptions returns a copy of a client's options without client-side caching and maintenance
// notifications. Its ClientName is set by OnConnect: see Named.
func BareOptions(of *redis.Options) *redis.Options {
	o := *of
	o.ClientSideCacheConfig, o.ClientSideCache = nil, nil
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	o.OnConnect, o.ClientName = Named(o.ClientName, o.OnConnect), ""
	return &o
}

var errDialed = errors.New("the connection on which it was asked is gone")

// Once is a client with a single connection.
type Once struct {
	*redis.Client
	conn   net.Conn // what the Dialer has returned
	dialed *Conn    // the same, or below that
	Name   string   // that the connection should have, and has not: to give it one costs a round trip
}

// Close closes the client and its connection, which it may not have used.
func (o *Once) Close() error {
	_ = o.conn.Close()
	return o.Client.Close()
}

// DialOnce dials, and returns a client with the options of another, and with that connection alone: all its
// commands reach one process, or fail. It dials without retries, and each answer must arrive within step. The
// caller closes it. Hooks of that other client are not called. dials limits how many such dials, and
// providers of credentials, may hang at once. change may adapt its options, in which the Dialer makes a Conn.
//
// It does not leave the dial to the client: go-redis logs each one that fails, and what cannot be reached is
// dialed four times a second.
func DialOnce(ctx context.Context, of *redis.Options, step time.Duration, dials Limit,
	change func(*redis.Options),
) (*Once, error) {
	o, once := BareOptions(of), &Once{}
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
		once.dialed = newConn(conn, step)
		return once.dialed, nil
	}
	o.OnConnect = func(ctx context.Context, conn *redis.Conn) error {
		if said := once.dialed.refused.Load(); said != nil && RefusesLogin(ServerError(*said)) {
			return ServerError(*said) // to HELLO, after which go-redis continues
		}
		if greet != nil {
			ctx = context.WithValue(ctx, toName{}, &once.Name)
			if err := Guard(func() error { return greet(ctx, conn) }); err != nil {
				return err
			}
		}
		once.dialed.greeted.Store(true)
		return nil
	}
	o.CredentialsProviderContext = awaitCredentials(o, dials)
	if o.StreamingCredentialsProvider != nil {
		o.StreamingCredentialsProvider = awaitedStream{o.StreamingCredentialsProvider, dials}
	}
	o.MaxRetries, o.DialerRetries = -1, 1
	// After PoolSize failed dials, go-redis would start a goroutine that dials by itself and ends a
	// second after the pool.
	o.PoolSize, o.MaxConcurrentDials, o.MinIdleConns, o.PipelinePoolSize = 16, 16, 0, -1
	o.MaxIdleConns, o.MaxActiveConns, o.ConnMaxIdleTime = 0, 1, -1
	o.ReadBufferSize, o.WriteBufferSize = 4<<10, 4<<10
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout = limit, TransportTimeout, TransportTimeout
	o.ContextTimeoutEnabled = true
	o.DisableIdentity = true // which costs a round trip
	// a circuit breaker for other uses of the client must not stop a refresh or a release
	o.Limiter = nil
	change(o)
	dialAs := o.Dialer
	conn, err := dialAs(ctx, o.Network, o.Addr)
	if err != nil {
		return nil, err
	}
	once.conn = conn
	var taken atomic.Bool
	o.Dialer = func(context.Context, string, string) (net.Conn, error) {
		if taken.Swap(true) {
			return nil, errDialed
		}
		// go-redis is not to look whether it was closed: it could only dial again
		return struct{ net.Conn }{conn}, nil
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
	own.Options().Limiter = nil                // as in DialOnce; and what is refused here is not to open it
	return own
}
