package sim

import (
	"bytes"
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/flightlock/flightlock/lua"
)

// A server is one Redis process on a machine of its own, with a clock of its own.
type server struct {
	w    *world
	id   int
	addr string

	up      bool
	stopped bool    // as by SIGSTOP: the kernel receives data, nobody reads it
	unread  []*conn // with something that came meanwhile
	loading bool    // answers everything with LOADING
	refuses bool    // writes, as a master that lacks replicas

	conns   []*conn // in the order in which they were made
	scripts map[string]string
	started int             // how many processes there were
	run     int             // the one that is there
	second  int64           // of its clock in which that began
	rises   int             // how often it was made a master, after it was a replica
	freed   map[string]bool // owners that a release has found here
	*store
	saved map[string]*value // the data on disk, as of some time ago

	// Its clock: base at since, and rate from there on.
	base  int64
	since time.Duration
	rate  float64
}

func newServer(w *world, id int) *server {
	s := &server{w: w, id: id, addr: fmt.Sprintf("10.0.0.%d:6379", id+1), up: true, scripts: map[string]string{},
		freed: map[string]bool{}, rate: 1}
	s.base = w.began.UnixMicro() + w.plan.offsets[id].Microseconds()
	s.rate = w.plan.rates[id]
	s.store, s.second = newStore(s.micros), s.micros()/1e6-10
	s.saved = s.copy()
	return s
}

func (s *server) String() string { return "n" + strconv.Itoa(s.id) }

// micros is the server's clock.
func (s *server) micros() int64 {
	return s.base + int64(float64((s.w.now()-s.since).Nanoseconds())*s.rate/1000)
}

// jump sets the clock by so much.
func (s *server) jump(d time.Duration) {
	s.base, s.since = s.micros()+d.Microseconds(), s.w.now()
}

// receive receives data of a connection.
func (s *server) receive(k *conn, data []byte) {
	if !k.open {
		if !k.late { // the machine answers with a reset
			s.w.passDown(k, k.delay(), func() { k.gone(); k.fail(errReset) })
		}
		return
	}
	k.input = append(k.input, data...)
	s.read(k)
}

// end receives the end of a connection's data.
func (s *server) end(k *conn) {
	k.ended = true
	s.read(k)
}

// read executes the received commands.
func (s *server) read(k *conn) {
	if s.stopped {
		s.unread = append(s.unread, k)
		return
	}
	for k.open {
		args, rest, ok := readCommand(k.input)
		if !ok {
			break
		}
		k.input = rest
		s.answer(k, s.execute(k, args))
	}
	if k.ended {
		s.drop(k)
	}
}

// drop removes a connection.
func (s *server) drop(k *conn) {
	k.open = false
	s.conns = slices.DeleteFunc(s.conns, func(c *conn) bool { return c == k })
}

// takeCopy executes the scripts in data once more. The answers are dropped.
func (s *server) takeCopy(k *conn, data []byte) {
	if !s.up || s.stopped || s.w.link(k.client.id, s.id).up {
		return
	}
	for {
		args, rest, ok := readCommand(data)
		if !ok {
			return
		}
		if data = rest; strings.EqualFold(args[0], "EVALSHA") {
			s.w.logf("copy   %v", k)
			s.execute(k, args)
		}
	}
}

// answer sends a reply.
func (s *server) answer(k *conn, text []byte) {
	s.w.passDown(k, k.delay(), func() { k.deliver(text) })
}

