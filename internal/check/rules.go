package check

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/redis/go-redis/v9"
)

// target is a server that is judged.
type target struct {
	*Config
	serverInfo
	i      int           // of its node
	middle time.Duration // the median of the nodes' clock offsets

	unguarded string // a node whose scripts may not access keys of two hash slots; "": there is none
}

// rule is a check that is made on every server. judge returns the status, what was found, and the
// fix.
type rule struct {
	name, why string
	judge     func(target) Finding
}

var rules = []rule{
	{"reachable", "a node that answers later than NodeTimeout has no vote", judgeReachable},
	{"version",
		"the scripts need Redis 6.0 or Valkey 7.2, and notices of release on a Cluster need sharded pub/sub (7.0)",
		judgeVersion},
	{"role",
		"only a master can grant a lock; a replica refuses to write, and one member of a Cluster has only some " +
			"of the keys",
		judgeRole},
	{"eviction", "a lock that is evicted is granted again while its holder works", judgeEviction},
	{"persistence", "a server that loses its locks when it restarts grants them again while their holders work",
		judgePersistence},
	{"quarantine",
		"a node that lost data grants again what it had granted; " +
			"in quarantine its votes do not count until those locks have ended",
		judgeQuarantine},
	{"clock offset",
		"fencing tokens continue from the clocks when all nodes have lost their data, so the clocks should " +
			"agree; a clock that is set instead of slewed changes when locks expire",
		judgeOffset},
	{"clock drift",
		"validity is counted by our clock and expiry by the node's; DriftFactor is how far they may run apart",
		judgeDrift},
	{"script rights", "acquire, refresh and release are scripts", judgeScripts},
	{"kind", "docs/servers.md has a row for each kind of server: how to connect, what works, what does not",
		judgeKind},
	{"pubsub rights", "without notices of release waiters poll: slower, and more commands; never less safe",
		judgePubSub},
}

// The commands that a user needs for locking, and those that a Cluster needs in addition.
// docs/operations.md gives the reasons. They are quoted for a shell, to which | is a pipe.
const (
	lockCommands = "+evalsha '+script|load' +set +get +del +pttl +pexpire +incrby +exists " +
		"+zadd +zrem +zrange +zscore +hset +hget +hdel +time +ping +publish +subscribe +unsubscribe " +
		"'+client|setname'"
	clusterCommands = " +spublish +ssubscribe +sunsubscribe '+cluster|slots' +asking"
)

func ok(format string, args ...any) Finding {
	return Finding{Status: OK, Found: fmt.Sprintf(format, args...)}
}

func unknown(format string, args ...any) Finding {
	return Finding{Status: Unknown, Found: fmt.Sprintf(format, args...)}
}

func judgeReachable(t target) Finding {
	refused := t.Nodes[t.i].LoginRefused(t.Addr)
	switch {
	case conn.HasCode(refused, "NOPERM"): // to a command of the login, such as SELECT: no ACL can forbid HELLO
		return Finding{Status: Fail, Found: refused.Error(), Fix: t.grant()}
	case refused != nil:
		return doesNotServe(t.command(t.i, t.Addr), refused)
	case conn.HasCode(t.HelloErr, "NOPERM"):
		return Finding{Status: Fail, Found: conn.LoginRefused(t.HelloErr).Error(), Fix: t.grant()}
	}
	rtt, limit := t.RTT, t.NodeTimeout
	f := ok("answers in %v", rtt.Round(time.Microsecond))
	if rtt > limit/2 {
		f.Status = Warn
		f.Found += fmt.Sprintf(", and NodeTimeout is %v", limit)
		if rtt > limit {
			f.Status = Fail
			f.Found += ": it has no vote"
		}
		f.Fix = fmt.Sprintf("set Options.NodeTimeout to %v, ten times the round trip, or use a nearer node",
			10*rtt.Round(time.Millisecond))
	}
	return f
}

func judgeVersion(t target) Finding {
	server, version := t.Hello["server"], t.Hello["version"]
	if version == "" {
		server, version = "redis", t.Info["redis_version"]
	}
	if v := t.Info["valkey_version"]; v != "" {
		server, version = "valkey", v
	}
	if version == "" {
		return unknown("not reported: HELLO: %v", t.HelloErr)
	}
	f := ok("%s %s", server, version)
	oldest := "6.0"
	if server == "valkey" {
		oldest = "7.2"
	}
	switch {
	// a version of Redis that it is like
	case older(version, oldest) && t.InfoErr == nil && t.Info["run_id"] == "":
		return unknown("it says that it is %s %s, and is another product", server, version)
	case older(version, oldest):
		f.Status, f.Fix = Fail, fmt.Sprintf("install %s %s or later", server, oldest)
	case t.Cluster && older(version, "7.0"):
		f.Status, f.Fix = Warn, "install 7.0 or later"
	}
	return f
}

