package sim

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
)

var mutationsFlag = flag.Bool("mutations", false, "break each safety rule, and see that it is noticed")

// A mutation breaks one safety rule, by another text in one file of a build of its own. It must be
// detected by the simulation, or by the test that is named.
type mutation struct {
	name     string
	file     string // from the root of the module
	old, new string // old must occur exactly once
	pkg, by  string // the named test; "": the simulation
	quick    bool   // is tried in every run of the tests
}

var mutations = []mutation{
	{
		name: "a raise that does not look whose the key is",
		file: "lua/refresh.lua",
		old:  "if holder ~= ARGV[1] then\n  if not holder then",
		new: "if holder ~= ARGV[1] then\n  if tonumber(redis.call('GET', KEYS[2]) or 0) < tonumber(ARGV[3]) then\n" +
			"    redis.call('SET', KEYS[2], ARGV[3])\n  end\n  if not holder then",
		pkg: "./lua", by: "TestARefusedRefreshWritesNothing",
	},
	{
		name:  "the q-th largest counter instead of the largest",
		file:  "internal/quorum/round.go",
		old:   "		top = max(top, rep.Counter)\n",
		new:   "		if top == 0 || rep.Counter < top {\n			top = rep.Counter\n		}\n",
		quick: true,
	},
	{
		name: "an attempt that took too long is granted",
		file: "internal/quorum/lease.go",
		old:  "	case clock.Passed(clock.Now(), l.until):\n		f := r.failureLocked()",
		new:  "	case false:\n		f := r.failureLocked()",
		pkg:  "./internal/quorum", by: "TestAttemptWhoseValidityIsGoneFails",
	},
	{
		name: "the deadline moves when a refresh is sent",
		file: "internal/flight/lease.go",
		old:  "	f.refreshing = true\n",
		new: "	f.refreshing = true\n	f.until = clock.Later(f.until, now.Add(f.g.cfg.Nodes.Validity(t.ttl)))\n" +
			"	if f.cur != nil {\n		f.cur.until = f.until\n	}\n",
		pkg: "./internal/flight", by: "TestLeaseThatCannotBeRenewedIsGivenBack", // and by seed 1622: one in 1,500
		quick: true,
	},
	{
		name: "owners are compared by prefix",
		file: "lua/release.lua",
		old:  "local ours = holder == ARGV[1]\n\nlocal contender",
		new: "local ours = type(holder) == 'string' and string.sub(holder, 1, #ARGV[1]) == ARGV[1]\n\n" +
			"local contender",
		pkg: "./lua", by: "TestOwnersAreComparedWhole",
	},
	{
		name: "an undo compares owners by prefix",
		file: "lua/undo.lua",
		old:  "if holder ~= ARGV[1] then",
		new:  "if type(holder) ~= 'string' or string.sub(holder, 1, #ARGV[1]) ~= ARGV[1] then",
		pkg:  "./lua", by: "TestOwnersAreComparedWhole",
	},
	{
		name: "an owner is used for two attempts",
		file: "client.go",
		old:  "strconv.AppendUint(owner, c.seq.Add(1), 36)",
		new:  "strconv.AppendUint(owner, c.seq.Add(1)/2, 36)",
	},
	{
		name:  "a failed attempt is not undone",
		file:  "internal/quorum/lease.go",
		old:   "	for i := range l.entries {\n		l.entries[i].Release(&s.places[i], nil, false, p)\n	}\n",
		new:   "	_, _ = p, s\n",
		quick: true,
	},
	{
		name: "a release without an answer is forgotten",
		file: "internal/node/debt.go",
		old:  "	if d.closed || len(d.open) >= maxDebts {\n",
		new:  "	if true {\n",
	},
	{
		name: "a refresh shortens a ttl",
		file: "lua/refresh.lua",
		old:  "if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then",
		new:  "if true then",
	},
	{
		name: "a handoff keeps the token",
		file: "internal/flight/lease.go",
		old:  "	f.tokens[0].next++\n",
		new:  "	if f.used == 0 {\n		f.tokens[0].next++\n	}\n",
	},
	{
		name: "a repair is counted as a vote",
		file: "internal/quorum/round.go",
		old:  "	if rep.Kind == node.Granted || rep.Kind == node.Renewed {\n",
		new: "	if rep.Kind == node.Missing && r.op == \"refresh\" && !r.decided {\n" +
			"		rep = node.Reply{Kind: node.Renewed, Counter: r.floor}\n" +
			"		defer l.repair(i)\n	}\n	if rep.Kind == node.Granted || rep.Kind == node.Renewed {\n",
		pkg: "./internal/quorum", by: "TestRepairIsNoVote",
	},
	{
		name: "tokens are reserved without a look at the counter",
		file: "lua/refresh.lua",
		old:  "c = math.max(c, tonumber(ARGV[3])) + tonumber(ARGV[4])",
		new:  "c = tonumber(ARGV[3]) + tonumber(ARGV[4])",
		pkg:  "./lua", by: "TestRefreshRaisesAndReserves",
	},
	{
		name: "tokens that nodes have only reserved are given",
		file: "internal/quorum/lease.go",
		old:  "	case agree:\n",
		new:  "	case agree || true:\n",
		pkg:  "./internal/quorum", by: "TestReservedTokensAreHadWhenConfirmed",
	},
	{
		name: "nodes that forgot vote at once",
		file: "quarantine.go",
		old:  "	return !c.opts.DisableQuarantine && ",
		new:  "	return false && ",
	},
	{
		name: "a node's epoch need not be established for its votes to count",
		file: "internal/quorum/quarantine.go",
		old:  "	return e.State == node.EpochKept || now != nil",
		new:  "	return true || now != nil",
	},
	{
		name: "a node that has just lost its data confirms refreshes",
		file: "internal/quorum/quarantine.go",
		old:  "	if now == nil || now.Name != e.Name {\n",
		new:  "	if true {\n		return true\n	} else if now == nil || now.Name != e.Name {\n",
		pkg:  "./internal/quorum", by: "TestNoConfirmationByANodeThatHasJustForgotten",
	},
	{
		name: "a lock that was put back on a node counts as one that was never gone",
		file: "internal/node/entry.go",
		old:  "	return e.kept\n",
		new:  "	return true\n",
		pkg:  "./internal/quorum", by: "TestNoConfirmationByANodeThatHasJustForgotten",
	},
	{
		name: "an attempt may be decided at any time",
		file: "internal/quorum/lease.go",
		old:  "	case l.slowLocked():\n",
		new:  "	case false && l.slowLocked():\n",
		pkg:  "./internal/quorum", by: "TestAnAttemptThatTakesLongerThanAVoteIsValid",
	},
	{
		name: "a node grants offers of the epoch before",
		file: "lua/release.lua",
		old:  "(%S+) ') == name and offer or nil",
		new:  "(%S+) ') and offer or nil",
		pkg:  "./internal/quorum", by: "TestAnOfferIsNotGrantedByANodeThatWasSetBack",
	},
	{
		name: "the scripts of the epoch before are loaded before boot.lua has answered",
		file: "internal/node/epoch.go",
		old:  "	next, err := s.runBoot(ctx, c.Client,",
		new: "	if e := s.epoch.Load(); e.Name != \"\" {\n		_ = loadScripts(ctx, c.Client, e.scripts())\n	}\n" +
			"	next, err := s.runBoot(ctx, c.Client,",
		pkg: "./internal/node", by: "TestNothingIsLoadedUnlessBootSucceeds",
	},
	{
		name: "the connection on which boot.lua has answered is dialled again",
		file: "internal/conn/options.go",
		old:  "			return nil, errDialed\n",
		new:  "			return dial(ctx, o.Network, o.Addr)\n",
		pkg:  "./internal/conn", by: "TestAClientForOneConnectionDialsOnce", // and, often, by NoSecondGrant...DuringBoot
	},
	{
		name: "nobody looks at the marker",
		file: "lua/epoch.lua",
		old:  "marker or marker ~= epoch\n",
		new:  "marker or false\n",
		pkg:  "./lua", by: "TestAcquireInAnEpoch",
	},
	{
		name: "the closer look does not look for the process",
		file: "lua/epoch.lua",
		old:  "    changed = not says(run)\n",
		new:  "    changed = false\n",
		pkg:  "./lua", by: "TestAcquireInAnEpoch",
	},
	{
		name: "a marker from a dump is taken for this process'",
		file: "lua/epoch.lua",
		old:  "  or raw and redis.pcall(",
		new:  "  or false and redis.pcall(",
		pkg:  "./lua", by: "TestBootOfAMarkerFromADump",
	},
	{
		name: "the first that may ask INFO believes what was begun without",
		file: "lua/boot.lua",
		old:  "or ran == '-' and (begun",
		new:  "or false and (begun",
		pkg:  "./lua", by: "TestBootByTheFirstWhoMayAskINFO",
	},
	{
		name: "a client that was refused INFO does not ask again",
		file: "lua/epoch.lua",
		old:  "changed = type(text) == 'string' and (string.find(text, 'run_id:%w') or",
		new:  "changed = false and (string.find(text, 'run_id:%w') or",
		pkg:  "./lua", by: "TestACloserLookSeesThatINFOMayBeAsked",
	},
	{
		name: "a client does not say that it knew a node which has no epoch now",
		file: "internal/node/epoch.go",
		old:  "		known = 1\n",
		new:  "		known = 0\n",
	},
	{
		name: "what a client knows of a node is not written there",
		file: "lua/boot.lua",
		old:  "  if state == 'new' and known then\n",
		new:  "  if false then\n",
		pkg:  "./lua", by: "TestBootOfANodeThatIsKnown",
	},
	{
		name: "a node that is no master votes",
		file: "lua/boot.lua",
		old:  "elseif role ~= 'master' then",
		new:  "elseif false then",
		pkg:  "./lua", by: "TestBootOfANodeThatIsNoMaster",
	},
	{
		name: "a process without run_id is told by its id alone",
		file: "lua/boot.lua",
		old:  "math.abs(begun - ranBegun) <= 2",
		new:  "true",
		pkg:  "./lua", by: "TestBootWithoutARunID",
	},
	{
		name: "an epoch is established before its process could be told from the next",
		file: "lua/boot.lua",
		old:  "not (byStart and second - begun < 5)",
		new:  "true",
		pkg:  "./lua", by: "TestBootWithoutARunID",
	},
	{
		name: "nobody looks when a server was last made a master",
		file: "lua/epoch.lua",
		old:  "if promoted and not changed then",
		new:  "if false then",
		pkg:  ".", by: "TestAFailoverAndBackWithoutADump",
	},
	{
		name: "a node with old data goes on from its old counters",
		file: "lua/reserve.lua",
		old:  "and c < floor + block then\n",
		new:  "and false then\n",
		pkg:  "./internal/sim", by: "TestTokensOfANodeThatForgotNeedTheClocks",
	},
	{
		name:  "a grant is valid from when its message comes",
		file:  "internal/quorum/offer.go",
		old:   "			return begun.Add(l.q.Validity(min(v.Span, p.span)))\n",
		new:   "			return clock.Now().Add(l.q.Validity(min(v.Span, p.span)))\n",
		quick: true, // one seed in five hundred notices it, too
		pkg:   "./internal/quorum", by: "TestAGrantNeedsNoRequest",
	},
	{
		name: "a vote counts however late its message comes",
		file: "internal/quorum/offer.go",
		old:  " && !clock.Passed(now, begun.Add(MaxVoteAge))",
		new:  "",
		pkg:  "./internal/quorum", by: "TestAnOldVoteIsAskedForAgain",
	},
	{
		name: "an offer that a release has brought is valid from when its message comes",
		file: "internal/quorum/offer.go",
		old:  "		return p.begun\n",
		new:  "		return clock.Now()\n",
		pkg:  "./internal/quorum", by: "TestAReleaseBringsTheNextOffer",
	},
	{
		name: "a lease that was granted for a caller that does not come stays",
		file: "internal/flight/rejoin.go",
		old:  "		f.returnAndDieLocked(o.lease)\n		return\n",
		new:  "",
		pkg:  "./internal/flight", by: "TestAGrantBeforeTheCallerComes",
	},
	{
		name: "a lease is valid as long as one of its votes",
		file: "internal/quorum/offer.go",
		old:  "least = min(least, clock.Left(now, v.until))",
		new:  "least = clock.Left(now, v.until)",
		pkg:  "./internal/quorum", by: "TestAGrantIsValidForTheLeastOfItsVotesByEitherClock",
	},
	{
		name: "a grant is kept as long as the one that releases says",
		file: "lua/release.lua",
		old:  "redis.pcall('SET', KEYS[1], owner, 'PX', span)",
		new:  "redis.pcall('SET', KEYS[1], owner, 'PX', ARGV[3])",
	},
	{
		name: "a grant of any node counts, whatever it has forgotten",
		file: "internal/node/offer.go",
		old:  "	return &Epoch{Name: name, State: EpochLost}\n",
		new:  "	return nil\n",
		pkg:  "./internal/quorum", by: "TestAGrantOfAnotherEpochIsNoVote",
	},
	{
		name: "a release grants in any epoch",
		file: "lua/release.lua",
		old:  "for _ = 1, changed and 0 or 100 do",
		new:  "for _ = 1, 100 do",
		pkg:  "./lua", by: "TestReleaseGrantsOnlyInItsEpoch",
	},
	{
		name: "a message about a grant counts from any node",
		file: "internal/quorum/offer.go",
		old:  "	if v.Node != i {\n",
		new:  "	if false {\n",
		pkg:  "./internal/quorum", by: "TestAGrantCountsForItsOwnNodeOnly",
	},
	{
		name: "a grant to nobody stays",
		file: "internal/quorum/offer.go",
		old:  "		q.returnGrant(i, v)\n",
		new:  "",
		pkg:  "./internal/quorum", by: "TestAGrantToNobodyIsPassedOn",
	},
	{
		name: "a grant that only a refresh has shown is forgotten",
		file: "internal/node/entry.go",
		old:  "how != notSent && rep.Kind != Missing && rep.Kind != Held {",
		new:  "false {",
		pkg:  "./internal/quorum", by: "TestAGrantWithoutAMessageIsReleasedAfterARefresh",
	},
	{
		name: "an attempt blocks its caller although an offer for a shorter ttl is open",
		file: "internal/flight/attempt.go",
		old:  "min(t.ttl, least) >=",
		new:  "min(t.ttl, minSpan) >=",
		pkg:  "./internal/flight", by: "TestAnAttemptDoesNotBlockForLongerThanAnOfferBeforeIsFor",
	},
	{
		name: "an attempt waits for a node that is noticed to be a duplicate",
		file: "internal/quorum/round.go",
		old:  "	r.replies[i] = rep\n	ends :=",
		new:  "	if l.duplicateMask&(1<<i) == 0 {\n		r.replies[i] = rep\n	}\n	ends :=",
		pkg:  "./internal/quorum", by: "TestADuplicateThatIsNoticedDuringTheRaise",
	},
	{
		name: "a lock is valid until its timer goes off",
		file: "internal/flight/ticket.go",
		old:  "	case clock.Passed(now, t.until):\n		return t.expiredLocked()",
		new:  "	case false && clock.Passed(now, t.until):\n		return t.expiredLocked()",
	},
	{
		name: "a waiter that leaves with the lease keeps it",
		file: "internal/flight/flight.go",
		old:  "		f.endLocked(t, released, nil)\n		f.handOverOrReleaseLocked(clock.Now())\n	}\n	return err\n",
		new:  "	}\n	return err\n",
		pkg:  "./internal/flight", by: "TestLeaveAfterGrantPassesOn",
	},
	{
		name: "a recall is ignored",
		file: "internal/flight/retained.go",
		old:  "		f.shard().counts.recalled.Add(1)\n		f.noteRecallLocked()\n		f.releaseLocked()\n",
		new:  "		f.shard().counts.recalled.Add(1)\n",
	},
	{
		name: "a retained lease is used after its validity",
		file: "internal/flight/retained.go",
		old:  "	case left <= 0:\n		f.releaseLocked()\n	case left < f.enough(t), f.tokensLeftLocked() == 0:",
		new:  "	case f.tokensLeftLocked() == 0:",
		pkg:  "./internal/flight", by: "TestARetainedLeaseIsNotUsedAfterItsValidity",
	},
	{
		name: "a retained lease is refreshed while idle",
		file: "internal/flight/lease.go",
		old:  "		if f.retainLocked(now) {\n",
		new: "		if f.retainLocked(now) {\n			l := f.lease\n			f.deferLocked(func() {\n" +
			"				l.Refresh(f.attemptTTL, 0, f.g.cfg.NodeTimeout, false, func(g quorum.Grant, why *quorum.Failure) {\n" +
			"					f.refreshed(l, false, g, why)\n				})\n			})\n",
		pkg: "./internal/flight", by: "TestARetainedLeaseIsNotRefreshed",
	},
	{
		name: "a retained lease is given to a local caller after the recall",
		file: "internal/flight/retained.go",
		old:  "		f.noteRecallLocked()\n		f.releaseLocked()\n",
		new: "		f.noteRecallLocked()\n		f.armLocked(clock.Now().Add(10 * time.Millisecond)) // soon\n" +
			"		f.retention.ends = f.g.at(clock.Now().Add(10 * time.Millisecond))\n",
	},
	{
		name: "a lease whose recall came before the grant is retained",
		file: "internal/flight/retained.go",
		old:  "		f.recalled = true\n		return\n",
		new:  "		return\n",
		pkg:  "./internal/flight", by: "TestARecallOfALeaseInUse",
	},
	{
		name: "a lease that is used again and again is renewed without a check",
		file: "internal/flight/lease.go",
		old:  "	checks = checks || f.checksReuseLocked()\n",
		new:  "",
		pkg:  "./internal/flight", by: "TestALeaseThatIsUsedAgainEndsWithoutARecall",
	},
	{
		name: "leases are retained although the inbox is not confirmed any more",
		file: "internal/flight/retained.go",
		old:  "	f.marked = false\n	if f.phase == retained {\n",
		new:  "	if false {\n",
		pkg:  "./internal/flight", by: "TestWhatIsNotRetained",
	},
}

