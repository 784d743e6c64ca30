// Package election has one process of several lead, and tells the others who that is.
//
// The leader is the holder of a lock. Its value, such as an address, is on the nodes of the lock, with the
// lock's token, before its work begins; it is withdrawn when the leader resigns, and expires with a leader
// that dies.
//
// The clients that flightlock.New was given write the value: their user needs the right +eval beside those of
// docs/operations.md.
package election

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fenced"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/redis/go-redis/v9"
)

// ErrNoLeader reports that nobody leads now: the last leader has resigned, or its value has expired.
var ErrNoLeader = errors.New("election: nobody leads")

const (
	maxValue = 4096                   // bytes, as of a key
	pause    = 250 * time.Millisecond // before what failed is tried again
	poll     = 500 * time.Millisecond // of Observe
	patience = 2 * time.Second        // with one node
)

// Campaign waits until this process leads, and then runs fn. fn resigns by returning: that ends the campaign,
// which returns fn's result unchanged. But if the lock was lost, as in an outage, fn's ctx ends, and when fn
// has returned the campaign continues, whatever it returned. A panic or runtime.Goexit in fn resigns, too.
//
// name is the key of the lock. ttl is how long nobody leads after a leader died. Both have the limits of
// Client.Do; value has at most 4,096 bytes. The lock is refreshed as in Do, and fn's ctx is its Context.
//
// When ctx ends, so does fn's ctx. When fn has returned, the next process leads at once, and Campaign returns
// what fn returned; while it waits, it returns ctx's error. Nodes that cannot be reached, or refuse, never
// end it: see Options.Logger, and call Client.Ready before. Other errors: ErrInvalid, ErrClosed.
func Campaign(ctx context.Context, c *flightlock.Client, name, value string, ttl time.Duration,
	fn func(ctx context.Context, lock *flightlock.Lock) error) error {
	b, err := boardOf(c, name)
	switch {
	case err != nil:
		return err
	case len(value) > maxValue:
		return fmt.Errorf("election: %w: value has %d bytes, more than %d", flightlock.ErrInvalid, len(value),
			maxValue)
	case fn == nil:
		return fmt.Errorf("election: %w: fn is nil: it is the function to run", flightlock.ErrInvalid)
	}
	for {
		led, over := false, false // fn was called; its result counts
		var result error
		err := c.Do(ctx, name, ttl, nil, func(ctx context.Context, l *flightlock.Lock) error {
			resign, err := b.post(ctx, l.Fence(), value, ttl)
			defer resign()
			if err != nil {
				return err
			}
			led = true
			result = fn(ctx, l)
			over = !errors.Is(l.Err(), flightlock.ErrLockLost) && !errors.Is(l.Err(), flightlock.ErrClosed)
			return result
		})
		switch {
		case over:
			return result
		case errors.Is(err, flightlock.ErrInvalid) && !led, errors.Is(err, flightlock.ErrClosed), ctx.Err() != nil:
			return err
		case !led: // otherwise the lock was lost, and is asked for again at once
			sleep(ctx, pause)
		}
	}
}

// Leader returns the value and the token (Lock.Fence) of who leads, and until when the value is valid unless
// the leader repeats it, with a monotonic clock reading. It is a hint, for redirects: the leadership may end
// at any moment, and only what compares tokens is safe from an old leader. Errors: ErrNoLeader;
// ErrUnavailable, after two seconds at most, if no majority of the nodes answers; ctx's error; ErrInvalid,
// ErrClosed.
func Leader(ctx context.Context, c *flightlock.Client,
	name string) (value string, token int64, until time.Time, err error) {
	b, err := boardOf(c, name)
	if err != nil {
		return "", 0, time.Time{}, err
	}
	t, err := b.read(ctx)
	return t.Value, t.Token, t.Until, err
}

// A Term is the time of one leader.
type Term struct {
	Value string    // the leader's
	Token int64     // Lock.Fence of its lock: strictly larger in each later Term
	Until time.Time // when Value expires unless the leader repeats it
}

// Observe yields who leads, and then each change, until ctx ends or the loop does: a Term, or an error of
// Leader, such as ErrNoLeader. A new Until is no change, and errors other than ErrNoLeader in a row count as
// one. It reads the nodes twice a second, on the caller's goroutine, so it may miss a leader that leads for
// less. ErrInvalid and ErrClosed end it.
func Observe(ctx context.Context, c *flightlock.Client, name string) iter.Seq2[Term, error] {
	return func(yield func(Term, error) bool) {
		b, err := boardOf(c, name)
		if err != nil {
			yield(Term{}, err)
			return
		}
		for last := [3]any{}; ; sleep(ctx, poll) {
			t, err := b.read(ctx)
			if ctx.Err() != nil {
				return
			}
			now := [3]any{t.Token, err == nil, errors.Is(err, ErrNoLeader)}
			if now != last && !yield(t, err) || errors.Is(err, flightlock.ErrClosed) {
				return
			}
			last = now
		}
	}
}

// sleep waits for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// A board is where the leader's record is: one key on each node, with the token, a space and the value, or
// the token alone when it was withdrawn. That stays for a ttl, because a node that the withdrawal did not
// reach has the value.
//
// A majority stores the value before the leader's work begins, so any majority that is read has it. Package
// fenced compares tokens: the value of a leader that was paused never replaces that of the next one. It is
// stored again each third of the ttl, and so outlives nodes that lose data. One server for values was
// rejected: its failure would hide the leader.
type board struct {
	c    seam.Client
	name string
	key  string
}

