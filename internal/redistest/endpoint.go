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

// An Endpoint is a proxy that makes Redis servers look like one of another kind. It reads commands, so that it can
// change scripts, and answers them one after the other.
type Endpoint struct {
	hub   *hub
	addrs []string
	slot  func(key string) int // which of addrs has the key; nil: all keys are on the first

	lenient  atomic.Bool // scripts are as they were sent
	prologue string      // goes before each script

	mu    sync.Mutex
	names map[string]string // of a script as it was sent: the name of what was loaded instead
	texts []string          // that were loaded
}

// StartDeclaredOnly starts a proxy that makes s one whose scripts may access only the keys that
// they declare, as Dragonfly does, with its words. It ends in the test's cleanup.
func StartDeclaredOnly(tb testing.TB, s *Server) *Endpoint {
	return startEndpoint(tb, &Endpoint{addrs: []string{s.Addr()}, prologue: within(`
local declared = {}
for _, key in ipairs(KEYS) do declared[key] = true end
local function refused(name, ...)
  local args, first, last = {...}, 1, 1
  if name == 'TIME' or name == 'INFO' or name == 'PUBLISH' then return end
  if name == 'OBJECT' then first, last = 2, 2 end
  if name == 'DEL' or name == 'EXISTS' or name == 'MGET' or name == 'UNLINK' then last = #args end
  for i = first, last do
    if not declared[args[i]] then
      return 'ERR script tried accessing undeclared key, key: ' .. tostring(args[i])
    end
  end
end`)})
}

// StartApart starts a proxy that makes s one of several servers: scripts whose first key contains part may not access
// key, which is elsewhere. It ends in the test's cleanup.
func StartApart(tb testing.TB, s *Server, key, part string) *Endpoint {
	return startEndpoint(tb, &Endpoint{addrs: []string{s.Addr()}, prologue: within(`
local function refused(_, first, second)
  local is, elsewhere = KEYS[1] or '', '` + key + `'
  if is ~= elsewhere and string.find(is, '` + part + `', 1, true) and (first == elsewhere or second == elsewhere) then
    return 'ERR Script attempted to access keys that do not hash to the same slot'
  end
end`)})
}

// StartOld starts a proxy whose scripts find in s the commands of Redis 6.0: ZADD has no LT, INFO has one section, and
// there is no GETDEL.
func StartOld(tb testing.TB, s *Server) *Endpoint {
	return startEndpoint(tb, &Endpoint{addrs: []string{s.Addr()}, prologue: within(`
local function refused(name, key, option)
  if name == 'ZADD' and option == 'LT' or name == 'INFO' and option then return 'ERR syntax error' end
  if name == 'GETDEL' then return 'ERR Unknown Redis command called from script' end
end`)})
}

// Saying is what makes a script that it is put in front of find an INFO with these fields instead of the server's own,
// without those that are empty, and no OBJECT.
func Saying(fields map[string]string) (prologue string) {
	var b strings.Builder
	for name, value := range fields {
		line := ""
		if value != "" {
			line = name + ":" + value + `\r\n`
		}
		fmt.Fprintf(&b, `  reply = string.gsub(reply, '%s:[^\r]*\r\n', '%s')`+"\n", name, line)
	}
	return strings.ReplaceAll(`
local redis = (function(server)
  local own = {call = server.call, error_reply = server.error_reply, status_reply = server.status_reply}
  function own.pcall(name, ...)
    if name == 'OBJECT' then return {err = 'ERR unknown command OBJECT'} end
    local reply = server.pcall(name, ...)
    if name ~= 'INFO' or type(reply) ~= 'string' then return reply end
`+b.String()+`
    return reply
  end
  return own
end)(redis)
`, "\n", " ") + "\n"
}

// StartSaying starts a proxy to s that puts [Saying] in front of its scripts. It ends in the test's cleanup.
func StartSaying(tb testing.TB, s *Server, fields map[string]string) *Endpoint {
	return startEndpoint(tb, &Endpoint{addrs: []string{s.Addr()}, prologue: Saying(fields)})
}

// Reload loads into s all scripts that were loaded through the endpoint, as a server does whose snapshots contain
// scripts.
func (e *Endpoint) Reload(tb testing.TB, s *Server) {
	tb.Helper()
	e.mu.Lock()
	texts := slices.Clone(e.texts)
	e.mu.Unlock()
	for _, text := range texts {
		s.Do(tb, "SCRIPT", "LOAD", text)
	}
}

