package sim

import (
	"context"
	"regexp"
	"runtime"
	"runtime/pprof"
	"sync"
	"time"
)

// timers are those of one process, as far as the library sets them with clock.AfterFunc: the
// deadlines of rounds, the alarms of flights, the patience of waiters, due refreshes, debts. While
// the process is paused, none goes off; when it continues, all that were due do, one after the
// other, as those of a real process that was stopped.
//
// A process is known by a label that all its goroutines carry, for they inherit it.
type timers struct {
	mu      sync.Mutex // guards what follows
	stopped bool
	due     []func() // meanwhile
}

// fire calls f now, or when the process continues.
func (ts *timers) fire(f func()) {
	ts.mu.Lock()
	if ts.stopped {
		ts.due = append(ts.due, f)
		ts.mu.Unlock()
		return
	}
	ts.mu.Unlock()
	f()
}

func (ts *timers) stop() {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	ts.stopped = true
}

// goOn gives those that were due.
func (ts *timers) goOn() (due []func()) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	ts.stopped = false
	due, ts.due = ts.due, nil
	return due
}

// afterFunc is clock.AfterFunc.
func (w *world) afterFunc(d time.Duration, f func()) *time.Timer {
	c := w.whose()
	return time.AfterFunc(d, func() { c.timers.fire(func() { c.as(f) }) })
}

// processLabel is the goroutines' label, which runtime.Stack shows with GODEBUG=tracebacklabels=1.
const processLabel = "process"

var labelled = regexp.MustCompile(`labels:{"` + processLabel + `": "(\w+)"}`)

// as does something that the process does.
func (c *client) as(do func()) {
	pprof.Do(context.Background(), pprof.Labels(processLabel, c.String()), func(context.Context) { do() })
}

// whose is the process that the calling goroutine belongs to.
func (w *world) whose() *client {
	var header [256]byte
	text := header[:runtime.Stack(header[:], false)]
	m := labelled.FindSubmatch(text)
	if m == nil {
		panic("a timer of nobody's: " + stacks())
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.named[string(m[1])]
}
