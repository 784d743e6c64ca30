package progress

import (
	"bytes"
	"testing"
	"time"
)

func TestProgressBarGoesByExpectedTime(t *testing.T) {
	p := New(&bytes.Buffer{}) // no terminal: nothing is written, but the line can be read
	p.Start(4 * time.Second)
	p.Next("one", time.Second)
	p.Next("two", 3*time.Second)
	got := p.line(p.began.Add(time.Second))
	if want := "[###############...............]  50%  two"; got[:len(want)] != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if late := p.line(p.began.Add(time.Hour)); late[33:37] != "100%" {
		t.Errorf("a step that takes too long runs over: %q", late)
	}
	p.Close()
}
