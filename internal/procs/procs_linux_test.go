package procs_test

import (
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/procs"
)

// A process that is killed takes its children with it: those too that ignore the end of their stdin.
func TestAChildDiesWithItsParent(t *testing.T) {
	p := start(t, "parent")
	var pid int
	if err := p.Receive(&pid); err != nil {
		t.Fatal(err)
	}
	p.Kill()
	// Dead is enough: nobody here is its parent, to reap it.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if s := procs.State(pid); s == 0 || s == 'Z' {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("it still runs")
		}
	}
}

// Stop returns when the process has stopped, and a stopped process can be killed.
func TestAProcessIsStoppedAndResumed(t *testing.T) {
	c := start(t, "server")
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	if s := procs.State(c.PID()); s != 'T' {
		t.Errorf("state %c", s)
	}
	if err := c.Cont(); err != nil {
		t.Fatal(err)
	}
	if err := c.Call(t.Context(), "a", new(string)); err != nil {
		t.Error(err)
	}
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	c.Kill()
	if c.Stop() == nil || c.Cont() == nil {
		t.Error("a process that is gone was signalled")
	}
}
