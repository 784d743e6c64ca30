package sim

import (
	"fmt"
	"maps"
	"slices"
	"sort"
	"strconv"
	"strings"
)

// A store is a server's data: strings, sorted sets and hashes, with times to live on the
// server's own clock. Commands answer as Redis does, errors included, as far as the lock
// scripts can tell.
type store struct {
	now  func() int64 // the server's clock in microseconds
	keys map[string]*value
}

// value is what a key holds: a string, a sorted set in order, or a hash.
type value struct {
	text    string
	members []member          // nil: it is no sorted set
	fields  map[string]string // nil: it is no hash
	due     int64             // when it expires, in milliseconds; 0: never
	old     bool              // a restart has brought it back from the disk
	raw     bool              // it was appended to, and not read from a disk since
}

type member struct {
	name  string
	score float64
}

func newStore(now func() int64) *store { return &store{now: now, keys: map[string]*value{}} }

// copy is a store that remembers the same.
func (s *store) copy() map[string]*value {
	keys := maps.Clone(s.keys)
	for k, v := range keys {
		same := *v
		same.members, same.fields = slices.Clone(v.members), maps.Clone(v.fields)
		keys[k] = &same
	}
	return keys
}

// Replies are the results of commands in scripts: int64, string, nil, status, failure, []any.
type (
	status  string
	failure string
)

const (
	wrongType = failure("WRONGTYPE Operation against a key holding the wrong kind of value")
	notAnInt  = failure("ERR value is not an integer or out of range")
	syntax    = failure("ERR syntax error")
)

func (s *store) millis() int64 { return s.now() / 1000 }

// find is the key's value, nil if there is none (any more). A key lives for its ttl and not
// a whole millisecond longer, as in Redis.
func (s *store) find(key string) *value {
	v := s.keys[key]
	if v != nil && v.due != 0 && s.millis() > v.due {
		delete(s.keys, key)
		return nil
	}
	return v
}

func (v *value) isString() bool { return v.members == nil && v.fields == nil }

// sorted finds a sorted set. It says no if the key holds something else.
func (s *store) sorted(key string) (*value, bool) {
	v := s.find(key)
	return v, v == nil || v.members != nil
}

// hash finds a hash. It says no if the key holds something else.
func (s *store) hash(key string) (*value, bool) {
	v := s.find(key)
	return v, v == nil || v.fields != nil
}

// call executes a command.
func (s *store) call(args []string) any {
	if len(args) == 0 {
		return failure("ERR Please specify at least one argument for this redis.call() call")
	}
	name := strings.ToUpper(args[0])
	c, known := commands[name]
	if !known {
		return failure(fmt.Sprintf("ERR unknown command '%s'", args[0]))
	}
	if len(args) <= c.args {
		return failure(fmt.Sprintf("ERR wrong number of arguments for '%s' command", strings.ToLower(name)))
	}
	return c.do(s, args[1:])
}

// commands are those of a store, with the least number of arguments of each.
var commands = map[string]struct {
	args int
	do   func(*store, []string) any
}{
	"GET":     {1, (*store).get},
	"SET":     {2, (*store).set},
	"APPEND":  {2, (*store).append},
	"OBJECT":  {2, (*store).object},
	"DEL":     {1, (*store).del},
	"EXISTS":  {1, (*store).exists},
	"INCRBY":  {2, (*store).incrBy},
	"PTTL":    {1, (*store).pttl},
	"PEXPIRE": {2, (*store).pexpire},
	"TIME":    {0, (*store).time},
	"ZADD":    {3, (*store).zadd},
	"ZREM":    {2, (*store).zrem},
	"ZSCORE":  {2, (*store).zscore},
	"ZRANGE":  {3, (*store).zrange},
	"HSET":    {3, (*store).hset},
	"HGET":    {2, (*store).hget},
	"HDEL":    {2, (*store).hdel},
}

func (s *store) get(a []string) any {
	switch v := s.find(a[0]); {
	case v == nil:
		return nil
	case !v.isString():
		return wrongType
	default:
		return v.text
	}
}

func (s *store) set(a []string) any {
	v := &value{text: a[1]}
	there := s.find(a[0]) != nil
	for i := 2; i < len(a); i++ {
		switch strings.ToUpper(a[i]) {
		case "NX":
			if there {
				return nil
			}
		case "XX":
			if !there {
				return nil
			}
		case "PX":
			i++
			if i >= len(a) {
				return syntax
			}
			ms, err := strconv.ParseInt(a[i], 10, 64)
			if err != nil {
				return notAnInt
			}
			if ms <= 0 {
				return failure("ERR invalid expire time in 'set' command")
			}
			v.due = s.millis() + ms
		default:
			return syntax
		}
	}
	s.keys[a[0]] = v
	return status("OK")
}

func (s *store) append(a []string) any {
	v, there := s.find(a[0]), true
	if v == nil {
		v, there = &value{}, false
		s.keys[a[0]] = v
	}
	if !v.isString() {
		return wrongType
	}
	v.text, v.raw = v.text+a[1], there
	return int64(len(v.text))
}

// object knows the encodings.
func (s *store) object(a []string) any {
	v := s.find(a[1])
	switch {
	case !strings.EqualFold(a[0], "ENCODING"):
		return failure("ERR unknown subcommand")
	case v == nil:
		return nil
	case !v.isString():
		return "listpack"
	case v.raw:
		return "raw"
	}
	if n, err := strconv.ParseInt(v.text, 10, 64); err == nil && strconv.FormatInt(n, 10) == v.text {
		return "int"
	}
	if len(v.text) > 44 {
		return "raw"
	}
	return "embstr"
}

