package links

import (
	"errors"
	"fmt"
	"io"
)

// variant is the protocol without some rules, and what some walk must find then; "": none finds anything. In
// all plots, two clients want the vote of node 0, which has the fault.
type variant struct{ name, without, breaks, plot string }

var variants = []variant{
	{"all rules", "", "", ""},
	{"S25 (a): one boot is enough for all connections to a node", "bootEach", twoHolders,
		"ask1! failover001 dial001! ask!"},
	{"S25 (b): an acquire does not compare the marker", "acquireCompares", twoHolders, "ask1! flush ask!"},
	{"S25 (b): an undo does not compare the marker", "undoCompares", "", ""},
	{"S25 (c): the encoding is not checked", "checkRaw", twoHolders, "ask1! failover003 failover003 ask!"},
	{"S25 (c): the history is not checked", "checkHistory", twoHolders, "ask1! failover003 swap ask!"},
	{"S25 (c): a check does not compare the marker's name", "checkNames", twoHolders,
		"ask1! failover003 failover003 ask execute boot2! pump"},
	{"S25 (c): a check's age counts from its reply", "agesFromSending", twoHolders,
		"ask1! check execute failover003 failover003 ask execute receive receive pump"},
	{"S25 (c): a message needs no check", "messageChecked", twoHolders,
		"ask2! ask! sync release2 close2 dial201! ask1! failover003 failover003 late pump"},
	{"S25 (c): a recent check suffices for a message", "messageBehind", twoHolders,
		"ask2! ask! sync release2 close2 dial201! ask1! failover003 late pump"},
	{"S25 (c): behind a message the marker and the role suffice", "historyBehind", "", ""},
	{"S25 (d): votes count in any epoch", "established", twoHolders, "ask1! flush boot! tick005 ask!"},
	{"S25 (d): votes by message do", "messageEstablished", twoHolders,
		"close02 ask! giveup! dial021! close2 ask2! dial201! ask execute receive001 flush boot2! repair2! boot1! " +
			"ask1! release201! pump pump1 tick005 refresh1!"},
	{"S25 (e): a boot is sent again with its name", "freshNames", twoHolders,
		"flush close dial001 close dial001! boot1! tick007 boot! boot1! ask1! flush late ask!"},
	{"S25 (f): a boot does not say what its client knows", "known", twoHolders,
		"dial011! ask1! flushall boot! boot01! boot02! boot1! boot2! bootstrap! pump ask!"},
	{"S25 (f): a bootstrap does not wait", "waitsForKnown", twoHolders,
		"ask1! flushall fresh dial001! dial011! dial021! bootstrap pump ask!"},
	{"S17: pass does not compare marker and ARGV", "passMarker", "", ""},
	{"S17: pass does not compare marker and offer", "passOffer", "", ""},
	{"S17: pass compares nothing", "passMarker passOffer", "", ""},
	{"S17: a message counts in any epoch", "messageNames", "", ""},
	{"S17: pass compares nothing, and messages count in any epoch", "passMarker passOffer messageNames", "", ""},
	{"S17: the same, and a recent check suffices for a message",
		"passMarker passOffer messageNames messageBehind", twoHolders,
		"ask2! ask1! tick006 ask1! sync close2 refresh2! tick004 check1! ask execute receive001 execute " +
			"receive001 failover003 dial201! release201! pump pump1"},
	{"S17: undo before boot", "undoAfterBoot", "", ""},
	{"S19: a closed link delivers", "closedIsSilent", twoHolders, "ask execute close dial001! ask1! receive002"},
	{"S19: acquires are sent again after their undo", "wanted", leftKey,
		"scripts ask execute boot1! giveup001 execute pump"},
	{"S19: \"missing\" proves that nothing is left", "doubts", leftKey, "ask close giveup001! dial001! late"},
	{"after NOSCRIPT, scripts are loaded without a boot", "bootAgain", "", ""},
	{"a node confirms refreshes right after its loss", "confirmsLater", twoHolders,
		"close02 ask! giveup! dial021! close2 ask2! dial201! tick006 ask1 execute1 receive101 execute1 " +
			"receive101 flush boot2! repair2! refresh2 execute2 execute22 receive201 receive221 tick004 pump1"},
	{"tokens: no floor for acquires", "acquireFloor", lowToken,
		"ask1! release101! ask1! release101! restart002 dial001! tick007 boot! ask!"},
	{"tokens: no floor for offers", "offerFloor", lowToken,
		"ask2! save refresh2 close2 release202! dial201! ask1! release101! ask1! release101! ask1! release101! " +
			"ask1! release101! ask1! restart002 dial101! dial001! release1 close1 tick006 late tick004 tick003 " +
			"boot! tick005 tick003 tick003 ask! giveup001! tick004 tick003 late pump askoffer02!"},
	{"limit: servers are swapped faster than checks age", "slowSwaps", twoHolders,
		"ask1! check! failover003 swap ask!"},
	{"the same, but each vote has a check behind it", "slowSwaps ages", "", ""},
}

// walk makes the walk with that seed. If v has no plot, it is one of the others'.
func (v variant) walk(seed int) ([]step, *world) {
	w, plot := newWorld(v.without, nil), v.plot
	if plot == "" {
		plot = variants[seed%len(variants)].plot
	}
	return w.randomWalk(seed, parse(plot)), w
}

// play makes walks, writes the shortest counterexample, and returns an error if they find what they should
// not, or not what they should. Without out, it ends when that is known.
func (v variant) play(out io.Writer, walks int) error {
	found, leases, best, what := map[string]int{}, 0, []step(nil), ""
	for seed := range walks {
		walk, w := v.walk(seed)
		leases += w.leases
		if w.found == "" {
			continue
		}
		if found[w.found]++; out != nil && found[w.found] <= 20 && (w.found == v.breaks || v.breaks == "") {
			if walk = shortest(v.without, walk, w.found); best == nil || len(walk) < len(best) {
				best, what = walk, w.found
			}
		}
		if out == nil && (w.found == v.breaks || v.breaks == "") {
			break
		}
	}
	if out != nil {
		fmt.Fprintf(out, "%s: %d leases in %d walks, found %v\n", v.name, leases, walks, found)
		if best != nil {
			newWorld(v.without, out).run(best)
		}
	}
	if v.breaks == "" && len(found) > 0 || v.breaks != "" && found[v.breaks] == 0 {
		return fmt.Errorf("%s: found %v %s, not %q", v.name, found, what, v.breaks)
	}
	return nil
}

// Play makes walks with all rules, and with each taken out; or, with only, in the variant of that name. It
// returns how many variants it has played.
func Play(out io.Writer, walks int, only string) (played int, err error) {
	for _, v := range variants {
		if only == "" || v.name == only {
			played++
			err = errors.Join(err, v.play(out, walks))
		}
	}
	return played, err
}
