package redistest

import (
	"bufio"
	"bytes"
	"crypto/sha1" //nolint:gosec // Redis names scripts by it
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// An Endpoint is a proxy that makes Redis servers look like one of another [Kind]. It reads commands, so that
// it can refuse them and change scripts, and answers those of a connection one after the other.
type Endpoint struct {
	kind  Kind
	hub   *hub
	addrs []string // of the servers; of several, the masters of a Cluster, by their slots

	lenient atomic.Bool // scripts are as they were sent
	answers atomic.Pointer[func(cmd []string) string]

	mu    sync.Mutex
	names map[string]string // of a script as it was sent: the name of what was loaded instead
	texts []string          // that were loaded
}

// NewEndpoint starts a proxy that makes the server at an address, or the masters of a Cluster at several,
// look like one server of that kind. The caller must Close it. Tests use [StartKind].
func NewEndpoint(kind Kind, addrs ...string) (*Endpoint, error) {
	e := &Endpoint{kind: kind, addrs: addrs, names: map[string]string{}}
	var err error
	e.hub, err = newHub(e.serve)
	return e, err
}

// StartKind is NewEndpoint for a test, in whose cleanup it ends.
func StartKind(tb testing.TB, kind Kind, addrs ...string) *Endpoint {
	tb.Helper()
	e, err := NewEndpoint(kind, addrs...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = e.Close() })
	return e
}

// StartNamed is StartKind for the one of [Kinds] with that name.
func StartNamed(tb testing.TB, name string, addrs ...string) *Endpoint {
	tb.Helper()
	kind, err := KindNamed(name)
	if err != nil {
		tb.Fatal(err)
	}
	return StartKind(tb, kind, addrs...)
}

// Close ends it, and all of its connections.
func (e *Endpoint) Close() error {
	e.hub.close()
	return nil
}

// SetAnswers has f asked about each command, as it was sent, from now on: what it returns is the answer, such
// as "-OOM ...\r\n", and the command is not executed; "" leaves the command as it is. f is called on the
// goroutines of the connections; nil: none.
func (e *Endpoint) SetAnswers(f func(cmd []string) string) {
	if e.answers.Store(&f); f == nil {
		e.answers.Store(nil)
	}
}

// RefuseScript has SCRIPT refused by that error from now on; "": by none.
func (e *Endpoint) RefuseScript(why string) {
	e.SetAnswers(func(cmd []string) string {
		if why == "" || !strings.EqualFold(cmd[0], "SCRIPT") {
			return ""
		}
		return errorReply(why)
	})
}

// Reload loads into s all scripts that were loaded through the endpoint, as a server does whose snapshots
// contain scripts.
func (e *Endpoint) Reload(tb testing.TB, s *Server) {
	tb.Helper()
	e.mu.Lock()
	texts := slices.Clone(e.texts)
	e.mu.Unlock()
	for _, text := range texts {
		s.Do(tb, "SCRIPT", "LOAD", text)
	}
}

// Addr is the endpoint's "127.0.0.1:port".
func (e *Endpoint) Addr() string { return e.hub.addr() }

// SetLenient has scripts run as they are sent, or again as the endpoint's kind of server does.
// Scripts that are loaded before keep what they have.
func (e *Endpoint) SetLenient(on bool) { e.lenient.Store(on) }

