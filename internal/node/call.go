package node

import (
	"context"

	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// A scriptName is the name of a script as the argument of a command. Which one it is, in which
// epoch and whether with the strict check, is decided when the command is written, and not when it is
// made: there may be a dial between.
//
// That of a batch's first command also records that go-redis came as far as writing it. Errors do
// not show that: a timeout may mean that the batch went out and was not answered, or that the
// server did not even take part in the handshake of a new connection, and only the first leaves the
// request indeterminate.
type scriptName struct {
	l       *lane
	op      op
	begins  bool // it is that of a batch's first command
	written bool // by the goroutine that executes the batch
}

// of starts again, for a command of that kind.
func (n *scriptName) of(o op) *scriptName {
	n.op, n.written = o, false
	return n
}

// MarshalBinary is called when the command is written.
func (n *scriptName) MarshalBinary() ([]byte, error) {
	if n.begins && !n.written {
		n.written = true
		n.l.flushed()
	}
	if n.op == opRelease && n.l.grantsNothing {
		return grantNothing, nil
	}
	return n.l.by.names[n.op], nil
}

// String is for hooks that log commands.
func (n *scriptName) String() string { return n.op.String() }

// maxArgs is the length of the longest command for one request.
const maxArgs = 14

// What every command has, made into interface values once.
var (
	evalsha any = "EVALSHA"
	numbers     = [...]any{0, 1, 2, 3}
)

// The letters that a batch has for the scripts.
var letterOf = [...]byte{
	opAcquire: lua.LetterAcquire, opRepair: lua.LetterAcquire, opRefresh: lua.LetterRefresh, opRelease: lua.LetterRelease,
	opUndo: lua.LetterUndo,
}

// call is the command for one place in the batches of a lane. It is used again from batch
// to batch, because it would be the largest part of what a request allocates. Nobody keeps
// it: go-redis executes a pipeline on the goroutine that asks for it, and the lane is busy
// until the answers were handed out.
type call struct {
	args [maxArgs]any
	cmds [maxArgs + 1]*redis.Cmd // by number of arguments, over args; made when first needed
}

// of makes the call that of r, by a script of that name.
func (c *call) of(r *request, name *scriptName) *redis.Cmd {
	args := r.keys(append(c.args[:0], evalsha, name, nil))
	args[2] = numbers[len(args)-3]
	args = r.values(args)
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

// forget drops the references to what the first n commands were about.
func (cs *calls) forget(n int) {
	for _, c := range (*cs)[:min(n, len(*cs))] {
		clear(c.args[:])
	}
}

// batchCmd is the one command for all requests of a batch, see lua/batch.lua. Its memory is
// used again by the lane's next batch.
type batchCmd struct {
	args   []any
	shapes []byte
	others []*request
}

// of makes the command for batch, by a script of that name. It puts the batch in the
// order in which it will be answered: the releases that go as a group come first.
//
// They may overtake what stands before them. An acquire or a refresh of the same entry is hardly
// among that, for it is obsolete once the release has begun; the exception, an acquire that
// registers its contender while the entry's debt is paid, is released once more when it is granted.
// No request of others among it was answered before the release was requested, so nobody relies on
// their order.
func (t *batchCmd) of(ctx context.Context, batch []*request, name *scriptName) *redis.Cmd {
	args, shapes := t.args[:0], t.shapes[:0]
	args = append(args, evalsha, name, nil)
	group := batch[:t.groupFirst(batch)]
	if len(group) > 0 {
		shapes = append(shapes, lua.LetterGroup, '0'+byte(len(group)), '0')
		for _, r := range group {
			args = append(args, &r.e.t.key)
		}
		for _, r := range group {
			args = append(args, r.e.t.wants())
		}
	}
	singles := batch[len(group):]
	for _, r := range singles {
		before := len(args)
		args = r.keys(args)
		shapes = append(shapes, letterOf[r.script()], '0'+byte(len(args)-before), '0')
	}
	args[2] = len(args) - 3
	shape := len(args)
	args = append(args, nil)
	if len(group) > 0 {
		for _, r := range group {
			args = append(args, &r.e.t.owner)
		}
		args = append(args, group[0].e.n.publish, group[0].e.n.turn)
	}
	var last [1 << 8]*request // by letter
	of := shapes[len(shapes)-3*len(singles):]
	for i, r := range singles {
		letter := letterOf[r.script()]
		if r.sameArgs(last[letter]) {
			args = append(args, &r.e.t.owner)
			continue
		}
		last[letter] = r
		before := len(args)
		args = r.values(args)
		of[3*i+2] = '0' + byte(len(args)-before)
	}
	args[shape] = shapes
	t.args, t.shapes = args, shapes
	return redis.NewCmd(ctx, args...)
}

// groupFirst moves the plain releases of batch to its front, if there is more than one, and
// says how many they are. Each part keeps its order.
func (t *batchCmd) groupFirst(batch []*request) (n int) {
	others := t.others[:0]
	for _, r := range batch {
		if r.plain() {
			batch[n] = r
			n++
		} else {
			others = append(others, r)
		}
	}
	copy(batch[n:], others)
	clear(others)
	t.others = others
	if n < 2 {
		return 0
	}
	return n
}

// forget drops the references to what the last command was about.
func (t *batchCmd) forget() {
	clear(t.args)
	t.args = t.args[:0]
}
