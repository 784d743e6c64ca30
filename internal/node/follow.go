package node

import (
	"context"
	"fmt"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
)

// When Sentinels have made a replica the master, they wait for 8 seconds or more before they make the master
// of before a replica, and reset its connections. Until then it votes, and so does its successor, to which
// every new connection leads. In a planned failover both can be reached: processes that had connections
// before, and those that start meanwhile, would not exclude each other. go-redis listens to the Sentinels,
// and drops the connections of the client that it was asked for; the link has its own. So the node asks who
// the master is, and its link gives the connection up when that is another one.
//
// What the old master has granted before that is lost, as in any failover, unless the replica has it.

// followEvery is how often a node asks, used or not: one that is used every few minutes would else go to the
// old master once more before it asks. go-redis asks one of the Sentinels, on a connection that it has.
const followEvery = time.Second

// follow has the link follow the master that the Sentinels name. It ends with the node. It asks at once,
// usually before the link has a connection. If it has one when the first answer comes, which may name the
// successor already, it gives that up.
func (s *Server) follow() {
	asks := conn.NewLimit(1)
	for {
		ctx, cancel := context.WithTimeout(s.n.life, s.n.ExchangeTime())
		addr, err := conn.Await(ctx, asks, func() (string, error) { return conn.MasterAddr(ctx, s.of) }, nil)
		cancel()
		if err == nil && addr != s.Master() {
			s.master.Store(&addr)
			s.link.Moved(fmt.Errorf("%w: the Sentinels name %s", errElsewhere, addr))
		}
		select {
		case <-s.n.life.Done():
			return
		case <-time.After(followEvery):
		}
	}
}
