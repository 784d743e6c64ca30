package link

// exec is a command of the handshake's, or Pulse's.
type exec struct {
	args  []string
	done  chan struct{}
	v     Value
	err   error
	pulse bool
}

// Exec sends a command, and waits for its reply, in a Boot. An error of the server's is one. What the reply has is
// copied.
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
	all, results := make([]*exec, len(cmds)), make([]Result, len(cmds))
	s.l.mu.Lock()
	over := s.over
	for i, args := range cmds {
		all[i] = &exec{args: args, done: make(chan struct{})}
		if over {
			all[i].err = s.why
			close(all[i].done)
		} else {
			s.sendLocked(all[i])
		}
	}
	s.flushAndUnlock()
	for i, c := range all {
		<-c.done // the session ends it, when nothing has arrived for too long
		results[i] = Result{c.v, c.err}
	}
	return results
}

func (c *exec) Encode(b []byte, _ *Session) ([]byte, bool) { return AppendCommand(b, c.args...), true }

func (c *exec) Replies() int { return 1 }

func (c *exec) Patient() bool { return true }

func (c *exec) Urgent() bool { return true }

func (c *exec) Late() {}

func (c *exec) Reply(_ *Session, v *Value) bool {
	c.v, c.err = v.clone(), v.Err()
	close(c.done)
	return false
}

func (c *exec) Fail(_ Delivery, err error) {
	c.err = err
	close(c.done)
}

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
