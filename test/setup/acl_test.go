package setup

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// useAll does everything that a client can do on one server, and returns the first refusal. First
// the server loses everything but the rights.
func useAll(t *testing.T, s *redistest.Server) error {
	t.Helper()
	s.Do(t, "SCRIPT", "FLUSH")
	s.Do(t, "FLUSHALL")
	proxy := redistest.StartProxy(t, s.Addr())
	c, err := flightlock.Open(lockkit.Patient, "redis://app:pw@"+proxy.Addr())
	if err != nil {
		return err
	}
	defer lockkit.Close(t, c)
	ctx := t.Context()
	l, err := c.SingleFlightLock(ctx, "k", 20*time.Second, flightlock.LimitedRetry(time.Millisecond, 3))
	if err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	defer l.Release(ctx) // Close waits for holders
	other, err := flightlock.Open(lockkit.Patient, "redis://app:pw@"+s.Addr())
	if err != nil {
		return err
	}
	defer lockkit.Close(t, other)
	if _, err := other.TryLock(ctx, "k", time.Second); !errors.Is(err, flightlock.ErrNotAcquired) {
		return fmt.Errorf("lock what is held: %w", err)
	}
	if err := l.Refresh(ctx); err != nil { // restores a key that has lost some of its ttl
		return fmt.Errorf("refresh: %w", err)
	}
	if err := l.Release(ctx); err != nil {
		return fmt.Errorf("release: %w", err)
	}
	r, err := other.Check(ctx)
	if err != nil {
		return err
	}
	for _, f := range r.Findings {
		if strings.Contains(f.Check, "rights") && f.Status != flightlock.StatusOK {
			return fmt.Errorf("check: %s", f.Found)
		}
	}
	return probed(t, c, proxy)
}

// probed has the node suspended, and returns why it does not come back.
func probed(t *testing.T, c *flightlock.Client, proxy *redistest.Proxy) error {
	t.Helper()
	proxy.BlackHole(true)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 4 {
		_, _ = c.TryLock(ctx, "k", time.Second)
	}
	proxy.BlackHole(false)
	proxy.ResetAll()
	deadline := time.Now().Add(20 * time.Second)
	for {
		l, err := c.TryLock(ctx, "k", time.Second)
		if err == nil {
			return l.Release(ctx)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("after an outage: %w", err)
		}
	}
}

// The documented rule suffices for everything, and every command in it is needed: without any of
// them, but for three, something is refused.
func TestTheDocumentedACLSufficesAndIsSmallest(t *testing.T) {
	t.Parallel()
	rule := lockkit.DocumentedACL(t)[0]
	s := redistest.StartServer(t)
	rule.Apply(t, s)
	if err := useAll(t, s); err != nil {
		t.Errorf("the whole rule: %v", err)
	}
	for _, command := range rule.Commands {
		if command == "+ping" || command == "+unsubscribe" || command == "+client|setname" {
			// for the first, a refusal is an answer as well; nobody waits for the second; names may be refused
			continue
		}
		s.Do(t, "ACL", "DELUSER", "app")
		rule.Without(command).Apply(t, s)
		err := useAll(t, s)
		if err == nil ||
			!regexp.MustCompile("NOPERM|can't run this command|ACL failure in script").MatchString(err.Error()) {
			t.Errorf("without %s nothing is refused: %v", command, err)
		}
	}
}