// older compares the first two numbers of versions.
func older(version, than string) bool {
	a, b := strings.SplitN(version, ".", 3), strings.SplitN(than, ".", 3)
	for i := range 2 {
		x, y := 0, 0
		if i < len(a) {
			x, _ = strconv.Atoi(a[i])
		}
		if i < len(b) {
			y, _ = strconv.Atoi(b[i])
		}
		if x != y {
			return x < y
		}
	}
	return false
}

func judgeRole(t target) Finding {
	role, mode := t.Hello["role"], t.Hello["mode"]
	if role == "" {
		role = t.Info["role"]
	}
	if mode == "" {
		mode = t.Info["redis_mode"] // Valkey reports it in Hello only
	}
	switch {
	case mode == "sentinel":
		return Finding{Status: Fail, Found: "a Sentinel, which holds no keys",
			Fix: "name its master: redis://" + t.Addr + "?master_name=NAME for Open, redis.NewFailoverClient for New"}
	case role == "":
		return unknown("not reported: HELLO: %v", t.HelloErr)
	case role != "master":
		f := Finding{Status: Fail, Found: "the role is " + strings.Replace(role, "slave", "replica", 1)}
		f.Fix = "use its master instead, or make it one: " + t.cli() + " REPLICAOF NO ONE"
		if host := t.Info["master_host"]; host != "" {
			f.Found += " of " + net.JoinHostPort(host, t.Info["master_port"])
		}
		return f
	case mode == "cluster" && !t.Cluster && t.Apart != nil && t.ScriptErr == nil && len(t.Refused) == 0:
		return Finding{Status: Warn, Found: "a whole Cluster behind one address", Fix: FixApart}
	case mode == "cluster" && !t.Cluster:
		return Finding{Status: Fail, Found: "a member of a Cluster, used as a server by itself",
			Fix: "use the whole Cluster: redis://" + t.Addr + "?addr=OTHER for Open, redis.NewClusterClient for New"}
	}
	return ok("master")
}

// unreadable returns the finding for settings that the server does not report to this user.
func (t target) unreadable() Finding {
	said := "INFO does not have it"
	if t.InfoErr != nil {
		said = "INFO: " + t.InfoErr.Error()
	}
	f := unknown("not reported: %s", said)
	f.Fix = "run as a privileged user: " + t.cli() + " CONFIG GET maxmemory-policy appendonly appendfsync"
	return f
}

func judgeEviction(t target) Finding {
	policy, told := t.Info["maxmemory_policy"]
	if !told {
		return t.unreadable()
	}
	f := ok("maxmemory-policy is %s", policy)
	if policy == "noeviction" {
		return f
	}
	f.Status = Fail
	f.Fix = t.cli() + " CONFIG SET maxmemory-policy noeviction (and in its configuration); " +
		"caches that need eviction belong on a server of their own"
	if t.Info["maxmemory"] == "0" {
		f.Status = Warn
		f.Found += ", but maxmemory is 0, so nothing is evicted for now"
	}
	return f
}

func judgePersistence(t target) Finding {
	aof, told := t.Info["aof_enabled"]
	if !told {
		return t.unreadable()
	}
	logs, fsync := aof == "1", t.Settings["appendfsync"]
	pauses := t.Settings["no-appendfsync-on-rewrite"] == "yes"
	if t.guarded() && t.InfoErr == nil && (!logs || fsync != "always" || pauses) {
		return ok("a restart that loses data has no vote for %v: see quarantine", t.Quarantine)
	}
	wait := fmt.Sprintf("when it has stopped, keep clients away from it for MaxTTL (%v), "+
		"or %s CONFIG SET appendonly yes, and CONFIG SET appendfsync always "+
		"(and in its configuration, else the next restart undoes both)",
		t.MaxTTL, t.cli())
	switch {
	case !logs:
		return Finding{Status: Warn,
			Found: "no append-only file: a restart loses the locks of the last minutes, or all",
			Fix:   wait}
	case fsync == "":
		return unknown("an append-only file; whether each write is on disk before its answer is not reported: "+
			"CONFIG: %v",
			t.ConfErr)
	case fsync != "always":
		return Finding{Status: Warn, Found: "appendfsync is " + fsync +
			": a crash of the machine loses the last seconds",
			Fix: wait}
	case pauses:
		return Finding{Status: Warn, Found: "appendfsync is always, but no-appendfsync-on-rewrite is yes: " +
			"a crash of the machine while the server saves its data loses what was written since that began",
			Fix: t.cli() + " CONFIG SET no-appendfsync-on-rewrite no (and in its configuration)"}
	}
	return ok("appendonly with appendfsync always")
}

