package quorum

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/redis/go-redis/v9"
)

// A mute lease has n nodes that receive no requests: a test plays their answers.
func muteLease(t *testing.T, n int) *Lease {
	t.Helper()
	var nodes []*node.Node
	for i := range n {
		conn := redis.NewClient(&redis.Options{Addr: fmt.Sprintf("10.0.0.%d:6379", i+1)})
		t.Cleanup(func() { _ = conn.Close() })
		nd, err := node.New(conn, time.Second, false)
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, nd)
	}
	q := New(Config{Nodes: nodes, NodeTimeout: time.Hour, DriftFactor: 0.01,
		Owner: func() string { return "o" }})
	l := prepare(q, key, ttl, 1)
	l.everHeld = math.MaxUint64 // what is missing was lost
	return l
}

// A letter stands for what one node answered.
//
//	.  nothing yet
//	y  a vote for us
//	h  held by another
//	m  missing (refresh and release only)
//	e  an error that may pass
//	f  an error that a retry cannot change
func replyOf(letter rune, vote node.Kind) node.Reply {
	switch letter {
	case 'y':
		return node.Reply{Kind: vote, Counter: 1}
	case 'h':
		return node.Reply{Kind: node.Held, Holder: "x", TTL: time.Second}
	case 'm':
		return node.Reply{Kind: node.Missing}
	case 'e':
		return node.Reply{Kind: node.Failed, Err: errors.New("refused")}
	case 'f':
		return node.Reply{Kind: node.Failed, Err: serverError("WRONGTYPE Operation against a key")}
	}
	return node.Reply{}
}

// serverError is an error as a server sends it.
type serverError string

func (e serverError) Error() string { return string(e) }
func (serverError) RedisError()     {}

// words lists all combinations of n of the letters.
func words(letters string, n int) []string {
	all := []string{""}
	for range n {
		var longer []string
		for _, w := range all {
			for _, l := range letters {
				longer = append(longer, w+string(l))
			}
		}
		all = longer
	}
	return all
}

// The specification. won is the outcome of a round that found its majority.
const won Reason = 0

// specOutcome says what complete answers mean, by DESIGN's table of errors.
func specOutcome(op, answers string) Reason {
	n := len(answers)
	majority := map[int]int{1: 1, 2: 2, 3: 2, 4: 3, 5: 3}[n]
	count := func(letters string) (c int) {
		for _, l := range answers {
			if strings.ContainsRune(letters, l) {
				c++
			}
		}
		return c
	}
	othersBlock := func(letters string) bool { return n-count(letters) < majority }
	switch {
	case count("y") >= majority:
		return won
	case op == "acquire" && othersBlock("h"):
		return Taken
	case op == "acquire" && count("h") > 0 && count("yh") >= majority: // answered, and split
		return Taken
	case op != "acquire" && othersBlock("hm"):
		return NotHeld
	}
	return Unreachable
}

// specSettled reports whether all ways to fill in the missing answers come to the same, and to
// what.
func specSettled(op, answers string) (Reason, bool) {
	type known struct {
		r  Reason
		ok bool
	}
	id := op + answers
	if k, ok := settled.Load(id); ok {
		return k.(known).r, k.(known).ok
	}
	r, ok := bruteForce(op, answers)
	settled.Store(id, known{r, ok})
	return r, ok
}

var settled sync.Map // what bruteForce has found out

func bruteForce(op, answers string) (Reason, bool) {
	letters := "yhe"
	if op != "acquire" {
		letters = "yhme"
	}
	var outcomes []Reason
	for _, fill := range words(letters, strings.Count(answers, ".")) {
		whole := answers
		for _, l := range fill {
			whole = strings.Replace(whole, ".", string(l), 1)
		}
		if o := specOutcome(op, whole); !slices.Contains(outcomes, o) {
			outcomes = append(outcomes, o)
		}
	}
	return outcomes[0], len(outcomes) == 1
}

