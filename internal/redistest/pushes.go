package redistest

import (
	"bufio"
	"bytes"
	"slices"
	"sync"

	"github.com/alicebob/miniredis/v2/server"
)

// pushes has a miniredis keep to RESP3, as Redis does: there a connection with subscriptions may send any
// command, and messages arrive among the replies. miniredis refuses these commands, as in RESP2, by what it
// keeps for a connection. So subscriptions get a keeping of their own.
//
// And miniredis sets Resp3 of a connection after each script, without the lock by which it delivers messages
// to it, and writes an array element by element. So a script on a connection with subscriptions replies to a
// peer of its own.
type pushes struct {
	server *server.Server

	mu   sync.Mutex // guards what follows
	kept map[*server.Peer]*keeping
}

type keeping struct {
	of     any  // what miniredis keeps for the subscriptions of the connection
	within bool // it executes a command about them
}

// answer is a hook of the server, called before each command. It reports whether it has replied.
func (p *pushes) answer(c *server.Peer, cmd string, args ...string) bool {
	switch {
	case !c.Resp3:
		return false
	case cmd == "EVAL" || cmd == "EVALSHA" || cmd == "EVAL_RO" || cmd == "EVALSHA_RO":
		return p.run(c, cmd, args)
	case cmd != "SUBSCRIBE" && cmd != "UNSUBSCRIBE":
		return false
	}
	k := p.of(c)
	if k.within {
		return false
	}
	k.within, k.of, c.Ctx = true, c.Ctx, k.of
	p.server.Dispatch(c, slices.Concat([]string{cmd}, args))
	k.within, k.of, c.Ctx = false, c.Ctx, k.of
	return true
}

// run has a script's reply come to c in one piece, if c has had subscriptions.
func (p *pushes) run(c *server.Peer, cmd string, args []string) bool {
	p.mu.Lock()
	subscribed := p.kept[c] != nil
	p.mu.Unlock()
	if !subscribed {
		return false
	}
	var reply bytes.Buffer
	own := server.NewPeer(bufio.NewWriter(&reply))
	own.Resp3, own.Ctx, own.ClientName = c.Resp3, c.Ctx, c.ClientName
	p.server.Dispatch(own, slices.Concat([]string{cmd}, args)) // not subscribed itself
	own.Flush()
	c.Ctx = own.Ctx // which the first command makes
	c.WriteRaw(reply.String())
	return true
}

func (p *pushes) of(c *server.Peer) *keeping {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.kept[c]
	if k == nil {
		k = &keeping{}
		if p.kept == nil {
			p.kept = map[*server.Peer]*keeping{}
		}
		p.kept[c] = k
		c.OnDisconnect(func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			delete(p.kept, c)
		})
	}
	return k
}
