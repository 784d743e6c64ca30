package node

import (
	"context"
	"net"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/redis/go-redis/v9"
)

// When Sentinels have made a replica the master, they wait for 8 seconds or more before they make the master of
// before a replica, and reset its connections. Until then it votes, and so does its successor, to which every new
// connection leads. In a planned failover both can be reached: processes that had connections before, and those that
// start meanwhile, would not exclude each other. go-redis listens to the Sentinels, and drops the connections of the
// client that it was asked for; the lanes have their own. So the node asks who the master is, and its lanes give their
// connections up when that is another one.
//
// What the old master has granted before that is lost, as in any failover, unless the replica has it. The connection
// of the subscriptions is given up as well: see internal/pubsub.

// followEvery is how often a node asks, used or not: one that is used every few minutes would else go to the old master
// once more before it asks. go-redis asks one of the Sentinels, on a connection that it has.
const followEvery = time.Second

// follow has the lanes follow the master that the Sentinels name. It ends with the node. It asks at once, usually
// before a lane has a connection. Those that have one when the first answer comes, which may be the successor
// already, give it up.
func (s *Server) follow() {
	defer s.n.wg.Done()
	asks := conn.NewLimit(1)
	for {
		ctx, cancel := context.WithTimeout(s.n.life, s.n.ExchangeTime())
		addr, err := conn.Await(ctx, asks, func() (string, error) { return conn.MasterAddr(ctx, s.from) }, nil)
		cancel()
		if err == nil && addr != s.Master() {
			s.master.Store(&addr)
			s.moved.Add(1)
		}
		select {
		case <-s.n.life.Done():
			return
		case <-time.After(followEvery):
		}
	}
}

// followMaster gives up the connections that l has, if the Sentinels have named another master since the last exchange:
// the one in use, and what dials that were given up have left, which would be used next. The lane is busy.
func (l *lane) followMaster(ctx context.Context) {
	if moved := l.s.moved.Load(); l.moved != moved {
		l.moved = moved
		for n := l.client.PoolStats().IdleConns; n > 0 && l.hasConnection(); n-- {
			l.disconnect(ctx) // go-redis closes those that have ended besides
		}
	}
}

// redial has o's dialer dial again if the Sentinels have named another master meanwhile: if nobody waits any more for
// the dial, its connection would be there only after the lane has followed.
func (s *Server) redial(o *redis.Options) {
	dial := o.Dialer
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		for {
			moved := s.moved.Load()
			c, err := dial(ctx, network, addr)
			if err != nil || s.moved.Load() == moved {
				return c, err
			}
			_ = c.Close()
		}
	}
}