// StartOneAddress starts a proxy that makes a Cluster look like one server, as managed services do: each command goes
// to the master of its first key, and what that has of another is an error. slotOf is the hash slot of a key.
func StartOneAddress(tb testing.TB, c *Cluster, slotOf func(key string) uint16) *Endpoint {
	e := &Endpoint{}
	for _, s := range c.Servers() {
		e.addrs = append(e.addrs, s.Addr())
	}
	e.slot = func(key string) int { return int(slotOf(key)) * len(e.addrs) / clusterSlots }
	e.lenient.Store(true)
	return startEndpoint(tb, e)
}

// within is a prologue that has scripts call a redis of their own, which refuses what the function refused, which head
// defines, has an error for.
func within(head string) string {
	return strings.ReplaceAll(head+`
local redis = (function(server)
  local own = {}
  function own.pcall(name, ...)
    local why = refused(string.upper(name), ...)
    if why then return {err = why} end
    return server.pcall(name, ...)
  end
  function own.call(name, ...)
    local why = refused(string.upper(name), ...)
    if why then error({err = why}) end
    return server.call(name, ...)
  end
  own.error_reply, own.status_reply, own.sha1hex = server.error_reply, server.status_reply, server.sha1hex
  return own
end)(redis)
`, "\n", " ") + "\n"
}

func startEndpoint(tb testing.TB, e *Endpoint) *Endpoint {
	tb.Helper()
	e.names = map[string]string{}
	e.hub = startHub(tb, e.serve)
	return e
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
		text = e.prologue + script
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.names[sha(script)] = sha(text)
	e.texts = append(e.texts, text)
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
	e.mu.Lock()
	addrs := e.addrs
	e.mu.Unlock()
	var servers []net.Conn
	var replies []*bufio.Reader
	defer func() {
		for _, s := range servers {
			_ = s.Close()
		}
	}()
	for _, addr := range addrs {
		s, err := net.Dial("tcp", addr)
		if err != nil {
			return
		}
		servers, replies = append(servers, s), append(replies, bufio.NewReader(s))
	}
	var passing sync.WaitGroup
	defer passing.Wait()
	defer func() { _ = servers[0].Close() }()
	commands, subscribed := bufio.NewReader(client), false
	for {
		cmd, err := readCommand(commands)
		if err != nil || len(cmd) == 0 {
			return
		}
		to := e.change(cmd)
		if strings.HasSuffix(strings.ToUpper(cmd[0]), "SUBSCRIBE") && !subscribed { // what it receives now is no reply
			subscribed = true
			passing.Go(func() {
				_, _ = io.Copy(client, replies[0])
				_ = client.Close()
			})
		}
		var reply []byte
		for i, s := range servers {
			if to >= 0 && to != i || subscribed && i > 0 {
				continue
			}
			if _, err := s.Write(encode(cmd)); err != nil {
				return
			}
			if subscribed {
				continue
			}
			if reply, err = readReply(replies[i]); err != nil {
				return
			}
		}
		if len(servers) > 1 { // they do not say that they are members of a Cluster
			reply = bytes.Replace(reply, []byte("redis_mode:cluster"), []byte("redis_mode:sharded"), 1)
			reply = bytes.Replace(reply, []byte("\r\ncluster\r\n"), []byte("\r\nsharded\r\n"), 1)
		}
		if _, err := client.Write(reply); err != nil {
			return
		}
	}
}

// change changes the script of cmd, and returns which server cmd goes to, -1 for all.
func (e *Endpoint) change(cmd []string) (to int) {
	name := strings.ToUpper(cmd[0])
	key := 1
	switch {
	case name == "SCRIPT" && len(cmd) == 3 && strings.EqualFold(cmd[1], "LOAD"):
		cmd[2] = e.loaded(cmd[2])
		return -1
	case name == "SCRIPT":
		return -1
	case name == "EVAL" || name == "EVALSHA":
		if name == "EVAL" {
			cmd[1] = e.loaded(cmd[1])
		} else {
			cmd[1] = e.nameOf(cmd[1])
		}
		if key = 3; len(cmd) < 4 || cmd[2] == "0" {
			return 0
		}
	case name == "GET" || name == "SET" || name == "DEL" || name == "PTTL" || name == "EXISTS" || name == "MGET" ||
		name == "ZADD" || name == "HSET" || name == "EXPIRE" || name == "PEXPIRE" || name == "ZRANGEBYSCORE":
	default:
		return 0
	}
	if e.slot == nil {
		return 0
	}
	return e.slot(cmd[key])
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
