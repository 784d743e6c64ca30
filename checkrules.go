package flightlock

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/node"
)

// This file says what Check thinks of the facts.

// subject is a server that is judged.
type subject struct {
	c      *Client
	i      int // of its node
	f      node.Facts
	middle time.Duration // offset of the middle one of the nodes' clocks
}

// rule is one thing to look at on every server. judge gives status, what was found, and the
// fix.
type rule struct {
	name, why string
	judge     func(subject) Finding
}

var rules = []rule{
	{"reachable", "a node that answers later than NodeTimeout has no vote", judgeReachable},
	{"version", "the scripts need Redis 6.2 or Valkey 7.2, and notices of release on a Cluster need sharded pub/sub (7.0)", judgeVersion},
	{"role", "only a master can grant a lock; a replica refuses to write, and one member of a Cluster has some of the keys only", judgeRole},
	{"eviction", "a lock that is evicted is granted again while its holder works", judgeEviction},
	{"persistence", "a server that forgets its locks when it restarts grants them again while their holders work", judgePersistence},
	{"quarantine", "a node that lost its memory grants again what it had granted; in quarantine its votes do not count until those locks have ended", judgeQuarantine},
	{"clock offset", "fencing tokens go on from the clock when all nodes have lost their data, so the clocks should agree; a clock that is set, not slewed, moves expiry", judgeOffset},
	{"clock drift", "validity is counted by our clock and expiry by the node's; DriftFactor is how far they may run apart", judgeDrift},
	{"script rights", "acquire, refresh and release are scripts", judgeScripts},
	{"pubsub rights", "without notices of release waiters poll: slower, and more commands; never less safe", judgePubSub},
}

// What a user needs for locking, as in docs/operations.md, which says for what; and on a
// Cluster besides.
const (
	lockCommands    = "+evalsha +script|load +set +get +mget +del +pttl +pexpire +incrby +exists +zadd +zrem +zrange +zscore +time +ping +publish +subscribe +unsubscribe +client|setname"
	clusterCommands = " +spublish +ssubscribe +sunsubscribe +cluster|slots +asking"
)

func ok(format string, args ...any) Finding {
	return Finding{Status: StatusOK, Found: fmt.Sprintf(format, args...)}
}

func unknown(format string, args ...any) Finding {
	return Finding{Status: StatusUnknown, Found: fmt.Sprintf(format, args...)}
}

func judgeReachable(s subject) Finding {
	if refused := s.c.nodes[s.i].LoginRefused(s.f.Addr); refused != nil {
		return doesNotServe(s.c.commandFor(s.i, s.f.Addr), refused)
	}
	rtt, limit := s.f.RTT, s.c.opts.NodeTimeout
	f := ok("answers in %v", rtt.Round(time.Microsecond))
	if rtt > limit/2 {
		f.Status = StatusWarn
		f.Found += fmt.Sprintf(", and NodeTimeout is %v", limit)
		f.Fix = fmt.Sprintf("set Options.NodeTimeout to %v, ten times the round trip, or use a nearer node", 10*rtt.Round(time.Millisecond))
	}
	return f
}

