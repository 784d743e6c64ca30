package redistest

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// A line carries bytes one way, from one writer to one reader, and can be tampered with on
// the way. What was put in comes out in order, none of it before its due time, and nothing
// while the line is held. Its length is not bounded and putting never blocks.
//
// A line ends in one of two ways. After finish the reader still gets what is on the line,
// then io.EOF: a peer that closed its connection. After breakOff what is on the
// line is lost and both sides get the error at once: a reset.
//
// The proxy is made of lines, and so is the in-memory connection. A delay is a delay
// line, not a sleep per piece: pieces age side by side, so throughput stays what it was.
type line struct {
	// wake has room for one and is filled after every change that may concern the
	// reader. One reader, so one token is enough.
	wake chan struct{}

	mu       sync.Mutex // guards what follows
	pieces   []piece
	held     bool
	finished bool
	broken   error     // set by breakOff
	deadline time.Time // the reader's; zero for none
}

// A piece is what was put in at once.
type piece struct {
	data []byte
	due  time.Time
}

func newLine() *line { return &line{wake: make(chan struct{}, 1)} }

// put lays data, which the line keeps, on the line. It comes out at due or later.
func (l *line) put(data []byte, due time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.broken != nil:
		return syscall.EPIPE
	case l.finished:
		return net.ErrClosed
	}
	l.pieces = append(l.pieces, piece{data, due})
	l.changedLocked()
	return nil
}

// finish says that nothing more will be put in.
func (l *line) finish() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.finished = true
	l.changedLocked()
}

// breakOff loses what is on the line and ends it with err. The first call counts.
func (l *line) breakOff(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.broken == nil {
		l.broken, l.pieces = err, nil
		l.changedLocked()
	}
}

// ended returns how the line has ended; nil: it has not, or its reader still gets something.
func (l *line) ended() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.broken != nil:
		return l.broken
	case l.finished && !l.held && len(l.pieces) == 0:
		return io.EOF
	}
	return nil
}

// quiet reports whether a read would wait, or begin with a push.
func (l *line) quiet() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.broken != nil:
		return false
	case l.held:
		return true
	case len(l.pieces) == 0:
		return !l.finished
	}
	next := l.pieces[0]
	return time.Now().Before(next.due) || len(next.data) > 0 && next.data[0] == '>'
}

// hold stops the line, end included, or lets it continue.
func (l *line) hold(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held = on
	l.changedLocked()
}

// setDeadline makes read fail with os.ErrDeadlineExceeded from t on; also one in progress.
func (l *line) setDeadline(t time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deadline = t
	l.changedLocked()
}

func (l *line) changedLocked() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// read waits for bytes and fills p with what one piece has of them. Only one goroutine may
// be in it.
func (l *line) read(p []byte) (int, error) {
	for {
		l.mu.Lock()
		n, err := l.readNowLocked(p)
		again := l.nextLocked()
		l.mu.Unlock()
		if n > 0 || err != nil || len(p) == 0 {
			return n, err
		}
		l.await(again)
	}
}

// readNowLocked reads what can be read without waiting, perhaps nothing.
func (l *line) readNowLocked(p []byte) (int, error) {
	now := time.Now()
	switch {
	case l.broken != nil:
		return 0, l.broken
	case !l.deadline.IsZero() && !now.Before(l.deadline):
		return 0, os.ErrDeadlineExceeded
	case l.held:
		return 0, nil
	case len(l.pieces) == 0 && l.finished:
		return 0, io.EOF
	case len(l.pieces) == 0 || now.Before(l.pieces[0].due):
		return 0, nil
	}
	head := &l.pieces[0]
	n := copy(p, head.data)
	if head.data = head.data[n:]; len(head.data) == 0 {
		l.pieces[0] = piece{} // drop the bytes
		l.pieces = l.pieces[1:]
	}
	return n, nil
}

// nextLocked is when the clock alone will change what read does; zero for never.
func (l *line) nextLocked() time.Time {
	next := l.deadline
	if len(l.pieces) > 0 && !l.held {
		if due := l.pieces[0].due; next.IsZero() || due.Before(next) {
			next = due
		}
	}
	return next
}

// await waits for a change, or until the clock has reached the given time.
func (l *line) await(at time.Time) {
	if at.IsZero() {
		<-l.wake
		return
	}
	timer := time.NewTimer(time.Until(at))
	defer timer.Stop()
	select {
	case <-l.wake:
	case <-timer.C:
	}
}