// root is the module's directory, from here.
const root = "../.."

// patched is the mutated text of its file.
func (m mutation) patched(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, m.file))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(text), m.old); n != 1 {
		t.Fatalf("%q: %s has the text to be replaced %d times, want once:\n%s", m.name, m.file, n, m.old)
	}
	return strings.Replace(string(text), m.old, m.new, 1)
}

// overlay is the file that makes the go command use the mutated text.
func (m mutation) overlay(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	changed := filepath.Join(dir, filepath.Base(m.file))
	write(t, changed, []byte(m.patched(t)))
	at, err := filepath.Abs(filepath.Join(root, m.file))
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(map[string]map[string]string{"Replace": {at: changed}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "overlay.json")
	write(t, file, text)
	return file
}

func write(t *testing.T, file string, text []byte) {
	t.Helper()
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
}

// Every mutation still finds its text. If one does not, the rule has moved, and so must the
// mutation.
func TestMutationsApply(t *testing.T) {
	for _, m := range mutations {
		m.patched(t)
	}
}

// Each broken rule is detected, in 1,000 seeds or by the named test. Two are tried side by side,
// except named tests: they may have servers, with deadlines that a busy machine misses.
func TestMutationsAreNoticed(t *testing.T) {
	var tried []mutation
	for _, m := range mutations {
		if m.quick || *mutationsFlag {
			tried = append(tried, m)
		}
	}
	free := make(chan struct{}, 2) // one token for each that is under way
	var alone sync.RWMutex
	answers := make([]chan func(t *testing.T), len(tried))
	for i, m := range tried {
		overlay, bin := m.overlay(t), filepath.Join(t.TempDir(), "mutated.test")
		answers[i] = make(chan func(t *testing.T), 1)
		go func() {
			if m.by != "" {
				alone.Lock()
				defer alone.Unlock()
			} else {
				alone.RLock()
				defer alone.RUnlock()
			}
			free <- struct{}{}
			noticed, how := m.try(overlay, bin)
			<-free
			answers[i] <- func(t *testing.T) {
				if noticed {
					t.Logf("%-55s noticed %s", m.name, how)
				} else {
					t.Errorf("%-55s NOT noticed: %s", m.name, how)
				}
			}
		}()
	}
	for i, m := range tried {
		answer := <-answers[i]
		t.Run(m.name, answer)
	}
}

// try builds bin with the mutation and reports whether that was detected, and how.
func (m mutation) try(overlay, bin string) (noticed bool, how string) {
	pkg, run := "./internal/sim", []string{"-test.run", "^TestSim$", "-seeds", "1000", "-enough", "1"}
	if m.by != "" {
		pkg, run = m.pkg, []string{"-test.run", "^" + m.by + "$"}
	}
	build := exec.Command("go", "test", "-c", "-vet=off", "-overlay", overlay, "-o", bin, pkg)
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		return false, fmt.Sprintf("it does not build: %v\n%s", err, out)
	}
	cmd := exec.Command(bin, run...)
	cmd.Dir = filepath.Join(root, pkg)
	out, err := cmd.CombinedOutput()
	if err == nil {
		return false, string(out)
	}
	if m.by != "" {
		return strings.Contains(string(out), "--- FAIL: "+m.by), "by " + m.by
	}
	found := firstViolation.FindStringSubmatch(string(out))
	if found == nil {
		return false, string(out[:min(len(out), 4000)])
	}
	return true, fmt.Sprintf("by seed %s: %s", found[1], short(found[2]))
}

var firstViolation = regexp.MustCompile(`seed (\d+): ([^\n]+)`)