// execute answers a command.
func (s *server) execute(k *conn, args []string) []byte {
	name := strings.ToUpper(args[0])
	if s.loading && name != "HELLO" {
		return encode(failure("LOADING Redis is loading the dataset in memory"))
	}
	switch name {
	case "HELLO":
		proto := int64(2)
		if k.pushes = len(args) > 1 && args[1] == "3"; k.pushes {
			proto = 3
		}
		text := encode([]any{"server", "redis", "version", "7.0.15", "proto", proto, "id", int64(1), "mode",
			"standalone", "role", "master"})
		if k.pushes { // a map of half as many
			text = slices.Concat([]byte("%6"), text[len("*12"):])
		}
		return text
	case "PING":
		if len(args) > 1 {
			return encode(args[1])
		}
		return encode(status("PONG"))
	case "CLIENT", "SELECT":
		return encode(status("OK"))
	case "SCRIPT":
		return encode(s.script(args[1:]))
	case "EVALSHA":
		return encode(s.eval(k, args[1:]))
	case "SUBSCRIBE", "UNSUBSCRIBE":
		if !k.pushes {
			s.w.checker.violation("%v subscribes without RESP3", k)
		}
		return s.subscribe(k, strings.ToLower(name), args[1:])
	}
	v := s.command(args)
	s.w.logf("%v %s = %s", k, short(strings.Join(args, " ")), text(v))
	return encode(v)
}

func (s *server) script(args []string) any {
	switch strings.ToUpper(args[0]) {
	case "LOAD":
		sum := sha1.Sum([]byte(args[1]))
		sha := hex.EncodeToString(sum[:])
		s.scripts[sha] = args[1]
		s.w.logf("%v loads %s", s, scriptName(args[1]))
		return sha
	case "FLUSH":
		clear(s.scripts)
		return status("OK")
	}
	return failure("ERR unknown subcommand")
}

func (s *server) eval(k *conn, args []string) any {
	source, known := s.scripts[args[0]]
	n, err := strconv.Atoi(args[1])
	switch {
	case !known:
		s.w.logf("%v does not know script %s", k, args[0][:8])
		return failure("NOSCRIPT No matching script. Please use EVAL.")
	case err != nil || n < 0 || n > len(args)-2:
		return failure("ERR Number of keys can't be greater than number of args")
	}
	if err := s.w.plan.lua.compile(source); err != nil {
		return failure("ERR Error compiling script: " + err.Error())
	}
	name, keys := scriptName(source), args[2:2+n]
	command := func(args []string) any {
		if strings.EqualFold(args[0], "PUBLISH") && k.client.isMute() {
			return failure("NOPERM this user has no permissions to run the 'publish' command")
		}
		for _, key := range keysOf(args) {
			if !slices.Contains(keys, key) {
				s.w.checker.violation("%s accesses %q by %s, and declares %q", name, key, args[0], keys)
			}
		}
		return s.command(args)
	}
	v := s.w.plan.lua.run(source, keys, args[2+n:], command)
	s.w.scripts++
	if deleted, is := v.(int64); is && deleted > 0 {
		switch name {
		case "release":
			s.freed[args[2+n+3]] = true // behind the node's epoch
		case "done":
			s.freed[args[2+n]] = true
		}
	}
	if s.w.traced {
		s.w.logf("%v %s %s = %s", k, name, short(strings.Join(args[2:], " ")), text(v))
	}
	return v
}

// keysOf are the keys that a command of a script accesses.
func keysOf(args []string) []string {
	switch strings.ToUpper(args[0]) {
	case "TIME", "INFO", "PUBLISH":
		return nil
	case "DEL", "EXISTS":
		return args[1:]
	case "OBJECT":
		return args[2:]
	}
	return args[1:2]
}

// command is a command by itself or of a script.
func (s *server) command(args []string) any {
	name := strings.ToUpper(args[0])
	if s.refuses && writes[name] {
		return failure("NOREPLICAS Not enough good replicas to write.")
	}
	switch name {
	case "PUBLISH":
		return s.publish(args[1], args[2])
	case "INFO":
		if s.w.now() < s.w.plan.informed {
			return failure("NOPERM this user has no permissions to run the 'info' command")
		}
		from, offset := strings.Repeat("0", 40), -1
		if s.rises > 0 {
			from, offset = s.digest(fmt.Sprint("rise", s.run), s.rises), 1
		}
		now := s.micros()
		return fmt.Sprintf("redis_version:7.0.15\r\nrun_id:%s\r\nserver_time_usec:%d\r\nuptime_in_seconds:%d\r\n"+
			"role:master\r\nmaster_replid2:%s\r\nsecond_repl_offset:%d\r\n",
			s.digest("run", s.run), now, now/1e6-s.second, from, offset)
	case "FLUSHALL":
		clear(s.keys)
		return status("OK")
	}
	return s.call(args)
}

