package link

import (
	"errors"
	"sync"
)

// exec is a command of a boot's, or Pulse's. It is for its session alone: another may lead to another server.
// That of Open has none, and so is never sent.
type exec struct {
	s     *Session
	args  []string
	done  func(v *Value, err error) // is called once; v is nil if there was no reply
	pulse bool
}

// Exec sends a command, and waits for its reply, in a Boot. An error of the server's is one. What the reply
// has is copied.
func (s *Session) Exec(args ...string) (Value, error) {
	all := s.ExecAll([][]string{args})
	return all[0].Value, all[0].Err
}

// Result is what a command has got.
type Result struct {
	Value Value
	Err   error
}

// ExecAll sends commands together, as Exec.
func (s *Session) ExecAll(cmds [][]string) []Result {
	results := make([]Result, len(cmds))
	var wg sync.WaitGroup
	wg.Add(len(cmds))
	all := make([]*exec, len(cmds))
	for i, args := range cmds {
		all[i] = &exec{s: s, args: args, done: func(v *Value, err error) {
			defer wg.Done()
			if results[i].Err = err; v != nil {
				results[i].Value = v.clone()
			}
		}}
	}
	s.send(all)
	wg.Wait() // the session ends them, when nothing has arrived for too long
	return results
}

// Post sends commands, in a Boot, and does not wait for their replies: the calls that wait for the boot
// follow at once, and the server executes them after these. done gets why one was refused, if it was, and why
// there is no reply. It is as Reply and Fail of a Call.
func (s *Session) Post(cmds [][]string, done func(err error)) {
	all := make([]*exec, len(cmds))
	for i, args := range cmds {
		all[i] = &exec{s: s, args: args, done: func(_ *Value, err error) { done(err) }}
	}
	s.send(all)
}

// Open has the link made if there is none, and done called when it is there, or with the reason why it cannot
// be.
func (l *Link) Open(done func(err error)) {
	l.Do(&exec{done: func(_ *Value, err error) {
		if errors.Is(err, ErrObsolete) { // it would have been sent
			err = nil
		}
		done(err)
	}}, false)
}

func (s *Session) send(all []*exec) {
	s.l.mu.Lock()
	if s.over {
		s.l.mu.Unlock()
		for _, c := range all {
			c.done(nil, s.why)
		}
		return
	}
	for _, c := range all {
		s.sendLocked(c)
	}
	s.flushAndUnlock(handful)
}

func (c *exec) Encode(b []byte, on *Session) ([]byte, bool) {
	if on != c.s {
		return nil, false
	}
	return AppendCommand(b, c.args...), true
}

func (c *exec) Replies() int { return 1 }

func (c *exec) Patient() bool { return c.s != nil }

func (c *exec) Urgent() bool { return true }

func (c *exec) Late() {}

func (c *exec) Reply(_ *Session, v *Value) bool {
	c.done(v, v.Err())
	return false
}

func (c *exec) Fail(_ Delivery, err error) { c.done(nil, err) }

// clone is a copy that lasts.
func (v *Value) clone() Value {
	c := *v
	if v.Text != nil {
		c.Text = append([]byte(nil), v.Text...)
	}
	if v.Items != nil {
		c.Items = make([]Value, len(v.Items))
		for i := range v.Items {
			c.Items[i] = v.Items[i].clone()
		}
	}
	return c
}