func (s *store) del(a []string) any {
	n := int64(0)
	for _, k := range a {
		if s.find(k) != nil {
			delete(s.keys, k)
			n++
		}
	}
	return n
}

func (s *store) exists(a []string) any {
	n := int64(0)
	for _, k := range a {
		if s.find(k) != nil {
			n++
		}
	}
	return n
}

func (s *store) incrBy(a []string) any {
	by, err := strconv.ParseInt(a[1], 10, 64)
	if err != nil {
		return notAnInt
	}
	v := s.find(a[0])
	if v == nil {
		v = &value{text: "0"}
	}
	if !v.isString() {
		return wrongType
	}
	n, err := strconv.ParseInt(v.text, 10, 64)
	if err != nil {
		return notAnInt
	}
	v.text, v.raw = strconv.FormatInt(n+by, 10), false
	s.keys[a[0]] = v
	return n + by
}

func (s *store) pttl(a []string) any {
	switch v := s.find(a[0]); {
	case v == nil:
		return int64(-2)
	case v.due == 0:
		return int64(-1)
	default:
		return v.due - s.millis()
	}
}

func (s *store) pexpire(a []string) any {
	ms, err := strconv.ParseInt(a[1], 10, 64)
	if err != nil {
		return notAnInt
	}
	v := s.find(a[0])
	switch {
	case v == nil:
		return int64(0)
	case ms <= 0:
		delete(s.keys, a[0])
	default:
		v.due = s.millis() + ms
	}
	return int64(1)
}

func (s *store) time([]string) any {
	now := s.now()
	return []any{strconv.FormatInt(now/1e6, 10), strconv.FormatInt(now%1e6, 10)}
}

// zadd knows the option XX, and one member.
func (s *store) zadd(a []string) any {
	key, a := a[0], a[1:]
	xx := strings.EqualFold(a[0], "XX")
	if xx {
		a = a[1:]
	}
	if len(a) != 2 {
		return syntax
	}
	score, err := strconv.ParseFloat(a[0], 64)
	if err != nil {
		return failure("ERR value is not a valid float")
	}
	v, ok := s.sorted(key)
	if !ok {
		return wrongType
	}
	at := -1
	if v != nil {
		at = slices.IndexFunc(v.members, func(m member) bool { return m.name == a[1] })
	}
	switch {
	case at < 0 && xx:
		return int64(0)
	case at >= 0:
		v.members[at].score = score
	default:
		if v == nil {
			v = &value{}
			s.keys[key] = v
		}
		v.members = append(v.members, member{a[1], score})
	}
	sort.Slice(v.members, func(i, j int) bool {
		x, y := v.members[i], v.members[j]
		return x.score < y.score || x.score == y.score && x.name < y.name
	})
	if at < 0 {
		return int64(1)
	}
	return int64(0)
}

func (s *store) zrem(a []string) any {
	v, ok := s.sorted(a[0])
	if !ok {
		return wrongType
	}
	if v == nil {
		return int64(0)
	}
	before := len(v.members)
	v.members = slices.DeleteFunc(v.members, func(m member) bool { return slices.Contains(a[1:], m.name) })
	if len(v.members) == 0 {
		delete(s.keys, a[0])
	}
	return int64(before - len(v.members))
}

func (s *store) zscore(a []string) any {
	v, ok := s.sorted(a[0])
	if !ok {
		return wrongType
	}
	if v == nil {
		return nil
	}
	for _, m := range v.members {
		if m.name == a[1] {
			return m.text()
		}
	}
	return nil
}

func (m member) text() string { return strconv.FormatFloat(m.score, 'f', -1, 64) }

// zrange knows the option WITHSCORES.
func (s *store) zrange(a []string) any {
	first, err1 := strconv.Atoi(a[1])
	last, err2 := strconv.Atoi(a[2])
	if err1 != nil || err2 != nil {
		return notAnInt
	}
	v, ok := s.sorted(a[0])
	if !ok {
		return wrongType
	}
	found := []any{}
	if v == nil {
		return found
	}
	if first < 0 {
		first += len(v.members)
	}
	if last < 0 {
		last += len(v.members)
	}
	for i := max(first, 0); i <= last && i < len(v.members); i++ {
		found = append(found, v.members[i].name)
		if len(a) > 3 {
			found = append(found, v.members[i].text())
		}
	}
	return found
}

// hset knows one field.
func (s *store) hset(a []string) any {
	v, ok := s.hash(a[0])
	if !ok {
		return wrongType
	}
	if v == nil {
		v = &value{fields: map[string]string{}}
		s.keys[a[0]] = v
	}
	_, there := v.fields[a[1]]
	v.fields[a[1]] = a[2]
	if there {
		return int64(0)
	}
	return int64(1)
}

func (s *store) hget(a []string) any {
	v, ok := s.hash(a[0])
	if !ok {
		return wrongType
	}
	if v != nil {
		if text, there := v.fields[a[1]]; there {
			return text
		}
	}
	return nil
}

func (s *store) hdel(a []string) any {
	v, ok := s.hash(a[0])
	if !ok {
		return wrongType
	}
	if v == nil {
		return int64(0)
	}
	before := len(v.fields)
	for _, field := range a[1:] {
		delete(v.fields, field)
	}
	if len(v.fields) == 0 {
		delete(s.keys, a[0])
	}
	return int64(before - len(v.fields))
}
