package redistest

import (
	"bufio"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// Hangup at the end of a handler's reply closes the connection behind the rest of the
// reply, which may be nothing or the first half of something.
const Hangup = "\x00hangup"

// A Fake is a server that answers by script. It speaks RESP2 and plays the client's
// handshake itself: HELLO gets an error, from which go-redis concludes that this is an old
// server and asks for nothing more; AUTH, SELECT, READONLY and CLIENT ... get OK. Every
// other command goes to the handler.
type Fake struct {
	hub     *hub
	handler func(cmd []string) string

	resp3 atomic.Bool

	mu       sync.Mutex // guards commands
	commands [][]string
}

// StartFake starts a fake server on a free loopback port and ends it in the test's cleanup.
//
// handler gets a command with its arguments and returns the raw reply, such as "+OK\r\n" or
// ":1\r\n". With "" the command is never answered, nor is a later one on its connection:
// replies have no names, so the next one would pass for the missing one. Later
// commands are still recorded. A reply that ends in [Hangup] closes the connection.
//
// Each connection calls handler from its own goroutine. It may block to keep an answer
// back, but it has to return before the test's cleanup can end.
func StartFake(tb testing.TB, handler func(cmd []string) string) *Fake {
	tb.Helper()
	f := &Fake{handler: handler}
	f.hub = startHub(tb, f.serve)
	return f
}

// startHub starts a hub and closes it in the test's cleanup.
func startHub(tb testing.TB, serve func(net.Conn)) *hub {
	tb.Helper()
	h, err := newHub(serve)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(h.close)
	return h
}

// Addr is the fake's "127.0.0.1:port".
func (f *Fake) Addr() string { return f.hub.addr() }

// SetRESP3 has the fake agree on RESP3, or not any more, as at first.
func (f *Fake) SetRESP3(on bool) { f.resp3.Store(on) }

// Commands returns the commands that went to the handler so far, in the order of their
// arrival, each with its arguments.
func (f *Fake) Commands() [][]string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.commands)
}

func (f *Fake) record(cmd []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.commands = append(f.commands, cmd)
}

// serve answers one connection until either side ends it.
func (f *Fake) serve(c net.Conn) {
	r := bufio.NewReader(c)
	mute := false
	for {
		cmd, err := readCommand(r)
		if err != nil {
			return
		}
		if len(cmd) == 0 {
			continue // an empty array, to which Redis does not reply either
		}
		reply, hangup := strings.CutSuffix(f.answer(cmd), Hangup)
		if mute = mute || reply == "" && !hangup; !mute {
			if _, err := io.WriteString(c, reply); err != nil || hangup {
				return
			}
		}
	}
}

// answer plays the handshake and leaves the rest to the handler.
func (f *Fake) answer(cmd []string) string {
	switch strings.ToUpper(cmd[0]) {
	case "HELLO":
		if f.resp3.Load() {
			return "%1\r\n+proto\r\n:3\r\n"
		}
		return "-ERR unknown command 'HELLO'\r\n"
	case "AUTH", "SELECT", "READONLY", "CLIENT":
		return "+OK\r\n"
	}
	f.record(cmd)
	return f.handler(cmd)
}

// ErrorFor returns a handler for [StartFake] that answers one command, or several with
// "|" between them ("EVALSHA|EVAL|SCRIPT"), with an error such as "READONLY You can't write
// against a read only replica.", PING with PONG and everything else with OK.
func ErrorFor(verb, errline string) func(cmd []string) string {
	verbs := strings.Split(strings.ToUpper(verb), "|")
	reply := "-" + strings.TrimPrefix(strings.TrimSpace(errline), "-") + "\r\n"
	return func(cmd []string) string {
		switch name := strings.ToUpper(cmd[0]); {
		case slices.Contains(verbs, name):
			return reply
		case name == "PING":
			return "+PONG\r\n"
		default:
			return "+OK\r\n"
		}
	}
}

// BlackHole returns an address that accepts connections, takes what they send and never
// answers, until the test's cleanup.
func BlackHole(tb testing.TB) string {
	tb.Helper()
	return startHub(tb, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }).addr()
}

// RefusedAddr returns an address where connections are refused. Nothing that this package
// starts will listen there until the test's cleanup.
func RefusedAddr(tb testing.TB) string {
	tb.Helper()
	addr, release, err := ReserveAddr()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(release)
	return addr
}