// writes are the commands that a server refuses which lacks replicas.
var writes = map[string]bool{
	"SET": true, "APPEND": true, "DEL": true, "INCRBY": true, "PEXPIRE": true,
	"ZADD": true, "ZREM": true, "HSET": true, "HDEL": true, "FLUSHALL": true,
}

// deploy makes s a node whose epoch is established.
func (s *server) deploy() {
	if err := s.w.plan.lua.compile(lua.Boot.Source); err != nil {
		panic(err)
	}
	for range 2 {
		name := fmt.Sprint("deployed-", s.id)
		s.w.plan.lua.run(lua.Boot.Source, []string{lua.Marker, lua.Past}, []string{name, "1000000", name, "0", ""},
			s.command)
	}
}

// digest is an id that the server has after so many events of that kind.
func (s *server) digest(kind string, n int) string {
	sum := sha1.Sum(fmt.Appendf(nil, "%d %d %s %d", s.w.plan.seed, s.id, kind, n))
	return hex.EncodeToString(sum[:])
}

func (s *server) publish(channel, message string) any {
	n := int64(0)
	for _, k := range s.conns {
		if k.channels[channel] {
			n++
			text := push("message", channel, message)
			s.w.passDown(k, k.delay(), func() {
				s.w.checker.arrives(k, message)
				k.deliver(text)
			})
		}
	}
	return n
}

func (s *server) subscribe(k *conn, verb string, channels []string) (out []byte) {
	for _, ch := range channels {
		if k.channels == nil {
			k.channels = map[string]bool{}
		}
		if verb == "subscribe" && k.client.isDeaf(s) {
			out = append(out, encode(failure("NOPERM No permissions to access a channel"))...)
			continue
		}
		if verb == "subscribe" {
			k.channels[ch] = true
		} else {
			delete(k.channels, ch)
		}
		s.w.logf("%v %s %s", k, verb, ch)
		out = append(out, push(verb, ch, int64(len(k.channels)))...)
	}
	return out
}

// Faults of a server.

// stop is SIGSTOP, and resume is SIGCONT: what came meanwhile is read then, connection by
// connection in no particular order.
func (s *server) stop(on bool) {
	if s.stopped == on || !s.up {
		return
	}
	s.w.logf("FAULT  %v stopped=%v", s, on)
	s.stopped = on
	if !on {
		unread := s.unread
		s.unread = nil
		s.w.net.Shuffle(len(unread), func(i, j int) { unread[i], unread[j] = unread[j], unread[i] })
		for i, k := range unread {
			s.w.after(time.Duration(i+1)*time.Microsecond, func() { s.read(k) })
		}
	}
}

// crash ends the process: its connections are reset, what is in the buffers of its
// machine is lost.
func (s *server) crash() {
	if !s.up {
		return
	}
	s.w.logf("FAULT  %v crashes", s)
	s.up, s.stopped, s.loading, s.refuses, s.unread = false, false, false, false, nil
	for _, k := range s.conns {
		k.open = false
		s.w.passDown(k, k.delay(), func() { k.gone(); k.fail(errReset) })
	}
	s.conns = nil
}

// memory is what a restarted server still has.
type memory uint8

const (
	everything memory = iota
	something         // the data on disk as of some time ago
	nothing
)

func (m memory) String() string { return [...]string{"everything", "something", "nothing"}[m] }

// restart starts the process again.
func (s *server) restart(m memory) {
	if s.up {
		return
	}
	s.w.logf("FAULT  %v restarts, remembers %v", s, m)
	s.up = true
	s.started++
	s.run, s.rises, s.second = s.started, 0, s.micros()/1e6
	clear(s.scripts)
	switch m {
	case something:
		s.keys = s.saved
		s.noteAge()
		s.saved = s.copy()
	case nothing:
		s.keys = map[string]*value{}
	}
	for _, v := range s.keys {
		v.raw = v.raw && s.w.plan.appendOnly
	}
}

