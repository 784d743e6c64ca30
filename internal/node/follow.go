package node

import (
	"context"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
)

// When Sentinels have made a replica the master, they wait for 8 seconds or more before they make the master of
// before a replica, and reset its connections. Until then it votes, and so does its successor, to which every new
// connection leads. In a planned failover both can be reached: processes that had connections before, and those that
// start meanwhile, would not exclude each other. go-redis listens to the Sentinels, and drops the connections of the
// client that it was asked for; the lanes have their own. So the node asks who the master is, and its lanes give their
// connections up when that is another one.
//
// What the old master has granted before that is lost, as in any failover, unless the replica has it. Notices come
// from the old master until the Sentinels reset its connections: meanwhile waiters poll.

// followEvery is how often a node that is used asks. go-redis asks one of the Sentinels, on a connection that it has.
const followEvery = time.Second

// follow has the lanes follow the master that the Sentinels name. It ends with the node. It asks at once, usually
// before a lane has a connection. Those that have one when the first answer comes, which may be the successor
// already, give it up.
func (s *Server) follow() {
	defer s.n.wg.Done()
	last, used := "", uint64(0)
	asks := conn.NewLimit(1)
	for {
		if n := s.n.commands.Load(); n != used || last == "" {
			used = n
			ctx, cancel := context.WithTimeout(s.n.life, s.n.ExchangeTime())
			addr, err := conn.Await(ctx, asks, func() (string, error) { return conn.MasterAddr(ctx, s.from) }, nil)
			cancel()
			if err == nil && addr != last {
				last = addr
				s.moved.Add(1)
			}
		}
		select {
		case <-s.n.life.Done():
			return
		case <-time.After(followEvery):
		}
	}
}

// followMaster gives l's connection up, if the Sentinels have named another master since the last exchange. The lane is
// busy.
func (l *lane) followMaster(ctx context.Context) {
	if moved := l.s.moved.Load(); l.moved != moved {
		l.moved = moved
		if l.connected() {
			l.disconnect(ctx)
		}
	}
}