func judgeQuarantine(t target) Finding {
	life, n := t.Quarantine, t.Nodes[t.i]
	unverified := n.Unverified() // read once, because a lock may change it meanwhile
	switch {
	case t.DisableQuarantine:
		return ok("off: Options.DisableQuarantine")
	case !n.Guardable():
		return ok("off: a Cluster is among the nodes")
	case unverified != nil:
		return Finding{Status: Fail, Found: unverified.Error(), Fix: t.remedy(unverified.Error())}
	case t.Quarantined(t.i) && t.voters() <= len(t.Nodes)/2:
		return Finding{Status: Fail,
			Found: fmt.Sprintf("the node lost data within the last %v, and so have others: %d of %d nodes have a "+
				"vote, "+
				"so nobody gets a lock", life, t.voters(), len(t.Nodes)),
			Fix: "wait: each votes again by itself that long after its loss"}
	case t.Apart != nil && t.Guarded:
		return Finding{Status: Warn,
			Found: "off: " + t.Apart.Error() +
				"; if a node loses data, it may grant a lock that is held, and tokens may repeat",
			Fix: FixApart}
	case t.unguarded != "" && t.Guarded:
		return Finding{Status: Warn, Found: "off: scripts on " + t.unguarded +
			" may not access keys of two hash slots",
			Fix: "see the quarantine of " + t.unguarded}
	case t.InfoErr != nil && !t.Guarded:
		return Finding{Status: Warn,
			Found: "INFO is refused: the tokens of a node that restarts with old data, " +
				"or fails over to a replica that lagged, may repeat: " + t.InfoErr.Error(),
			Fix: t.allowInfo()}
	case len(t.Nodes) < 3:
		return ok("off: with fewer than 3 nodes no other could vote instead")
	case !t.Guarded:
		return ok("off: a Cluster is among the nodes")
	case t.Quarantined(t.i):
		return Finding{Status: Warn, Found: fmt.Sprintf("the node lost data within the last %v", life),
			Fix: "wait that long before you restart another node"}
	}
	return ok("on, for %v", life)
}

// guarded reports whether nodes that lost their data have no vote.
func (t target) guarded() bool { return t.Guarded && t.unguarded == "" }

// FixApart is what to do about a server whose scripts may not access keys of two hash slots.
const FixApart = "the address is that of a whole Cluster: use it as one, redis://HOST?addr=HOST for Open, " +
	"redis.NewClusterClient for New; or use nodes that are one server each"

// voters is how many nodes are not known to be in quarantine.
func (c *Config) voters() (n int) {
	for i := range c.Nodes {
		if !c.Quarantined(i) {
			n++
		}
	}
	return n
}

// remedy returns what to do about a server that has refused scripts with that text; "" if that does not say.
func (t target) remedy(text string) string {
	switch {
	case strings.Contains(text, "INFO is refused"): // of node.Unverified
		return t.allowInfo()
	case aboutRights(text):
		return t.grant()
	}
	return t.command(t.i, t.Addr).fix(text)
}

// maxOffset is the difference of two clocks from which Check warns.
const maxOffset = time.Second

func judgeOffset(t target) Finding {
	if t.ClockErr != nil {
		return unknown("TIME: %v", t.ClockErr)
	}
	clock := t.Clock
	apart := (clock.Offset - t.middle).Abs()
	f := ok("%+v from this process (±%v), %v from the middle one of the nodes",
		clock.Offset.Round(time.Microsecond), clock.OffsetMargin.Round(time.Microsecond),
		apart.Round(time.Microsecond))
	if apart-clock.OffsetMargin > maxOffset {
		f.Status = Warn
		f.Fix = "let a time service that slews set the clocks of all nodes; " +
			"on the node: chronyc tracking, timedatectl set-ntp true"
	}
	return f
}

func judgeDrift(t target) Finding {
	if t.ClockErr != nil {
		return unknown("TIME: %v", t.ClockErr)
	}
	clock, limit := t.Clock, t.DriftFactor
	drift := max(clock.Drift, -clock.Drift)
	f := ok("gains %+.3f%% on this process (±%.3f%%); DriftFactor allows %.3g%%", 100*clock.Drift,
		100*clock.DriftMargin, 100*limit)
	switch {
	case drift-clock.DriftMargin > limit:
		f.Status = Fail
		f.Fix = "fix the clock (chronyc tracking; a virtual machine may have a wrong clock source), " +
			"or raise Options.DriftFactor in all clients"
	case clock.DriftMargin > limit:
		f.Status = Unknown
		f.Found += ": the round trips are too long to measure it"
	}
	return f
}