// With the commands that the docs add for three nodes, the quarantine gets all the information it
// needs; without any one of them, it does not. Without INFO nothing is granted.
func TestTheDocumentedACLSufficesForTheQuarantine(t *testing.T) {
	t.Parallel()
	rules := lockkit.DocumentedACL(t)
	quarantine := rules[2]
	for _, missing := range append([]string{""}, quarantine.Commands...) {
		var urls []string
		var servers []*redistest.Server
		for range 3 {
			s := redistest.StartServer(t)
			rules[0].Apply(t, s)
			quarantine.Without(missing).Apply(t, s)
			servers, urls = append(servers, s), append(urls, "redis://app:pw@"+s.Addr())
		}
		c := lockkit.Open(t, lockkit.Patient, urls...)
		if missing == "+info" {
			if _, err := c.TryLock(t.Context(), "k", time.Second); !strings.Contains(fmt.Sprint(err),
				"give the user +info") {
				t.Errorf("without it: %v", err)
			}
			continue
		}
		lockkit.TryLock(t, c, "k")
		first := servers[0] // reads its marker from a dump
		first.Do(t, "RESTORE", lua.Marker, 0, first.Do(t, "DUMP", lua.Marker), "REPLACE")
		for range 3 {
			lockkit.TryLock(t, c, "k")
		}
		seen := int64(1)
		if missing == "+append" || strings.HasPrefix(missing, "+object") {
			seen = 0
		}
		lockkit.LockUntilQuarantined(t, c, "k", seen)
	}
}

// Sentinels that have users need the documented rule; without the right to be asked for the master nothing
// can be locked. If they refuse a client, Check says so, on one line, and that it is a matter of rights.
func TestTheDocumentedACLOfSentinels(t *testing.T) {
	t.Parallel()
	rule := lockkit.DocumentedRules(t, "watch", 1)[0]
	master := redistest.StartServer(t)
	sentinels := []*redistest.Server{
		redistest.StartSentinel(t, redistest.Watch("main", master)...),
		redistest.StartSentinel(t, redistest.Watch("main", master)...),
	}
	grant := func(missing string) {
		for _, s := range sentinels {
			s.Do(t, "ACL", "SETUSER", "watch", "reset")
			rule.Without(missing).Apply(t, s)
			s.Do(t, "ACL", "LOG", "RESET")
		}
	}
	open := func(password string) *flightlock.Client {
		return lockkit.Open(t, lockkit.Patient, fmt.Sprintf("redis://watch:%s@%s?master_name=main&addr=%s",
			password, sentinels[0].Addr(), sentinels[1].Addr()))
	}
	grant("")
	c := open("pw")
	testkit.Must(t, c.Ready(t.Context()))
	for _, s := range sentinels {
		if refused := s.Refused(t); len(refused) > 0 {
			t.Errorf("refused: %v", refused)
		}
	}
	grant("+client|setname")
	lockkit.WantFinding(t, lockkit.Check(t, open("pw")), "Sentinel master main", "reachable",
		flightlock.StatusOK)
	grant("+sentinel|get-master-addr-by-name")
	r := lockkit.Check(t, open("pw"))
	lockkit.WantFinding(t, r, "Sentinel master main", "reachable", flightlock.StatusFail, "NOPERM", "rights")
	for _, f := range r.Findings {
		if strings.Contains(f.Found, "\n") {
			t.Errorf("more than one line: %q", f.Found)
		}
	}
	lockkit.WantFinding(t, lockkit.Check(t, open("wrong")), "Sentinel master main", "reachable",
		flightlock.StatusFail, "WRONGPASS", "password")
}

// On a Cluster the rule and the additional commands suffice, on all masters.
func TestTheDocumentedACLSufficesOnAClusterToo(t *testing.T) {
	t.Parallel()
	rules := lockkit.DocumentedACL(t)
	cluster := redistest.StartCluster(t, 3)
	for _, s := range cluster.Servers() {
		for _, r := range rules {
			r.Apply(t, s)
		}
	}
	addrs := cluster.Addrs()
	c := lockkit.Open(t, lockkit.Patient, fmt.Sprintf("redis://app:pw@%s?addr=%s", addrs[0], addrs[1]))
	for i := range 20 {
		l := lockkit.Lock(t, c, fmt.Sprint("k", i), 5*time.Second)
		lockkit.Release(t, l)
	}
	r := lockkit.Check(t, c)
	for _, addr := range addrs {
		lockkit.WantFinding(t, r, addr, "script rights", flightlock.StatusOK)
		lockkit.WantFinding(t, r, addr, "pubsub rights", flightlock.StatusOK)
	}
}

