// Package progress shows how far a run of many steps has come.
package progress

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
)

// Bar is a bar on a terminal, and nothing anywhere else. It goes by expected times: a step that
// takes longer than expected makes it wait, not run over.
type Bar struct {
	out io.Writer // nil: no terminal

	mu       sync.Mutex // guards what follows
	name     string
	total    time.Duration // expected, of all steps
	done     time.Duration // expected, of the steps that are over
	step     time.Duration // expected, of this one
	began    time.Time     // of this one
	stop     chan struct{} // closed by Close
	finished sync.WaitGroup
}

// New makes a Bar, which shows nothing unless w is a terminal.
func New(w io.Writer) *Bar {
	p := &Bar{stop: make(chan struct{})}
	if f, ok := w.(*os.File); ok {
		if info, err := f.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
			p.out = w
		}
	}
	return p
}

// Start shows the bar, for steps that are expected to take total.
func (p *Bar) Start(total time.Duration) {
	p.total, p.began = total, time.Now()
	if p.out == nil {
		return
	}
	p.finished.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				fmt.Fprint(p.out, "\r"+p.line(time.Now()))
			case <-p.stop:
				fmt.Fprint(p.out, "\r\x1b[K")
				return
			}
		}
	})
}

// Next ends the present step and begins another.
func (p *Bar) Next(name string, expected time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done += p.step
	p.name, p.step, p.began = name, expected, time.Now()
}

func (p *Bar) line(now time.Time) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	const width = 30
	share := 0.0
	if p.total > 0 {
		share = min(1, float64(p.done+min(p.step, now.Sub(p.began)))/float64(p.total))
	}
	full := int(share * width)
	return fmt.Sprintf("[%s%s] %3.0f%%  %-40s", strings.Repeat("#", full), strings.Repeat(".", width-full),
		share*100, p.name)
}

// Close removes the bar.
func (p *Bar) Close() {
	close(p.stop)
	p.finished.Wait()
}
