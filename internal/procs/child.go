package procs

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Self is a command that runs this program again, with env ("NAME=value") added to the environment
// and the same stderr. A variable in env tells main, or TestMain, that it runs in a child.
func Self(env ...string) (*exec.Cmd, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(exe)
	// A program with the race detector sleeps for a second before it exits, unless told otherwise.
	cmd.Env = append(append(os.Environ(), "GORACE=atexit_sleep_ms=0"), env...)
	cmd.Stderr = os.Stderr
	return cmd, nil
}

// A Child is a process that exchanges values with this one: JSON, one value per line, over its
// stdin and stdout. It is expected to end when its stdin does.
//
// At most one goroutine sends and one receives at a time.
type Child struct {
	*Process
	in  io.WriteCloser
	out *os.File // the reading end of its stdout. Not cmd.StdoutPipe, which Wait closes unread
	enc *json.Encoder
	dec *json.Decoder
}

// StartChild starts cmd with its stdin and stdout connected to the Child.
func StartChild(cmd *exec.Cmd) (*Child, error) {
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, theirs, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, in.Close())
	}
	cmd.Stdout = theirs
	p, err := Start(cmd)
	_ = theirs.Close() // the child has its own copy
	if err != nil {
		return nil, errors.Join(err, out.Close())
	}
	return &Child{p, in, out, json.NewEncoder(in), json.NewDecoder(bufio.NewReader(out))}, nil
}

// Send writes v to the child's stdin.
func (c *Child) Send(v any) error { return c.enc.Encode(v) }

// Receive reads the child's next value into v, a pointer. It returns io.EOF when the child has
// closed its stdout, as it does when it ends.
func (c *Child) Receive(v any) error { return c.dec.Decode(v) }

// Call sends a request and receives its reply. If ctx ends first, Call closes the child's stdin and
// returns ctx's cause once the child has ended.
func (c *Child) Call(ctx context.Context, request, reply any) error {
	unregister := context.AfterFunc(ctx, func() { _ = c.CloseInput() })
	defer unregister()
	err := c.Send(request)
	if err == nil {
		err = c.Receive(reply)
	}
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, io.EOF), errors.Is(err, syscall.EPIPE), errors.Is(err, os.ErrClosed):
		return fmt.Errorf("process %d ended without a reply", c.PID())
	}
	return err
}

// CloseInput closes the child's stdin, which tells it to end. More calls do nothing.
func (c *Child) CloseInput() error {
	if err := c.in.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// End closes the child's stdin, discards what it still writes, and waits until it has ended. After
// d it kills the child, which is an error. Nothing can be received any more.
func (c *Child) End(d time.Duration) error {
	_ = c.CloseInput()
	drained := make(chan struct{})
	go func() { // ends with the child, which has the other end of the pipe
		defer close(drained)
		_, _ = io.Copy(io.Discard, c.out)
	}()
	err := c.WaitOrKill(d)
	<-drained
	_ = c.out.Close()
	return err
}

// Serve is the child's side of Call. It calls do for each request that it reads from in, one at a
// time and in order, and writes what do returns to out. It returns nil when in has ended.
//
// The ctx of do ends when in does, for nobody waits for the reply any more. A do that is still
// running after the grace period ends the process, by exit code 1: no child outlives its parent.
func Serve[Request, Reply any](
	in io.Reader, out io.Writer, grace time.Duration, do func(context.Context, Request) Reply,
) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan struct{}) // closed when Serve returns
	defer close(done)
	requests := make(chan Request) // closed when in has ended
	go func() {                    // ends with in, and with Serve
		readAll(in, requests, done)
		cancel()
		select {
		case <-done:
		case <-time.After(grace):
			os.Exit(1)
		}
	}()
	enc := json.NewEncoder(out)
	for r := range requests {
		if err := enc.Encode(do(ctx, r)); err != nil {
			return err
		}
	}
	return nil
}

// readAll sends what it reads from in to requests, and closes it when in has ended, or done is closed.
func readAll[Request any](in io.Reader, requests chan<- Request, done <-chan struct{}) {
	defer close(requests)
	for dec := json.NewDecoder(bufio.NewReader(in)); ; {
		var r Request
		if dec.Decode(&r) != nil {
			return
		}
		select {
		case requests <- r:
		case <-done:
			return
		}
	}
}
