package node

import (
	"context"
	"errors"
	"sync"

	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/singleflight"
)

// server is one Redis process that answers requests: a standalone server, or one master
// of a Cluster.
type server struct {
	n      *Node
	client *redis.Client
	addr   string
	heal   singleflight.Group // loads the scripts once, however many lanes miss them

	// Set on a Cluster: redirect sends a request on that belongs elsewhere, and says
	// whether it did; unreachable hears of each batch that got no answer.
	redirect    func(r *request, answer error) bool
	unreachable func(*server)

	start sync.Once // starts the lanes' goroutines, with the first request
	lanes [lanesPerServer]lane
}

func newServer(n *Node, c *redis.Client) *server {
	s := &server{n: n, client: c, addr: c.Options().Addr}
	for i := range s.lanes {
		s.lanes[i].init()
		s.lanes[i].s = s
	}
	return s
}

// push queues r in the lane of its key. When that cannot be, r is settled at once.
func (s *server) push(r *request) {
	s.start.Do(s.run)
	if err := s.lanes[r.e.t.lane].push(r); err != nil {
		r.settle(failed(err), notSent)
	}
}

// run starts a goroutine for each lane. close ends them.
func (s *server) run() {
	s.n.wg.Add(len(s.lanes))
	for i := range s.lanes {
		go s.lanes[i].run()
	}
}

func (s *server) close() {
	s.start.Do(func() {}) // nothing to start any more
	for i := range s.lanes {
		s.lanes[i].close()
	}
}

// exchange writes a batch, waits for its answers and settles every request in it.
// Requests whose script the server did not know go again, in the same order, after the
// scripts were loaded: still before anything that waits in the lane's queue.
func (s *server) exchange(batch []*request) {
	batch = unwritten(batch)
	for try := 0; len(batch) > 0; try++ {
		cmds := s.write(batch)
		unknown := batch[:0]
		for i, r := range batch {
			val, err := cmds[i].Result()
			switch {
			case err != nil && try < 3 && hasCode(err, "NOSCRIPT"):
				unknown = append(unknown, r)
			case err != nil && s.redirect != nil && s.redirect(r, err):
			default:
				r.settle(parse(r.op, val, err), sentHow(err))
			}
		}
		batch = unknown
		if len(batch) > 0 {
			if err := s.load(); err != nil {
				settleAll(batch, failed(err), notSent)
				return
			}
		}
	}
}

// write sends the batch as one pipeline on one connection and reads what comes back.
// It blocks for transportTimeout at most, plus what the client takes to dial.
func (s *server) write(batch []*request) []*redis.Cmd {
	ctx := context.Background()
	pipe := s.client.Pipeline()
	cmds := make([]*redis.Cmd, 0, len(batch))
	for _, r := range batch {
		if r.asking {
			_ = pipe.Do(ctx, "ASKING")
		}
		cmd := redis.NewCmd(ctx, r.args()...)
		cmds = append(cmds, cmd)
		_ = pipe.Process(ctx, cmd)
	}
	s.n.commands.Add(uint64(len(batch)))
	_, err := pipe.Exec(ctx)
	if isReply(err) {
		err = nil
	}
	s.n.heard(err)
	if err != nil && s.unreachable != nil {
		s.unreachable(s)
	}
	return cmds
}

// load puts the scripts into the server's cache.
func (s *server) load() error {
	_, err, _ := s.heal.Do("", func() (any, error) {
		ctx := context.Background()
		_, err := s.client.Pipelined(ctx, func(pipe redis.Pipeliner) error {
			for _, script := range lua.All {
				pipe.ScriptLoad(ctx, script.Source)
			}
			return nil
		})
		return nil, err
	})
	return err
}

// fate is what is known of a request that has ended.
type fate uint8

const (
	notSent  fate = iota // the server never saw it and never will
	answered             // the server has executed or refused it
	lost                 // its connection died first: the server may still execute it
)

func sentHow(err error) fate {
	switch {
	case err == nil || isReply(err):
		return answered
	case neverWritten(err):
		return notSent
	}
	return lost
}

// isReply reports whether err is an answer of the server, not a failure to get one.
func isReply(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply)
}

func settleAll(batch []*request, rep Reply, how fate) {
	for _, r := range batch {
		r.settle(rep, how)
	}
}