// specUnrecoverable reports whether errors that a retry cannot change put the majority
// out of reach.
func specUnrecoverable(answers string) bool {
	n := len(answers)
	return n-strings.Count(answers, "f") < n/2+1
}

var ops = []struct {
	name string
	vote node.Kind
}{
	{"acquire", node.Granted}, {"refresh", node.Renewed}, {"release", node.Deleted},
}

func lettersOf(op string) string {
	if op == "acquire" {
		return ".yhef"
	}
	return ".yhmef"
}

// A round is decided exactly when the answers that are still missing cannot change its
// outcome any more, and the reason it gives is the one that complete answers would give.
// So a held key is never called unreachable because errors came first, nor the reverse.
func TestRoundIsDecidedAsSoonAsItIsSettled(t *testing.T) {
	for n := 1; n <= 5; n++ {
		l := muteLease(t, n)
		for _, op := range ops {
			for _, answers := range words(lettersOf(op.name), n) {
				checkState(t, l, op.name, op.vote, answers)
			}
		}
	}
}

func checkState(t *testing.T, l *Lease, op string, vote node.Kind, answers string) {
	r := &round{l: l, op: op, want: vote}
	for _, letter := range answers {
		r.replies = append(r.replies, replyOf(letter, vote))
	}
	want, settled := specSettled(op, answers)
	hopeless := specUnrecoverable(answers)
	if op == "acquire" && hopeless {
		want, settled = Unreachable, true // at once, whatever else there is
	}
	if got := r.decideLocked(false); got != settled {
		t.Errorf("%s %q: decided %v, want %v", op, answers, got, settled)
		return
	}
	if !settled {
		return
	}
	if r.won != (want == won) {
		t.Errorf("%s %q: won %v, want %v", op, answers, r.won, want == won)
	}
	if f := r.failureLocked(); !r.won && (f.Reason != want || f.Final != hopeless) {
		t.Errorf("%s %q: reason %d final %v, want %d, %v", op, answers, f.Reason, f.Final, want, hopeless)
	}
}

// In whatever order the answers come in, a round is decided once, by the first of them
// that settles it, and to the same end.
func TestOrderOfAnswersDoesNotMatter(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for n := 1; n <= 5; n++ {
		l := muteLease(t, n)
		for _, op := range ops {
			for _, answers := range words(strings.Trim(lettersOf(op.name), ".f"), n) {
				for range 2 {
					playRound(t, l, op.name, op.vote, answers, rng.Perm(n))
				}
			}
		}
	}
}

func playRound(t *testing.T, l *Lease, op string, vote node.Kind, answers string, order []int) {
	decisions := 0
	r := l.newRound(op, vote, 0, func(*round) { decisions++ })
	known := []rune(strings.Repeat(".", len(answers)))
	for _, i := range order {
		known[i] = rune(answers[i])
		r.Answer(i, replyOf(known[i], vote))
		_, settled := specSettled(op, string(known))
		if (decisions == 1) != settled || decisions > 1 {
			t.Fatalf("%s %q in order %v: %d decisions after %q", op, answers, order, decisions, string(known))
		}
	}
	want := specOutcome(op, answers)
	if r.won != (want == won) || !r.won && r.failureLocked().Reason != want {
		t.Fatalf("%s %q in order %v: won %v, %s, want %d", op, answers, order, r.won, describe(r.failureLocked()),
			want)
	}
	for i := range answers { // late and repeated votes change nothing
		r.Answer(i, replyOf('y', vote))
	}
	if decisions != 1 || r.won != (want == won) {
		t.Fatalf("%s %q: a late answer changed the outcome", op, answers)
	}
}

// The same node's second answer replaces its first: no vote counts twice (S15).
func TestTwoAnswersOfOneNodeAreOneVote(t *testing.T) {
	l := muteLease(t, 3)
	r := l.newRound("acquire", node.Granted, 0, func(*round) {})
	r.Answer(0, replyOf('y', node.Granted))
	r.Answer(0, replyOf('y', node.Granted))
	if r.decided {
		t.Fatal("one node made a majority of three")
	}
}

