package redistest

import (
	"bytes"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// A Kind is how servers of another product, or a proxy before them, differ from redis-server: what they
// refuse, in their own words, and what their scripts see. [Kinds] has those that there are; an [Endpoint]
// makes a server look like one. The words are from the products' documentation and sources, and from issues
// of their users.
type Kind struct {
	Name string

	sharded    bool // it stands before the masters of a Cluster
	slotsOf    bool // and answers CLUSTER SLOTS: all are its own
	loadsOnOne bool // SCRIPT goes to one of several servers only

	// its answer by command, or command|subcommand, in lower case
	refused map[string]string
	// the answer to all that knows does not have; "": it is executed
	others   string
	knows    []string                                // in lower case
	script   func(text string, keys []string) string // why it refuses a script, with its keys; "": it does not
	info     map[string]string                       // what INFO and HELLO say otherwise: see [Saying]
	prologue string                                  // goes before each script
}

// IsSharded reports whether servers of the kind are several behind one address: an [Endpoint] is to stand
// before the masters of a Cluster.
func (k Kind) IsSharded() bool { return k.sharded }

// IsCluster reports whether clients are to take it for a Cluster.
func (k Kind) IsCluster() bool { return k.slotsOf }

// ShowsFailovers reports whether INFO says of a server that it was a replica meanwhile.
func (k Kind) ShowsFailovers() bool {
	_, hidden := k.info["master_replid2"]
	return !hidden
}

// KindNamed is the one of [Kinds] with that name.
func KindNamed(name string) (Kind, error) {
	var names []string
	for _, k := range Kinds {
		if k.Name == name {
			return k, nil
		}
		names = append(names, k.Name)
	}
	return Kind{}, fmt.Errorf("redistest: no kind %q: there are %s", name, strings.Join(names, ", "))
}

// Plain is redis-server itself.
var Plain = Kind{Name: "redis"}

// Kinds are those that are known.
var Kinds = []Kind{
	Plain,
	// Redis 6.0: ZADD has no LT, INFO has one section, and there is no GETDEL.
	{Name: "redis-6.0", prologue: within(`
local function refused(name, key, option)
  if name == 'ZADD' and option == 'LT' or name == 'INFO' and option then return 'ERR syntax error' end
  if name == 'GETDEL' then return 'ERR Unknown Redis command called from script' end
end`)},
	// Scripts may access only the keys that they declare: Dragonfly, and kvrocks with lua-strict-key-accessing.
	{Name: "declared-keys", prologue: declared},
	// Proxies of Aliyun and Tencent read the script: in it, each key is to be KEYS[n], and no variable.
	{Name: "literal-keys", refused: map[string]string{"client|setinfo": unknownSub("setinfo")}, script: literal},
	// SCRIPT is refused, EVALSHA and EVAL are executed.
	{Name: "no-script", refused: map[string]string{"script": unknownCommand("script")}},
	// There is EVAL alone.
	{Name: "eval-only", refused: map[string]string{
		"script": unknownCommand("script"), "evalsha": unknownCommand("evalsha"),
	}},
	// Before Redis 6, and proxies that do not know RESP3.
	{Name: "resp2", refused: map[string]string{"hello": unknownCommand("HELLO")}},
	// Managed services refuse what is their own to administer: here to everybody, and within scripts.
	{Name: "restricted", refused: map[string]string{
		"config": unknownCommand("config"), "client": unknownCommand("client"), "object": unknownCommand("object"),
		"acl": unknownCommand("acl"), "cluster": unknownCommand("cluster"),
	}, prologue: without("OBJECT", "CONFIG", "CLIENT")},
	// The same, and INFO as well.
	{Name: "no-info", refused: map[string]string{
		"info": noRight("info"), "object": noRight("object"), "config": noRight("config"),
	}, prologue: without("INFO", "OBJECT", "CONFIG")},
	// Dragonfly: declared keys, numbers as scores, an INFO without ids of processes and replication, no OBJECT.
	{Name: "dragonfly", refused: map[string]string{
		"object": unknownCommand("object"), "client|setinfo": unknownSub("setinfo"),
	}, info: map[string]string{
		"run_id": "", "master_replid": "", "master_replid2": "", "second_repl_offset": "", "redis_version": "7.4.0",
	}, prologue: declared + numbers},
	// kvrocks: declared keys, and an INFO that says 4.0.0.
	{Name: "kvrocks", refused: map[string]string{"object": unknownCommand("object")},
		info: map[string]string{"run_id": "", "redis_version": "4.0.0"}, prologue: declared},
	// KeyDB, active-active: each of two masters accepts writes.
	{Name: "keydb-active", info: map[string]string{"role": "active-replica"}},
	// Garnet, as it is when it is not told otherwise.
	{Name: "garnet-without-lua", refused: map[string]string{
		"script": garnetLua, "eval": garnetLua, "evalsha": garnetLua, "object": unknownCommand("object"),
	}},
	// Redis Enterprise, and Azure with that, with the policy "Enterprise": one endpoint over a cluster.
	{Name: "one-endpoint", sharded: true},
	// The same, and SCRIPT LOAD is executed by one of them.
	{Name: "one-endpoint-loads-on-one", sharded: true, loadsOnOne: true},
	// The proxy before a cluster of Aliyun, with script_check_enable 0: it does not read scripts, and looks at
	// their keys.
	{Name: "proxy-of-a-cluster", sharded: true, script: func(_ string, keys []string) string {
		return literal("", keys)
	}},
	// Envoy's Redis proxy over a Cluster.
	{Name: "envoy", sharded: true, refused: map[string]string{"hello": unknownCommand("HELLO")},
		others: "ERR unknown command", knows: []string{
			"auth", "ping", "echo", "quit", "time", "eval", "evalsha", "get", "set", "del", "exists", "mget", "mset",
			"pttl",
			"pexpire", "expire", "incrby", "hset", "hget", "hdel", "zadd", "zrem", "zrange", "zrangebyscore", "zscore",
		}},
	// twemproxy closes the connection for each command that it does not know.
	{Name: "twemproxy", others: Hangup, knows: []string{
		"auth", "ping", "quit", "eval", "evalsha", "get", "set", "del", "exists", "mget", "pttl", "pexpire",
		"expire", "incrby", "hset", "hget", "hdel", "zadd", "zrem", "zrange", "zrangebyscore", "zscore",
	}},
	// ElastiCache Serverless, to a client of a Cluster: one endpoint has all slots.
	{Name: "serverless", sharded: true, slotsOf: true, refused: map[string]string{
		"config": unknownCommand("config"), "object": unknownCommand("object"), "select": unknownCommand("select"),
	}, prologue: without("OBJECT", "CONFIG")},
}

// before is what goes before each script.
func (k Kind) before() string {
	if len(k.info) == 0 {
		return k.prologue
	}
	return Saying(k.info) + k.prologue
}

// rewrite changes what a server says of itself in its answer to cmd.
func (k Kind) rewrite(cmd []string, reply []byte) []byte {
	switch name := strings.ToUpper(cmd[0]); {
	case len(k.info) == 0:
	case name == "HELLO":
		if k.info["redis_version"] != "" { // it does not say
			reply = bytes.Replace(reply, []byte("$7\r\nversion\r\n"), []byte("$7\r\nrelease\r\n"), 1)
		}
		if role := k.info["role"]; role != "" {
			reply = bytes.Replace(reply, []byte("$6\r\nmaster\r\n"),
				fmt.Appendf(nil, "$%d\r\n%s\r\n", len(role), role), 1)
		}
	case name == "INFO":
		head, text, isText := strings.Cut(string(reply), "\r\n")
		if !isText || !strings.HasPrefix(head, "$") && !strings.HasPrefix(head, "=") {
			break
		}
		for name, value := range k.info {
			line := ""
			if value != "" {
				line = "\n" + name + ":" + value + "\r"
			}
			text = regexp.MustCompile("\n"+name+":[^\r]*\r").ReplaceAllString(text, line)
		}
		return fmt.Appendf(nil, "%s%d\r\n%s", head[:1], len(text)-len("\r\n"), text)
	}
	return reply
}

// refuses returns the answer of the kind to cmd, if it does not execute it; else "".
func (k Kind) refuses(cmd []string) string {
	name, sub := strings.ToLower(cmd[0]), ""
	if len(cmd) > 1 {
		sub = name + "|" + strings.ToLower(cmd[1])
	}
	for _, of := range []string{sub, name} {
		if why := k.refused[of]; why != "" {
			return errorReply(why)
		}
	}
	switch {
	case k.others != "" && !slices.Contains(k.knows, name):
		return errorReply(k.others + " '" + cmd[0] + "'")
	case k.script != nil && len(cmd) > 2 && sub == "script|load":
		return errorReply(k.script(cmd[2], nil))
	case k.script != nil && len(cmd) > 2 && (name == "eval" || name == "evalsha"):
		text, n := "", 0
		if name == "eval" {
			text = cmd[1]
		}
		_, _ = fmt.Sscan(cmd[2], &n)
		return errorReply(k.script(text, cmd[3:min(len(cmd), 3+n)]))
	}
	return ""
}

// errorReply is the reply for an error, "" for none, and [Hangup] for what begins with that.
func errorReply(why string) string {
	if why == "" || strings.HasPrefix(why, Hangup) {
		return why[:min(len(why), len(Hangup))]
	}
	return "-" + why + "\r\n"
}

func unknownCommand(name string) string {
	return "ERR unknown command '" + name + "', with args beginning with: "
}

func unknownSub(name string) string { return "ERR unknown subcommand '" + name + "'." }

func noRight(name string) string {
	return "NOPERM User app has no permissions to run the '" + name + "' command"
}

const garnetLua = "ERR Garnet Lua scripting is disabled. To enable, set the --lua startup flag."

// The words of Aliyun.
const (
	literalKeys = "ERR bad lua script for redis cluster, all the keys that the script uses should be passed " +
		"using the KEYS array"
	literalCommand = "ERR bad lua script for redis cluster, first parameter of redis.call/redis.pcall must be " +
		"a single literal string"
	literalSlots = "ERR eval/evalsha command keys must be in same slot"
)

var calls = regexp.MustCompile(`redis\.p?call\(\s*([^,)]*),?\s*([^,)]*),?\s*([^,)]*)`)

// literal refuses scripts that name a key otherwise than by KEYS[n], or a command otherwise than by its name.
// Keys of two hash slots are refused too.
func literal(text string, keys []string) string {
	for _, key := range keys {
		if slotOf(key) != slotOf(keys[0]) {
			return literalSlots
		}
	}
	for _, call := range calls.FindAllStringSubmatch(text, -1) {
		name, key := strings.Trim(call[1], `'"`), call[2]
		switch name {
		case call[1]:
			return literalCommand
		case "TIME", "INFO", "PUBLISH", "SPUBLISH":
			continue
		case "OBJECT":
			key = call[3]
		}
		if !strings.HasPrefix(key, "KEYS[") {
			return literalKeys
		}
	}
	return ""
}

// declared is a prologue by which scripts may access only the keys that they declare, in the words of
// Dragonfly.
var declared = within(`
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
end`)

// without is a prologue by which scripts do not find these commands.
func without(names ...string) string {
	return within(`
local function refused(name)
  if string.find(' ` + strings.Join(names, " ") + ` ', ' ' .. name .. ' ', 1, true) then
    return 'ERR Unknown Redis command called from script'
  end
end`)
}

// Apart is a kind whose servers are one of several: scripts whose first key contains part may not access key,
// which is elsewhere.
func Apart(key, part string) Kind {
	return Kind{Name: "apart", prologue: within(`
local function refused(_, first, second)
  local is, elsewhere = KEYS[1] or '', '` + key + `'
  if is ~= elsewhere and string.find(is, '` + part + `', 1, true) and
    (first == elsewhere or second == elsewhere) then
    return 'ERR Script attempted to access keys that do not hash to the same slot'
  end
end`)}
}

// WithInfo is a kind whose scripts find these fields in INFO: see [Saying].
func WithInfo(fields map[string]string) Kind {
	return Kind{Name: "with-info", info: fields}
}

// Saying is what makes a script that it is put in front of find an INFO with these fields instead of the
// server's own, without those that are empty, and no OBJECT.
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

// numbers is a prologue by which scripts find numbers as scores, as those of Dragonfly do.
var numbers = strings.ReplaceAll(`
local redis = (function(server)
  local own = {call = server.call, error_reply = server.error_reply, status_reply = server.status_reply}
  function own.pcall(name, ...)
    local reply = server.pcall(name, ...)
    if name == 'ZSCORE' and type(reply) == 'string' then return tonumber(reply) end
    local args = {...}
    if type(reply) == 'table' and args[#args] == 'WITHSCORES' then
      for i = 2, #reply, 2 do reply[i] = tonumber(reply[i]) end
    end
    return reply
  end
  return own
end)(redis)
`, "\n", " ") + "\n"

// within is a prologue that has scripts call a redis of their own, which refuses what the function refused,
// which head defines, has an error for.
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