func judgeScripts(t target) Finding {
	switch {
	case t.NoKey:
		return ok("not tried: no key with this prefix can be on this master")
	case t.ScriptErr == nil && len(t.Refused) == 0:
		return ok("all commands of the lock scripts")
	}
	if t.NoScript { // what locks send is not answered, either
		return Finding{Status: Fail, Found: fmt.Sprintf("other commands are answered, but not %v", t.ScriptErr),
			Fix: "if writes are paused, as by a FAILOVER, this ends it: " + t.cli() + " CLIENT UNPAUSE"}
	}
	var reply interface{ RedisError() }
	if t.ScriptErr != nil && !errors.As(t.ScriptErr, &reply) {
		return unknown("%v", t.ScriptErr)
	}
	return Finding{Status: Fail, Found: t.refusal(),
		Fix: cmp.Or(t.remedy(t.refusal()), "fix what the server reports; then run this again")}
}

// refusal is why scripts cannot be run, or which of their commands; "" if all can.
func (t target) refusal() string {
	if t.ScriptErr != nil {
		return t.ScriptErr.Error()
	}
	return strings.Join(t.Refused, "; ")
}

// judgeKind names the row of docs/servers.md that fits: the first of these. It fails where no lock can be
// had.
func judgeKind(t target) Finding {
	refused, noPushes := t.refusal(), errors.Is(t.PubSubErr, errNoRESP3)
	switch {
	case strings.Contains(refused, "bad lua script"):
		return Finding{Status: Fail, Found: "A proxy that reads scripts",
			Fix: "set script_check_enable to 0, or take the direct connection, which is a Cluster"}
	case strings.Contains(refused, "Lua scripting is disabled"):
		return Finding{Status: Fail, Found: "Garnet without Lua", Fix: "start the server with --lua"}
	case strings.HasPrefix(t.Info["role"], "active"):
		return Finding{Status: Fail, Found: "KeyDB with active replication",
			Fix: "use one master, without it: of two, both would grant a lock"}
	case t.Cluster:
		return ok("Redis Cluster")
	case t.Apart != nil && noPushes:
		return ok("Envoy")
	case t.Apart != nil:
		return ok("Several servers behind one address")
	case noPushes:
		return ok("A server without RESP3")
	case t.InfoErr != nil:
		return ok("A user without INFO")
	case strings.Contains(t.Nodes[t.i].Mode(), ", EVAL,"):
		return ok("A server that refuses SCRIPT or EVALSHA")
	case t.Info["run_id"] == "":
		return ok("A server that reports no run_id")
	}
	return ok("Redis or Valkey, one server")
}

func judgePubSub(t target) Finding {
	var reply interface{ RedisError() }
	switch err := t.PubSubErr; {
	case t.NoKey:
		return ok("not tried: no key with this prefix can be on this master")
	case err == nil:
		return ok("a notice arrives")
	case t.DisableNotify:
		return ok("%v; Options.DisableNotify is set, so it is not used", err)
	case errors.Is(err, errNoRESP3):
		return Finding{Status: Warn, Found: err.Error(), Fix: "use a server, or a proxy, that knows HELLO 3"}
	case !errors.As(err, &reply):
		return unknown("%v", err)
	default:
		return Finding{Status: Warn, Found: err.Error(), Fix: t.grant()}
	}
}

// aboutRights reports whether a server's error is about rights, in the wording of any version.
func aboutRights(text string) bool {
	return strings.Contains(text, "NOPERM") || strings.Contains(text, "The user executing the script can't") ||
		strings.Contains(text, "ACL failure in script") // Valkey
}

// grant returns the command that gives the user all rights that locking needs.
func (t target) grant() string {
	prefix := escapeGlob(t.KeyPrefix)
	commands, channels := lockCommands, node.Inbox
	if t.Cluster {
		commands, channels = lockCommands+clusterCommands, prefix
	}
	if c, ok := t.Clients[t.i].(*redis.Client); ok && c.Options().DB != 0 {
		commands += " +select"
	}
	return fmt.Sprintf("%s ACL SETUSER %s %s '~flightlock:*' %s %s", t.cli(), t.user(), quoted("~"+prefix+"*"),
		quoted("&"+channels+"*"), commands)
}

// allowInfo returns the command that gives the user the right to INFO.
func (t target) allowInfo() string { return fmt.Sprintf("%s ACL SETUSER %s +info", t.cli(), t.user()) }

// user is whose rights are used.
func (t target) user() string {
	if t.User == "" {
		return "default"
	}
	return quoted(t.User)
}

// escapeGlob escapes a prefix so that a pattern matches it literally.
func escapeGlob(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(s)
}

// cli is redis-cli for the server, for a privileged user.
func (t target) cli() string { return t.command(t.i, t.Addr).admin().String() }