func judgeVersion(s subject) Finding {
	server, version := s.f.Hello["server"], s.f.Hello["version"]
	if version == "" {
		server, version = "redis", s.f.Info["redis_version"]
	}
	if v := s.f.Info["valkey_version"]; v != "" {
		server, version = "valkey", v
	}
	if version == "" {
		return unknown("it does not tell: HELLO: %v", s.f.HelloErr)
	}
	f := ok("%s %s", server, version)
	oldest := "6.2"
	if server == "valkey" {
		oldest = "7.2"
	}
	switch {
	case older(version, oldest):
		f.Status, f.Fix = StatusFail, fmt.Sprintf("install %s %s or later", server, oldest)
	case s.f.Cluster && older(version, "7.0"):
		f.Status, f.Fix = StatusWarn, "install 7.0 or later"
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

func judgeRole(s subject) Finding {
	role, mode := s.f.Hello["role"], s.f.Hello["mode"]
	if role == "" {
		role = s.f.Info["role"]
	}
	if mode == "" {
		mode = s.f.Info["redis_mode"] // Valkey tells it in Hello only
	}
	switch {
	case mode == "sentinel":
		return Finding{Status: StatusFail, Found: "a Sentinel, which holds no keys",
			Fix: "name its master: redis://" + s.f.Addr + "?master_name=NAME for Open, redis.NewFailoverClient for New"}
	case role == "":
		return unknown("it does not tell: HELLO: %v", s.f.HelloErr)
	case role != "master":
		f := Finding{Status: StatusFail, Found: "a " + strings.Replace(role, "slave", "replica", 1)}
		f.Fix = "use its master instead, or make it one: " + s.cli() + " REPLICAOF NO ONE"
		if host := s.f.Info["master_host"]; host != "" {
			f.Found += " of " + net.JoinHostPort(host, s.f.Info["master_port"])
		}
		return f
	case mode == "cluster" && !s.f.Cluster:
		return Finding{Status: StatusFail, Found: "a member of a Cluster, used as a server by itself",
			Fix: "use the whole Cluster: redis://" + s.f.Addr + "?addr=OTHER for Open, redis.NewClusterClient for New"}
	}
	return ok("master")
}

// setting is a setting as CONFIG GET has it, or else INFO; and why neither tells.
func (s subject) setting(config, info string) (string, bool) {
	if v, found := s.f.Config[config]; found {
		return v, true
	}
	v, found := s.f.Info[info]
	return v, found
}

// secretive is the finding on settings that the server does not tell to this user.
func (s subject) secretive() Finding {
	said := "INFO tells nothing of it"
	if s.f.InfoErr != nil {
		said = "INFO: " + s.f.InfoErr.Error()
	}
	f := unknown("it does not tell: %s; CONFIG: %v", said, s.f.ConfErr)
	f.Fix = "ask one who may: " + s.cli() + " CONFIG GET maxmemory-policy appendonly appendfsync"
	return f
}

func judgeEviction(s subject) Finding {
	policy, told := s.setting("maxmemory-policy", "maxmemory_policy")
	if !told {
		return s.secretive()
	}
	f := ok("maxmemory-policy is %s", policy)
	if policy == "noeviction" {
		return f
	}
	f.Status = StatusFail
	f.Fix = s.cli() + " CONFIG SET maxmemory-policy noeviction (and in its configuration); caches that need eviction belong on a server of their own"
	if limit, told := s.setting("maxmemory", "maxmemory"); told && limit == "0" {
		f.Status = StatusWarn
		f.Found += ", but maxmemory is 0, so nothing is evicted for now"
	}
	return f
}

func judgePersistence(s subject) Finding {
	aof, told := s.setting("appendonly", "aof_enabled")
	if !told {
		return s.secretive()
	}
	fsync := s.f.Config["appendfsync"]
	if s.c.guarded() && s.f.InfoErr == nil && fsync != "always" {
		return ok("what a restart forgets has no vote for %v: see quarantine", s.c.quarantine())
	}
	wait := fmt.Sprintf("let no client reach it again within MaxTTL (%v) of its end, or %s CONFIG SET appendonly yes, and CONFIG SET appendfsync always",
		s.c.opts.MaxTTL, s.cli())
	switch {
	case aof != "yes" && aof != "1":
		return Finding{Status: StatusWarn, Found: "no append-only file: a restart forgets the locks of its last minutes, or all", Fix: wait}
	case fsync == "":
		return unknown("an append-only file; whether each write is on disk before its answer, this user may not ask: CONFIG says %v", s.f.ConfErr)
	case fsync != "always":
		return Finding{Status: StatusWarn, Found: "appendfsync is " + fsync + ": a machine that crashes forgets its last seconds", Fix: wait}
	}
	return ok("appendonly with appendfsync always")
}

func judgeQuarantine(s subject) Finding {
	life, n := s.c.quarantine(), s.c.nodes[s.i]
	unverified := n.Unverified() // asked once: a lock may change it meanwhile
	allow := fmt.Sprintf("%s ACL SETUSER %s +info", s.cli(), s.user())
	switch {
	case s.c.opts.DisableQuarantine:
		return ok("off: Options.DisableQuarantine")
	case !n.Guardable():
		return ok("off: a Cluster is among the nodes")
	case unverified != nil:
		return Finding{Status: StatusFail, Found: unverified.Error(), Fix: acceptWrites(s, unverified)}
	case s.f.InfoErr != nil && !s.c.guarded():
		return Finding{Status: StatusWarn,
			Found: "INFO is refused: the tokens of a node that restarts with old data, or fails over to a replica that lagged, may repeat: " + s.f.InfoErr.Error(),
			Fix:   allow}
	case len(s.c.nodes) < 3:
		return ok("off: with less than 3 nodes no other could vote instead")
	case !s.c.guarded():
		return ok("off: a Cluster is among the nodes")
	case s.f.InfoErr != nil:
		return Finding{Status: StatusWarn,
			Found: "INFO is refused: a node that restarts with old data, or fails over to a replica that lagged, may not be noticed: " + s.f.InfoErr.Error(),
			Fix:   allow}
	case blind(n) != nil:
		return Finding{Status: StatusWarn,
			Found: fmt.Sprintf("this client was refused INFO, and what it asked then still counts: %v", blind(n)),
			Fix:   "none, if INFO is allowed by now: a lock asks again every 10s; then run this again"}
	case s.c.quorum.Quarantined(s.i):
		return Finding{Status: StatusWarn, Found: fmt.Sprintf("the node lost its memory within the last %v", life),
			Fix: "wait so long before you touch another node"}
	}
	return ok("on, for %v", life)
}

// blind is why the node does not tell its process to this client, as far as it has asked.
func blind(n *node.Node) error {
	if m := n.Memory(); m != nil {
		return m.Blind
	}
	return nil
}

// acceptWrites is what has a server accept the script that it refused with err.
func acceptWrites(s subject, err error) string {
	fix := "INFO (what it says must end; the next lock asks it again)"
	switch text := err.Error(); {
	case conn.NoRights(err):
		fix = fmt.Sprintf("ACL SETUSER %s '~%s*' %s", s.user(), strings.TrimSuffix(node.Reserved, "{"), lockCommands)
	case strings.Contains(text, "NOREPLICAS"):
		fix = "INFO replication (bring its replicas back, or lower min-replicas-to-write)"
	case strings.Contains(text, "OOM"):
		fix = "INFO memory (free memory, or raise maxmemory)"
	case strings.Contains(text, "MISCONF"):
		fix = "INFO persistence (it cannot save: mend its disk)"
	case strings.Contains(text, "READONLY"):
		fix = "ROLE (it is a replica: use its master, or make it one)"
	}
	return s.cli() + " " + fix
}

// maxOffset is how far two clocks may be apart before Check minds.
const maxOffset = time.Second

func judgeOffset(s subject) Finding {
	if s.f.ClockErr != nil {
		return unknown("TIME: %v", s.f.ClockErr)
	}
	clock := s.f.Clock
	apart := (clock.Offset - s.middle).Abs()
	f := ok("%+v from this process (±%v), %v from the middle one of the nodes", clock.Offset.Round(time.Microsecond),
		clock.OffsetMargin.Round(time.Microsecond), apart.Round(time.Microsecond))
	if apart-clock.OffsetMargin > maxOffset {
		f.Status = StatusWarn
		f.Fix = "let a time service that slews set the clocks of all nodes; on the node: chronyc tracking, timedatectl set-ntp true"
	}
	return f
}

func judgeDrift(s subject) Finding {
	if s.f.ClockErr != nil {
		return unknown("TIME: %v", s.f.ClockErr)
	}
	clock, limit := s.f.Clock, s.c.opts.DriftFactor
	drift := max(clock.Drift, -clock.Drift)
	f := ok("gains %+.3f%% on this process (±%.3f%%); DriftFactor allows %.3g%%", 100*clock.Drift, 100*clock.DriftMargin, 100*limit)
	switch {
	case drift-clock.DriftMargin > limit:
		f.Status = StatusFail
		f.Fix = "mend the clock (chronyc tracking; a virtual machine may have a wrong clock source), or raise Options.DriftFactor in all clients"
	case clock.DriftMargin > limit:
		f.Status = StatusUnknown
		f.Found += ": the round trips are too long to tell"
	}
	return f
}

func judgeScripts(s subject) Finding {
	switch {
	case s.f.NoKey:
		return ok("not tried: no key with this prefix can be on this master")
	case s.f.ScriptErr == nil && len(s.f.Refused) == 0:
		return ok("all commands of the lock scripts")
	}
	var reply interface{ RedisError() }
	if s.f.ScriptErr != nil && !errors.As(s.f.ScriptErr, &reply) {
		return unknown("%v", s.f.ScriptErr)
	}
	found := strings.Join(s.f.Refused, "; ")
	if s.f.ScriptErr != nil {
		found = s.f.ScriptErr.Error()
	}
	f := Finding{Status: StatusFail, Found: found, Fix: "see what the server says; then run this again"}
	switch {
	case aboutRights(found):
		f.Fix = s.grant()
	case strings.Contains(found, "READONLY"):
		f.Fix = "use the master"
	case strings.Contains(found, "OOM"):
		f.Fix = "give it more memory: " + s.cli() + " CONFIG SET maxmemory BYTES"
	}
	return f
}

func judgePubSub(s subject) Finding {
	var reply interface{ RedisError() }
	switch err := s.f.PubSubErr; {
	case s.f.NoKey:
		return ok("not tried: no key with this prefix can be on this master")
	case err == nil:
		return ok("a notice on a lock's channel arrives")
	case s.c.opts.DisableNotify:
		return ok("%v; Options.DisableNotify is set, so it is not used", err)
	case !errors.As(err, &reply):
		return unknown("%v", err)
	default:
		return Finding{Status: StatusWarn, Found: err.Error(), Fix: s.grant()}
	}
}

// aboutRights reports whether a server's error is about rights, in the words of any
// version.
func aboutRights(text string) bool {
	return strings.Contains(text, "NOPERM") || strings.Contains(text, "The user executing the script can't") ||
		strings.Contains(text, "ACL failure in script") // Valkey
}

// grant is the command that gives the user all rights that locking needs.
func (s subject) grant() string {
	prefix := escapeGlob(s.c.opts.KeyPrefix)
	commands := lockCommands
	if s.f.Cluster {
		commands += clusterCommands
	}
	return fmt.Sprintf("%s ACL SETUSER %s '~%s*' '~flightlock:*' '&%s*' %s", s.cli(), s.user(), prefix, prefix, commands)
}

// user is whose rights are used.
func (s subject) user() string {
	if s.f.User == "" {
		return "default"
	}
	return quoted(s.f.User)
}

// escapeGlob has a pattern match the prefix itself.
func escapeGlob(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(s)
}

// cli is redis-cli for the server, for one who may do more there than lock.
func (s subject) cli() string { return s.c.commandFor(s.i, s.f.Addr).admin().String() }

// median is the lower one of two in the middle; 0 of none.
func median(all []time.Duration) time.Duration {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[(len(all)-1)/2]
}