// refuseWrites has the server refuse writes for a while.
func (s *server) refuseWrites(lasts time.Duration) {
	if !s.up || lasts == 0 {
		return
	}
	s.w.logf("FAULT  %v refuses writes for %v", s, lasts)
	s.refuses = true
	s.w.after(lasts, func() { s.refuses = false })
}

// noteAge notes that the server's data are as of some time ago.
func (s *server) noteAge() {
	for _, v := range s.keys {
		v.old = true
	}
}

// giveWay has a replica, which is in step or lags, take the process's place for a while. Then
// the process is made the master again, and knows its scripts, but nothing of what its successor
// received; if that one lagged, it has read its data as it was then from a dump. refuses is how long
// each of them refuses writes at first.
func (s *server) giveWay(m memory, lasts, refuses time.Duration) {
	if !s.up {
		return
	}
	s.w.logf("FAULT  %v gives way to a replica", s)
	scripts, run, second, rises, keys := maps.Clone(s.scripts), s.run, s.second, s.rises, s.copy()
	s.crash()
	if s.restart(m); m != everything {
		keys = s.copy()
	}
	s.rises++
	s.refuseWrites(refuses)
	s.w.after(lasts, func() {
		if s.w.healed { // the successor stays
			return
		}
		s.w.logf("FAULT  %v is back in its place", s)
		s.crash()
		s.up, s.scripts, s.run, s.second, s.rises, s.keys = true, scripts, run, second, rises+1, keys
		s.noteAge()
		s.refuseWrites(refuses)
	})
}

// Text of all sorts.

// readCommand takes the first command off data.
func readCommand(data []byte) (args []string, rest []byte, ok bool) {
	n, rest, ok := readLength(data, '*')
	if !ok {
		return nil, nil, false
	}
	for range n {
		var size int
		if size, rest, ok = readLength(rest, '$'); !ok || len(rest) < size+2 {
			return nil, nil, false
		}
		args = append(args, string(rest[:size]))
		rest = rest[size+2:]
	}
	return args, rest, len(args) > 0
}

func readLength(data []byte, kind byte) (n int, rest []byte, ok bool) {
	end := bytes.Index(data, []byte("\r\n"))
	if end < 1 || data[0] != kind {
		return 0, nil, false
	}
	n, err := strconv.Atoi(string(data[1:end]))
	return n, data[end+2:], err == nil
}

func encode(v any) []byte {
	switch v := v.(type) {
	case nil:
		return []byte("$-1\r\n")
	case int64:
		return fmt.Appendf(nil, ":%d\r\n", v)
	case string:
		return fmt.Appendf(nil, "$%d\r\n%s\r\n", len(v), v)
	case status:
		return fmt.Appendf(nil, "+%s\r\n", v)
	case failure:
		return fmt.Appendf(nil, "-%s\r\n", v)
	}
	out := fmt.Appendf(nil, "*%d\r\n", len(v.([]any)))
	for _, e := range v.([]any) {
		out = append(out, encode(e)...)
	}
	return out
}

// push is a message of RESP3.
func push(items ...any) []byte {
	text := encode(items)
	text[0] = '>'
	return text
}

// text is a reply for people.
func text(v any) string {
	switch v := v.(type) {
	case nil:
		return "nil"
	case failure:
		return "error " + short(string(v))
	case []any:
		var parts []string
		for _, e := range v {
			parts = append(parts, text(e))
		}
		return "{" + strings.Join(parts, ", ") + "}"
	case string:
		return short(v)
	}
	return fmt.Sprint(v)
}

// scriptName is the name of a script, by the line that says it to operators: see package lua.
func scriptName(source string) string {
	if m := nameLine.FindStringSubmatch(source); m != nil {
		return m[1]
	}
	return "?"
}

var nameLine = regexp.MustCompile(`(?m)^-- flightlock, lua/(?:leave\.lua, )?(\w+)\.lua$`)

// sortedKeys are a server's keys, in order.
func (s *server) sortedKeys() []string { return slices.Sorted(maps.Keys(s.keys)) }
