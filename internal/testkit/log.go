package testkit

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

// A LogBuffer is what a logger writes to, from several goroutines.
type LogBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *LogBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *LogBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// Count returns how many lines contain all these words.
func (b *LogBuffer) Count(words ...string) (n int) {
	for line := range strings.Lines(b.String()) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			n++
		}
	}
	return n
}

// WantOneLine waits for a line of the log that contains all of what, which follows the event by a
// moment, and allows no more than one.
func WantOneLine(t *testing.T, log *LogBuffer, what ...string) {
	t.Helper()
	redistest.Eventually(t, 20*time.Second, fmt.Sprintf("the log has a line with %q", what), func() bool {
		return log.Count(what...) > 0
	})
	if n := log.Count(what...); n != 1 {
		t.Errorf("%d lines tell of %q:\n%s", n, what, log.String())
	}
}

// SlowLog is a log that calls take for each record, which may block or panic.
func SlowLog(take func()) *slog.Logger { return slog.New(slowLog{slog.DiscardHandler, take}) }

type slowLog struct {
	slog.Handler
	take func()
}

func (slowLog) Enabled(context.Context, slog.Level) bool { return true }

func (l slowLog) Handle(context.Context, slog.Record) error {
	l.take()
	return nil
}

func (l slowLog) WithAttrs([]slog.Attr) slog.Handler { return l }

func (l slowLog) WithGroup(string) slog.Handler { return l }
