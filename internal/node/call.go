package node

import (
	"context"

	"github.com/redis/go-redis/v9"
)

// maxArgs is the length of the longest command.
const maxArgs = 11

// call is the command for one place in the batches of a lane. It is used again from batch
// to batch, because it would be the largest part of what a request allocates. Nobody keeps
// it: go-redis executes a pipeline on the goroutine that asks for it, and the lane is busy
// until the answers were handed out.
type call struct {
	args [maxArgs]any
	cmds [maxArgs + 1]*redis.Cmd // by number of arguments, over args; made when first needed
}

// of makes the call that of r, to a server with that memory.
func (c *call) of(r *request, m *memory) *redis.Cmd {
	args := r.args(c.args[:0], m)
	cmd := c.cmds[len(args)]
	if cmd == nil {
		cmd = redis.NewCmd(context.Background(), args[:len(args):len(args)]...)
		c.cmds[len(args)] = cmd
	}
	cmd.SetVal(nil)
	cmd.SetErr(nil)
	return cmd
}

// calls are those of a lane, as many as its largest batch had requests.
type calls []*call

func (cs *calls) at(i int) *call {
	if i == len(*cs) {
		*cs = append(*cs, &call{})
	}
	return (*cs)[i]
}

// forget lets go of what the first n commands were about.
func (cs *calls) forget(n int) {
	for _, c := range (*cs)[:min(n, len(*cs))] {
		clear(c.args[:])
	}
}