// What Check advises is the rule of the docs, also on a Cluster, in a command that a shell understands:
// the | of a subcommand is no pipe.
func TestCheckAdvisesTheDocumentedACL(t *testing.T) {
	t.Parallel()
	rules := lockkit.DocumentedACL(t)
	server, cluster := redistest.StartServer(t), redistest.StartCluster(t, 3)
	member := cluster.Servers()[0]
	for _, s := range append(cluster.Servers(), server) {
		rules[0].Without("+incrby").Apply(t, s)
		rules[1].Apply(t, s)
	}
	rdb := server.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "pw" })
	all := cluster.Client(t, func(o *redis.ClusterOptions) { o.Username, o.Password = "app", "pw" })
	for _, tc := range []struct {
		s        *redistest.Server
		r        flightlock.Report
		channels string
		commands []string
	}{
		{server, lockkit.Check(t, lockkit.New(t, lockkit.Patient, rdb)), "&flightlock:inbox:*", rules[0].Commands},
		{member, lockkit.Check(t, lockkit.New(t, lockkit.Patient, all)), "&lock:*", append(rules[0].Commands,
			rules[1].Commands...)},
	} {
		host, port, _ := net.SplitHostPort(tc.s.Addr())
		want := append(strings.Fields("redis-cli -h "+host+" -p "+port+" --user ADMIN --askpass "+
			"ACL SETUSER app ~lock:* ~flightlock:* "+tc.channels), tc.commands...)
		lockkit.WantFinding(t, tc.r, tc.s.Addr(), "script rights", flightlock.StatusFail)
		for _, f := range tc.r.Findings {
			if f.Node != tc.s.Addr() || f.Check != "script rights" {
				continue
			}
			words, err := exec.Command("sh", "-c", `printf '%s\n' `+f.Fix).CombinedOutput()
			if got := strings.Fields(string(words)); err != nil || !slices.Equal(got, want) {
				t.Errorf("%s is to a shell, %v:\n%q\nwant\n%q", f.Fix, err, got, want)
			}
		}
	}
}

// The rule that Check suggests to a user without rights suffices, also for a client of another database than
// 0.
func TestTheRuleThatCheckSuggestsSufficesForItsDatabase(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	s.Do(t, lockkit.ACLSetUser("app", "on >pw")...)
	client := func() *flightlock.Client {
		return lockkit.New(t, lockkit.Patient, s.Client(t, func(o *redis.Options) {
			o.Username, o.Password, o.DB = "app", "pw", 1
		}))
	}
	c := client()
	r := lockkit.Check(t, c)
	fix := ""
	for _, f := range r.Findings {
		t.Logf("%s: %s: %s; %s", f.Check, f.Status, f.Found, f.Fix)
		_, rule, suggested := strings.Cut(f.Fix, "ACL SETUSER app ")
		if suggested && strings.Contains(rule, "+evalsha") {
			fix = strings.ReplaceAll(rule, "'", "")
		}
	}
	if fix == "" {
		t.Fatal("no rule is suggested")
	}
	s.Do(t, lockkit.ACLSetUser("app", fix)...)
	if _, err := client().TryLock(t.Context(), "k", 10*time.Second); err != nil {
		t.Errorf("with the rule that was suggested: %v", err)
	}
}

// Check finds that the user of a Cluster lacks the right to follow slots that move, which locks need.
func TestCheckFindsThatAUserMayNotAsk(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3)
	rules := lockkit.DocumentedACL(t)
	for _, s := range cluster.Servers() {
		rules[0].Apply(t, s)
		rules[1].Without("+asking").Apply(t, s)
	}
	r := lockkit.Check(t, lockkit.New(t, lockkit.Patient, cluster.Client(t, func(o *redis.ClusterOptions) {
		o.Username, o.Password = "app", "pw"
	})))
	for _, addr := range cluster.Addrs() {
		lockkit.WantFinding(t, r, addr, "script rights", flightlock.StatusFail, "ASKING: NOPERM", "+asking")
	}
}