// A raise counts only votes whose counter is at the floor or above.
func TestVoteBelowTheFloorIsNone(t *testing.T) {
	l := muteLease(t, 3)
	r := l.newRound("acquire", node.Renewed, 10, func(*round) {})
	r.Answer(0, node.Reply{Kind: node.Renewed, Counter: 10})
	r.Answer(1, node.Reply{Kind: node.Renewed, Counter: 9})
	if r.decided {
		t.Fatal("decided with one vote at the floor")
	}
	r.Answer(2, node.Reply{Kind: node.Renewed, Counter: 11})
	if !r.won {
		t.Fatal("two votes at the floor do not make a majority")
	}
}

// A node of which only a refresh has shown that it had the key has lost it, if the release does not find it
// there: the other node without the key, which never had it, may have been somebody else's since.
func TestANodeThatHasRenewedHasHadTheKey(t *testing.T) {
	l := muteLease(t, 3)
	l.phase, l.until, l.everHeld = held, time.Now().Add(time.Hour), 0
	r := l.newRound("refresh", node.Renewed, 0, func(*round) {})
	for i := range 2 {
		r.Answer(i, node.Reply{Kind: node.Renewed, Counter: 1})
	}
	released := false
	var got *Failure
	r = l.newRound("release", node.Deleted, 0, func(r *round) {
		if released = true; !r.won {
			got = r.failureLocked()
		}
	})
	for i, kind := range []node.Kind{node.Deleted, node.Missing, node.Missing} {
		r.Answer(i, node.Reply{Kind: kind})
	}
	if !released {
		t.Fatal("it is not decided")
	}
	wantReason(t, got, NotHeld)
}

// A release waits for a node whose answer makes a majority together with those that never had the key,
// however many others fail.
func TestAReleaseWaitsForThoseThatStillDecide(t *testing.T) {
	l := muteLease(t, 5)
	l.phase, l.until, l.everHeld = held, time.Now().Add(time.Hour), 0b11101
	var decided *round
	r := l.newRound("release", node.Deleted, 0, func(r *round) { decided = r })
	failed := node.Reply{Kind: node.Failed, Err: errors.New("refused")}
	for i, rep := range []node.Reply{{Kind: node.Deleted}, {Kind: node.Missing}, failed, failed} {
		if r.Answer(i, rep); decided != nil {
			t.Fatalf("decided by %d answers", i+1)
		}
	}
	if r.Answer(4, node.Reply{Kind: node.Deleted}); decided == nil || !decided.won {
		t.Error("not released: two have deleted the key, and one never had it")
	}
}

// Tokens that a refresh has reserved are not had by a later one that a majority confirms without its
// counters, as a Cluster does that has the key and the counter apart. They stay reserved.
func TestTokensAreNotHadWithoutTheirCounters(t *testing.T) {
	l := muteLease(t, 3)
	l.phase, l.until, l.top, l.reserved = held, time.Now().Add(time.Hour), 10, 3
	for _, x := range []struct {
		counters    [2]int64
		first, last int64
	}{{[2]int64{10, 0}, 1, 0}, {[2]int64{0, 9}, 1, 0}, {[2]int64{10, 11}, 8, 10}} {
		var got Grant
		ref := refresh{confirms: true, before: l.until, after: l.until, done: func(g Grant, f *Failure) {
			if got = g; f != nil {
				t.Errorf("%v: %v", x.counters, f)
			}
		}}
		r := l.newRound("refresh", node.Renewed, 0, func(r *round) { l.refreshed(r, ref) })
		for i, c := range x.counters {
			r.Answer(i, node.Reply{Kind: node.Renewed, Counter: c})
		}
		if got.First != x.first || got.Last != x.last {
			t.Errorf("counters %v: tokens %d to %d, want %d to %d", x.counters, got.First, got.Last, x.first, x.last)
		}
	}
}

