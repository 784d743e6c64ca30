package check

import (
	"errors"
	"fmt"
	"strings"
)

// Kind is a row of docs/servers.md: servers that clients connect to in the same way, and that lack the same.
type Kind struct {
	Name    string
	Who     string // products and services, for people who look for theirs
	Connect string
	Works   string
	Lacks   string   // and what to do about it; "": nothing
	Tried   []string // the rows of the table in test/servers that show it; none: what is said is from documentation
}

// The kinds, in the order of the page.
var (
	kindRedis = Kind{
		"Redis or Valkey, one server",
		"Redis 6.0 and later, Valkey 7.2 and later, KeyDB without active replication; ElastiCache (cluster mode disabled), " +
			"Memorystore for Redis, Azure Cache (Basic to Premium, not clustered), Aliyun and Tencent (standard architecture)",
		"`redis://host:6379`; with Sentinels `redis://sentinel:26379?master_name=NAME`", "all",
		"", []string{"redis", "redis-6.0", "restricted", "declared-keys"},
	}
	kindCluster = Kind{
		"Redis Cluster",
		"Redis Cluster, Valkey Cluster; ElastiCache (cluster mode enabled, and Serverless), MemoryDB, Memorystore Cluster, " +
			"Azure (OSS cluster policy), Redis Enterprise (OSS Cluster API), Aliyun (direct connection)",
		"`redis://host:6379?addr=host:6379`, or a ClusterClient", "locks, tokens, turns, caches",
		"grants: who waits is notified, and asks by itself; a quarantine: a master that loses data may grant a lock that " +
			"is held. Use three servers as nodes where that matters",
		[]string{"cluster", "serverless"},
	}
	kindDeclared = Kind{
		"A server that reports no run_id",
		"Dragonfly (as it is), kvrocks (also with `lua-strict-key-accessing`), others that are no Redis",
		"`redis://host:6379`", "all",
		"a restart that is quicker than two seconds, and brings old data, may not be noticed; nor, " +
			"where `INFO` has no `master_replid2` (Dragonfly), a failover to a replica and back: tokens may repeat",
		[]string{"dragonfly", "kvrocks"},
	}
	kindTexts = Kind{
		"A server that refuses SCRIPT or EVALSHA", "proxies and services that have `EVAL` only, or refuse `SCRIPT LOAD`",
		"`redis://host:6379`", "all; scripts are sent as texts, 2 to 10 KB each", "nothing is missing",
		[]string{"no-script", "eval-only"},
	}
	kindRESP2 = Kind{
		"A server without RESP3", "proxies that refuse `HELLO 3`", "`redis://host:6379`", "locks, tokens, caches",
		"notices and grants: who waits polls", []string{"resp2"},
	}
	kindNoInfo = Kind{
		"A user without INFO", "users without that right, services that refuse it", "`redis://host:6379`, as one node; " +
			"three after the user was given `+info`", "all on one node, nothing on three",
		"nobody would notice a restart with old data, or a failover to a replica that lagged: three nodes refuse to lock, " +
			"unless `Options.DisableQuarantine` is set; tokens of one may repeat",
		[]string{"no-info"},
	}
	kindOneAddress = Kind{
		"Several servers behind one address",
		"Redis Enterprise and Redis Cloud (clustered), Azure (Enterprise cluster policy), Aliyun and Tencent (proxy of a " +
			"cluster, with `script_check_enable` 0)",
		"`redis://host:6379`; better as a Cluster, where the service can be reached so", "locks, tokens, turns, caches",
		"grants and a quarantine, as a Cluster",
		[]string{"one-endpoint", "one-endpoint-loads-on-one", "proxy-of-a-cluster"},
	}
	kindEnvoy = Kind{
		"Envoy", "the Redis proxy of Envoy, before a Cluster", "`redis://host:6379`; better the Cluster behind it",
		"locks, tokens, caches", "grants, notices and a quarantine: who waits polls", []string{"envoy"},
	}
	kindLiteral = Kind{
		"A proxy that reads scripts", "Aliyun and Tencent (proxy of a cluster, as it is)", "not at all: set " +
			"`script_check_enable` to 0, or take the direct connection, which is a Cluster", nothing,
		"it demands that a script names each key as `KEYS[n]`, and refuses with `bad lua script for redis cluster`",
		[]string{"literal-keys"},
	}
	kindActive = Kind{
		"KeyDB with active replication", "KeyDB (`active-replica yes`, multi-master)", "not at all: one master, without it",
		nothing, "two servers accept writes, so both would grant a lock: `the role of the node is active-replica`",
		[]string{"keydb-active"},
	}
	kindNoLua = Kind{
		"Garnet without Lua", "Garnet (as it is)", "not before the server was started with `--lua`", nothing,
		"there are no scripts: `Lua scripting is disabled`", []string{"garnet-without-lua"},
	}
	kindTwemproxy = Kind{
		"twemproxy", "twemproxy (nutcracker)", "not at all: use the servers behind it", nothing,
		"it closes the connection for each command that it does not know, `HELLO` among them: `EOF`",
		[]string{"twemproxy"},
	}
	kindUntried = Kind{
		"Others", "Upstash, Garnet with `--lua`, Memorystore for Valkey, others", "`redis://host:6379`",
		"not tried: run [Check](operations.md#check)", "", nil,
	}
)

// Kinds are all of them.
var Kinds = []Kind{
	kindRedis, kindCluster, kindDeclared, kindTexts, kindRESP2, kindNoInfo, kindOneAddress, kindEnvoy, kindLiteral,
	kindActive, kindNoLua, kindTwemproxy, kindUntried,
}

// kind is the first row that fits what was found out about a server.
func (t target) kind() Kind {
	refused := strings.Join(t.Refused, "; ")
	if t.ScriptErr != nil {
		refused = t.ScriptErr.Error()
	}
	noPushes := errors.Is(t.PubSubErr, errNoRESP3)
	switch {
	case strings.Contains(refused, "bad lua script"):
		return kindLiteral
	case strings.Contains(refused, "Lua scripting is disabled"):
		return kindNoLua
	case strings.HasPrefix(t.Info["role"], "active"):
		return kindActive
	case t.Cluster:
		return kindCluster
	case t.Apart != nil && noPushes:
		return kindEnvoy
	case t.Apart != nil:
		return kindOneAddress
	case noPushes:
		return kindRESP2
	case t.InfoErr != nil:
		return kindNoInfo
	case strings.Contains(t.Nodes[t.i].Mode(), ", EVAL,"):
		return kindTexts
	case t.Info["run_id"] == "":
		return kindDeclared
	}
	return kindRedis
}

// nothing is the Works of a kind on which no lock can be had.
const nothing = "nothing"

// judgeKind is the row of docs/servers.md that fits. It fails where no lock can be had.
func judgeKind(t target) Finding {
	k := t.kind()
	found := fmt.Sprintf("%s. What works: %s", k.Name, k.Works)
	if k.Lacks != "" {
		found += ". What does not: " + k.Lacks
	}
	f := ok("%s", strings.ReplaceAll(found, "`", ""))
	if k.Works == nothing {
		f.Status, f.Fix = Fail, strings.ReplaceAll(k.Connect, "`", "")
	}
	return f
}