func boardOf(c *flightlock.Client, name string) (board, error) {
	inside := seam.Of(c)
	if inside == nil {
		return board{}, fmt.Errorf("election: %w: c is the zero Client: use New or Open", flightlock.ErrInvalid)
	}
	// The braces are the hash tag: so the key of the token begins as the record's does, as rights to keys
	// expect.
	b := board{inside, name, "flightlock:{election:" + inside.KeyPrefix() + name + "}"}
	return b, inside.CheckKey(name)
}

// everywhere runs f for each node on a goroutine for which Client.Close waits. A node that hangs holds it up
// as long as its client's timeouts allow, and nobody else.
func (b board) everywhere(f func(node redis.UniversalClient)) error {
	for _, node := range b.c.Nodes() {
		if !b.c.Go(func() { f(node) }) {
			return fmt.Errorf("election: %q: %w", b.name, flightlock.ErrClosed)
		}
	}
	return nil
}

// post stores the record, and has it repeated until resign is called or ctx, that of the lock, ends. It
// returns when a majority has stored it, or why the lock ended, or ErrUnavailable after a ttl, two seconds at
// least, in which none did: others may reach the nodes, and have to wait while the lock is refreshed. resign
// withdraws the record, and waits for all nodes or a NodeTimeout.
func (b board) post(ctx context.Context, fence int64, value string,
	ttl time.Duration) (resign func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	nodes, token := len(b.c.Nodes()), strconv.FormatInt(fence, 10)
	stored, withdrawn := make(chan struct{}, nodes), make(chan struct{}, nodes)
	var last atomic.Value // string: why a write has failed
	// it refuses a token that is not the largest
	write := func(node redis.UniversalClient, record string) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		return fenced.Set(ctx, node, b.key, record, fence, ttl)
	}
	err = b.everywhere(func(node redis.UniversalClient) {
		for first := true; ctx.Err() == nil; {
			wait := ttl / 3
			if err := write(node, token+" "+value); err != nil {
				last.Store(err.Error())
				wait = min(wait, pause)
			} else if first {
				first = false
				stored <- struct{}{}
			}
			sleep(ctx, wait)
		}
		_ = write(node, token) // otherwise the value expires
		withdrawn <- struct{}{}
	})
	late := time.After(max(ttl, patience))
	for n := 0; n < nodes/2+1 && err == nil; n++ {
		select {
		case <-late:
			err = fmt.Errorf("election: the value of %q is on no majority: %w", b.name, flightlock.ErrUnavailable)
			b.c.Log(slog.LevelWarn, "election: a leader resigns, because its value cannot be stored", "key", b.name,
				"error", last.Load())
		case <-stored:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	return func() {
		cancel()
		for limit, n := time.After(b.c.NodeTimeout()), 0; n < nodes; n++ {
			select {
			case <-withdrawn:
			case <-limit:
				n = nodes
			}
		}
	}, err
}

// answer is what a node has. No record at all is a withdrawn one without a token.
type answer struct {
	Term
	leads bool
	err   error
}

// ask asks a node, up to three times: connections of the pool may have died, and its client may not repeat
// anything.
func (b board) ask(ctx context.Context, node redis.UniversalClient) (a answer) {
	for range 3 {
		pipe, began := node.Pipeline(), time.Now()
		text, left := pipe.Get(ctx, b.key), pipe.PTTL(ctx, b.key)
		_, a.err = pipe.Exec(ctx)
		switch {
		case errors.Is(text.Err(), redis.Nil):
			return answer{}
		case a.err == nil:
			var token string
			token, a.Value, a.leads = strings.Cut(text.Val(), " ")
			a.Token, a.err = strconv.ParseInt(token, 10, 64)
			a.Until = began.Add(left.Val())
			return a
		}
	}
	return a
}

// read asks all nodes, and takes the record with the largest token when a majority has answered: that
// majority has a node in common with the one that stored the last leader's record, or withdrew it.
func (b board) read(ctx context.Context) (Term, error) {
	asked, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	nodes := len(b.c.Nodes())
	answers := make(chan answer, nodes)
	if err := b.everywhere(func(node redis.UniversalClient) { answers <- b.ask(asked, node) }); err != nil {
		return Term{}, err
	}
	var last answer
	for n, errs := 0, []error(nil); n < nodes/2+1; {
		var a answer
		select {
		case a = <-answers:
		case <-asked.Done():
			a.err = asked.Err()
		}
		if a.err == nil {
			if n++; a.Token > last.Token || a.Token == last.Token && !a.leads { // a withdrawal is later than its value
				last = a
			}
		} else if errs = append(errs, a.err); asked.Err() != nil || len(errs) > (nodes-1)/2 {
			if ctx.Err() == nil {
				errs = append(errs, flightlock.ErrUnavailable)
			}
			why := errs[0]
			for _, err := range errs[1:] { // on one line, for logs
				why = fmt.Errorf("%w; %w", why, err)
			}
			return Term{}, fmt.Errorf("election: leader of %q: %w", b.name, why)
		}
	}
	if !last.leads {
		return Term{}, fmt.Errorf("%w: %q", ErrNoLeader, b.name)
	}
	return last.Term, nil
}