// A majority of n nodes is n/2+1: 3 of 4, so that two halves cannot both have it.
func TestMajorities(t *testing.T) {
	for n, want := range map[int]int{1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 4} {
		if got := New(Config{Nodes: slices.Repeat([]*node.Node{{}}, n)}).Need(); got != want {
			t.Errorf("%d nodes: %d, want %d", n, got, want)
		}
	}
}

// Validity loses ttl*DriftFactor and 2ms (S3).
func TestValidityLosesDrift(t *testing.T) {
	q := New(Config{DriftFactor: 0.01})
	for ttl, want := range map[time.Duration]time.Duration{
		time.Second: 988 * time.Millisecond, 10 * time.Millisecond: 7900 * time.Microsecond,
	} {
		if got := q.Validity(ttl); got != want {
			t.Errorf("validity of %v is %v, want %v", ttl, got, want)
		}
	}
}

// A failure says when a majority could be free (S7): a node that granted is free now, one
// that has not answered yet may be, one that is held frees itself 1ms after its PTTL. A
// ttl below 0 is unknown, not now; one that failed is not counted on.
func TestFreeIsWhenAMajorityCouldBeFree(t *testing.T) {
	const pending, granted, failed = -10, -20, -30 // other numbers: held, with that PTTL
	for _, c := range []struct {
		nodes []int
		want  time.Duration
	}{
		{[]int{100}, ms(101)},
		{[]int{100, 300, 200}, ms(201)},
		{[]int{granted, 300, 200}, ms(201)},
		{[]int{failed, 300, 200}, ms(301)},
		{[]int{pending, 300, 200}, ms(201)}, // the one that is silent may be free
		{[]int{pending, pending, 500, 300, 400}, ms(301)},
		{[]int{100, -1, 200}, ms(201)},
		{[]int{-1, -1, 200}, 0},
		{[]int{-2, -2, 200}, 0},
		{[]int{0, 0, 200}, ms(1)},
		{[]int{100, 200}, ms(201)},
		{[]int{granted, 200}, ms(201)},
		{[]int{granted, granted, 300, 200}, ms(201)},
		{[]int{500, 100, 400, 200, 300}, ms(301)},
	} {
		r := &round{l: muteLease(t, len(c.nodes)), op: "acquire", want: node.Granted}
		for _, pttl := range c.nodes {
			rep := node.Reply{Kind: node.Held, TTL: ms(pttl)}
			switch pttl {
			case pending:
				rep = node.Reply{}
			case granted:
				rep = replyOf('y', node.Granted)
			case failed:
				rep = replyOf('e', node.Granted)
			}
			r.replies = append(r.replies, rep)
		}
		if f := r.failureLocked(); f.Reason != Taken || f.Free != c.want {
			t.Errorf("%v: reason %d, free in %v, want %v", c.nodes, f.Reason, f.Free, c.want)
		}
	}
}

// A failure names every node and what it said, or that it said nothing.
func TestFailureNamesEveryNode(t *testing.T) {
	r := &round{l: muteLease(t, 3), op: "acquire", want: node.Granted}
	r.replies = []node.Reply{replyOf('h', node.Granted), replyOf('e', node.Granted), {}}
	f := r.failureLocked()
	for i, want := range []string{"10.0.0.1:6379", "10.0.0.2:6379", "10.0.0.3:6379"} {
		if f.Nodes[i].Name != want {
			t.Errorf("node %d is called %q", i, f.Nodes[i].Name)
		}
	}
	if f.Nodes[0].Reply.Holder != "x" || f.Nodes[1].Reply.Err == nil || f.Nodes[2].Reply.Err == nil {
		t.Error(describe(f))
	}
	r.expired = true
	if err := r.failureLocked().Nodes[2].Reply.Err; !strings.Contains(err.Error(), "validity was over") {
		t.Errorf("the mute node: %v", err)
	}
	if got := f.Error(); got != "acquire: 0 of 2 votes" {
		t.Error(got)
	}
}