// loaded returns what is to be loaded instead of a script.
func (e *Endpoint) loaded(script string) string {
	text := script
	if !e.lenient.Load() {
		text = e.kind.before() + script
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, known := e.names[sha(script)]; !known {
		e.texts = append(e.texts, text)
	}
	e.names[sha(script)] = sha(text)
	return text
}

func (e *Endpoint) nameOf(sent string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if name, known := e.names[strings.ToLower(sent)]; known {
		return name
	}
	return sent
}

func sha(text string) string {
	sum := sha1.Sum([]byte(text)) //nolint:gosec // as above
	return hex.EncodeToString(sum[:])
}

// serve answers one connection until either side ends it.
func (e *Endpoint) serve(client net.Conn) {
	var servers []net.Conn
	var replies []chan []byte
	var passing sync.WaitGroup
	defer func() {
		for _, s := range servers {
			_ = s.Close()
		}
		for _, ch := range replies {
			for range ch { // until its reader has ended
			}
		}
		passing.Wait()
	}()
	var writing sync.Mutex
	for _, addr := range e.addrs {
		s, err := net.Dial("tcp", addr)
		if err != nil {
			return
		}
		ch := make(chan []byte, 1)
		servers, replies = append(servers, s), append(replies, ch)
		passing.Go(func() {
			defer close(ch)
			defer client.Close() // the server has ended the connection
			for r := bufio.NewReader(s); ; {
				reply, err := readReply(r)
				switch {
				case err != nil:
					return
				case !isMessage(reply):
					ch <- reply
				default:
					writing.Lock()
					_, _ = client.Write(reply)
					writing.Unlock()
				}
			}
		})
	}
	// ask has cmd executed by that server, -1: by all, and returns the last answer; nil: the connection has
	// ended.
	ask := func(cmd []string, to int) (reply []byte) {
		for i, s := range servers {
			if to >= 0 && to != i {
				continue
			}
			if _, err := s.Write(encode(cmd)); err != nil {
				return nil
			}
			if reply = <-replies[i]; reply == nil {
				return nil
			}
		}
		if len(servers) > 1 { // they do not say that they are members of a Cluster
			reply = bytes.Replace(reply, []byte("redis_mode:cluster"), []byte("redis_mode:sharded"), 1)
			reply = bytes.Replace(reply, []byte("\r\ncluster\r\n"), []byte("\r\nsharded\r\n"), 1)
		}
		return reply
	}
	for commands := bufio.NewReader(client); ; {
		cmd, err := readCommand(commands)
		if err != nil || len(cmd) == 0 {
			return
		}
		answer, hangup := strings.CutSuffix(e.refuse(cmd), Hangup)
		reply := []byte(answer)
		if answer == "" && !hangup {
			if reply = ask(e.change(cmd)); reply == nil {
				return
			}
			reply = e.kind.rewrite(cmd, reply)
		}
		writing.Lock()
		_, err = client.Write(reply)
		writing.Unlock()
		if err != nil || hangup {
			return
		}
	}
}

// isMessage reports whether what a server has sent was published, and is no reply.
func isMessage(reply []byte) bool {
	if reply[0] != '>' && reply[0] != '*' {
		return false
	}
	return bytes.HasPrefix(reply[1:], []byte("3\r\n$7\r\nmessage\r\n")) ||
		bytes.HasPrefix(reply[1:], []byte("3\r\n$8\r\nsmessage\r\n"))
}

// refuse returns what the endpoint answers by itself, "" if it does not; [Hangup] behind it closes the
// connection.
func (e *Endpoint) refuse(cmd []string) string {
	if answers := e.answers.Load(); answers != nil {
		if answer := (*answers)(cmd); answer != "" {
			return answer
		}
	}
	if e.kind.slotsOf && strings.EqualFold(cmd[0], "CLUSTER") && len(cmd) > 1 &&
		strings.EqualFold(cmd[1], "SLOTS") {
		host, port, _ := net.SplitHostPort(e.Addr())
		return fmt.Sprintf("*1\r\n*3\r\n:0\r\n:%d\r\n*3\r\n$%d\r\n%s\r\n:%s\r\n$40\r\n%040d\r\n",
			clusterSlots-1, len(host), host, port, 1)
	}
	return e.kind.refuses(cmd)
}

// change changes the script of cmd, and returns which server cmd goes to, -1 for all.
func (e *Endpoint) change(cmd []string) (_ []string, to int) {
	name := strings.ToUpper(cmd[0])
	key := 1
	switch {
	case name == "SCRIPT":
		if len(cmd) == 3 && strings.EqualFold(cmd[1], "LOAD") {
			cmd[2] = e.loaded(cmd[2])
		}
		if e.kind.loadsOnOne {
			return cmd, 0
		}
		return cmd, -1
	case name == "EVAL" || name == "EVALSHA":
		if name == "EVAL" {
			cmd[1] = e.loaded(cmd[1])
		} else {
			cmd[1] = e.nameOf(cmd[1])
		}
		if key = 3; len(cmd) < 4 || cmd[2] == "0" {
			return cmd, 0
		}
	case slices.Contains(keyed, name) && len(cmd) > 1:
	default:
		return cmd, 0
	}
	if len(e.addrs) == 1 {
		return cmd, 0
	}
	return cmd, int(slotOf(cmd[key])) * len(e.addrs) / clusterSlots
}

// keyed are commands of the library whose first argument has a hash slot.
var keyed = []string{
	"GET", "SET", "DEL", "PTTL", "EXISTS", "MGET", "ZADD", "HSET", "EXPIRE", "PEXPIRE", "ZRANGEBYSCORE",
	"SSUBSCRIBE", "SUNSUBSCRIBE", "SPUBLISH",
}

// slotOf is the hash slot of key, as the Redis Cluster specification has it.
func slotOf(key string) uint16 {
	if _, rest, open := strings.Cut(key, "{"); open {
		if tag, _, closed := strings.Cut(rest, "}"); closed && tag != "" {
			key = tag
		}
	}
	var crc uint16
	for i := range len(key) {
		crc ^= uint16(key[i]) << 8
		for range 8 {
			carry := crc & 0x8000
			if crc <<= 1; carry != 0 {
				crc ^= 0x1021
			}
		}
	}
	return crc % clusterSlots
}

// encode is a command as clients send it.
func encode(cmd []string) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "*%d\r\n", len(cmd))
	for _, arg := range cmd {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(arg), arg)
	}
	return b.Bytes()
}

// readReply reads one reply of RESP2 or RESP3, and returns it as it came.
func readReply(r *bufio.Reader) ([]byte, error) {
	line, err := r.ReadBytes('\n')
	if err != nil {
		return nil, err
	}
	n := 0
	if _, err := fmt.Sscanf(string(line[1:]), "%d\r\n", &n); err != nil {
		n = 0
	}
	parts := 0
	switch line[0] {
	case '$', '=', '!':
		if n < 0 {
			return line, nil
		}
		data := make([]byte, n+len("\r\n"))
		_, err := io.ReadFull(r, data)
		return append(line, data...), err
	case '*', '~', '>':
		parts = n
	case '%', '|':
		parts = 2 * n
	case '+', '-', ':', '_', '#', ',', '(':
	default:
		return nil, errors.New("redistest: unknown kind of reply")
	}
	for range parts {
		part, err := readReply(r)
		if err != nil {
			return nil, err
		}
		line = append(line, part...)
	}
	return line, nil
}
