package lua_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
)

var letters = map[lua.Script]byte{
	lua.Acquire: lua.LetterAcquire,
	lua.Refresh: lua.LetterRefresh,
	lua.Release: lua.LetterRelease,
	lua.Undo:    lua.LetterUndo,
}

// operation is a call of one of the scripts that a batch may have.
type operation struct {
	script lua.Script
	keys   []string
	args   []any
}

// group is how many of the first operations can go as a group of releases; 0 if not even two can.
func group(all []operation) int {
	seen := map[string]bool{}
	for i, op := range all {
		if op.script != lua.Release || len(op.args) != 3 || seen[op.keys[0]] {
			if i < 2 {
				return 0
			}
			return i
		}
		seen[op.keys[0]] = true
	}
	return 0 // of a batch that is nothing else, for a change
}

// batch runs operations as one, and returns the reply of each, a value or an error.
func (s *store) batch(all ...operation) []any {
	s.t.Helper()
	var keys, wants []string
	var shapes strings.Builder
	args := []any{nil}
	last := map[byte][]any{}
	n := group(all)
	if n > 0 {
		fmt.Fprintf(&shapes, "%c%c0", lua.LetterGroup, '0'+n)
		for _, op := range all[:n] {
			keys, wants, args = append(keys, op.keys[0]), append(wants, op.keys[1]), append(args, op.args[0])
		}
		keys, args = append(keys, wants...), append(args, all[0].args[1:]...)
	}
	for _, op := range all[n:] {
		letter, values := letters[op.script], len(op.args)
		if before, ok := last[letter]; ok && slices.Equal(before[1:], op.args[1:]) {
			args, values = append(args, op.args[0]), 0
		} else {
			args = append(args, op.args...)
		}
		last[letter] = op.args
		fmt.Fprintf(&shapes, "%c%d%d", letter, len(op.keys), values)
		keys = append(keys, op.keys...)
	}
	args[0] = shapes.String()
	answers := s.answers(lua.Batch, keys, args...)
	if len(answers) != len(all) {
		s.t.Fatalf("%d answers to %d operations", len(answers), len(all))
	}
	return answers
}

// answers is the reply to a batch, its errors as such.
func (s *store) answers(batch lua.Script, keys []string, args ...any) []any {
	s.t.Helper()
	answers, err := s.Eval(context.Background(), batch.Source, keys, args...).Slice()
	if err != nil {
		s.t.Fatal(err)
	}
	for i, answer := range answers {
		if list, is := answer.([]any); is && len(list) == 1 {
			answers[i] = errors.New(list[0].(string))
		}
	}
	return answers
}

// amongOthers runs op in a batch between operations that have all possible keys and arguments, and
// must not affect it.
func (s *store) amongOthers(op operation) (any, error) {
	s.t.Helper()
	keys := []string{"no-lock", "no-bucket", "no-wants"}
	noise := []operation{
		{lua.Acquire, keys, []any{"x", 1, 0, int64(1 << 40), "noise-1", "1 1 1 1 - noise", "waits"}},
		{lua.Refresh, keys, []any{"x", 2, 3, 4, "noise-1"}},
		{lua.Release, []string{keys[1], keys[2], keys[0]}, []any{"y", "PUBLISH", 7, "noise-1", "noise-2", "look", "leaves"}},
		{lua.Undo, keys[1:], []any{"y", "noise-1", ""}},
	}
	if err := s.Set(context.Background(), keys[0], "noise", time.Minute).Err(); err != nil { // no operation gets it
		s.t.Fatal(err)
	}
	answer := s.batch(slices.Concat(noise, []operation{op}, noise)...)[len(noise)]
	s.Del(context.Background(), keys...)
	if err, is := answer.(error); is {
		return nil, err
	}
	return answer, nil
}

// An operation in a batch does and replies the same as its script does by itself, whatever else is
// in the batch: the same random operations run one by one on one server and in batches on another,
// which are the same afterwards. Some keys hold what no script can use.
func TestABatchDoesWhatTheScriptsDo(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	alone := onServer(t)
	together := onServer(t)
	rounds := 50
	if redistest.Long() {
		rounds = 200
	}
	for round, tries := 0, 0; round < rounds; tries++ {
		if tries == 1000 {
			t.Fatalf("of %d rounds, %d were quick enough for a comparison", tries, round)
		}
		began := time.Now()
		differs := batchesDiffer(alone, together, rnd)
		if time.Since(began) > 4*time.Second {
			continue // what was done at different times lives for different times, and may have expired
		}
		if round++; differs != "" {
			t.Fatalf("round %d: %s", round, differs)
		}
	}
}

// batchesDiffer executes random operations, alone and in batches, and says where that is not the same.
func batchesDiffer(alone, together *store, rnd *rand.Rand) string {
	for _, s := range []*store{alone, together} {
		s.reset()
		s.set("bucket0", 1000, 0) // counters that begin at the clock would differ
		s.set("bucket1", 5000, 0)
		s.set("bucket2", "no counter", 0)
		s.RPush(s.t.Context(), "k5", "a list")
		s.set("wants4", "no set", 0)
	}
	for range 6 {
		ops := randomOperations(rnd, 1+rnd.IntN(40))
		got := together.batch(ops...)
		for i, op := range ops {
			want, err := alone.run(op.script, op.keys, op.args...)
			if err != nil {
				want = err
			}
			if !sameAnswer(got[i], want) {
				return fmt.Sprintf("operation %d, %c %v %v: %v in a batch, %v alone",
					i, letters[op.script], op.keys, op.args, got[i], want)
			}
		}
		if got, want := together.all(), alone.all(); !slices.Equal(got, want) {
			return fmt.Sprintf("after batches\n%q, else\n%q", got, want)
		}
	}
	return ""
}

// contenders gives each a name of its own.
var contenders int

// randomOperations are of one batch. Not more than one of them makes a want for the same key:
// Valkey, and Redis from 7.2 on, stop the clock for a script, so in a batch two would come at
// the same time, and be in the order of their names.
func randomOperations(rnd *rand.Rand, n int) []operation {
	ops, wanted := make([]operation, 0, n), map[string]bool{}
	if rnd.IntN(2) == 0 {
		for _, k := range rnd.Perm(6)[:2+rnd.IntN(5)] {
			ops = append(ops, plainRelease(rnd, k))
		}
	}
	for len(ops) < n {
		op := randomOperation(rnd)
		wants := op.keys[len(op.keys)-1]
		makes := len(op.args) == 5 && op.script != lua.Refresh || len(op.args) == 2 && op.script == lua.Undo
		if makes && wanted[wants] {
			continue
		}
		wanted[wants] = wanted[wants] || makes
		ops = append(ops, op)
	}
	return ops
}

func randomOperation(rnd *rand.Rand) operation {
	n := rnd.IntN(6)
	lock, wants := fmt.Sprint("k", n), fmt.Sprint("wants", n)
	bucket := fmt.Sprint("bucket", n%3)
	owner := fmt.Sprint("owner", rnd.IntN(3))
	contender := fmt.Sprintf("c%d-%03d", rnd.IntN(3), rnd.IntN(4))
	if rnd.IntN(2) == 0 {
		contenders++
		contender = fmt.Sprintf("d%d-%09d", rnd.IntN(9), contenders)
	}
	ttl := 30_000 + 10_000*rnd.IntN(3)
	three := []string{lock, bucket, wants}
	switch rnd.IntN(10) {
	case 0, 1:
		return operation{lua.Acquire, three[:2], []any{owner, ttl, 1}}
	case 2:
		return operation{lua.Acquire, three, []any{owner, ttl, rnd.IntN(5), 0, contender}}
	case 3:
		return operation{lua.Acquire, three[:2], []any{owner, ttl, 0, 1000 + rnd.IntN(5000)}}
	case 4:
		return operation{lua.Refresh, three[:2], []any{owner, ttl, rnd.IntN(7000), rnd.IntN(3)}}
	case 5:
		return operation{lua.Refresh, three, []any{owner, ttl, rnd.IntN(7000), rnd.IntN(3), contender}}
	case 6:
		if rnd.IntN(2) == 0 {
			return operation{lua.Undo, []string{lock, wants}, []any{owner, contender}}
		}
		return operation{lua.Undo, three[:1], []any{owner}}
	case 7:
		return operation{lua.Release, []string{lock, wants}, []any{owner, "PUBLISH", 20_000, contender}}
	case 8:
		return operation{lua.Release, []string{lock, wants},
			[]any{owner, "PUBLISH", 20_000, contender, fmt.Sprintf("c%d-%03d", rnd.IntN(3), rnd.IntN(4))}}
	}
	return plainRelease(rnd, n)
}

// plainRelease is one as it may be in a group, of the k-th lock.
func plainRelease(rnd *rand.Rand, k int) operation {
	owner := fmt.Sprint("owner", rnd.IntN(3))
	return operation{lua.Release, []string{fmt.Sprint("k", k), fmt.Sprint("wants", k)}, []any{owner, "PUBLISH", 20_000}}
}

// sameAnswer compares everything but what depends on the moment and on the script's name. A pttl
// may differ by the time that a slow machine takes.
func sameAnswer(a, b any) bool {
	switch a := a.(type) {
	case error:
		b, ok := b.(error)
		code := func(err error) string { text, _, _ := strings.Cut(err.Error(), " script: "); return text }
		inside := func(err error) bool { return strings.Contains(err.Error(), "@user_script") }
		return ok && code(a) == code(b) && inside(a) == inside(b)
	case []any:
		b, ok := b.([]any)
		if !ok || len(a) != 2 || len(b) != 2 || a[0] != b[0] {
			return false
		}
		x, isTTL := a[1].(int64)
		y, _ := b[1].(int64)
		return a[1] == b[1] || isTTL && max(x-y, y-x) < 5000
	}
	return a == b
}

// all is what the server has, except times.
func (s *store) all() (all []string) {
	s.t.Helper()
	ctx := context.Background()
	for _, k := range s.Keys(ctx, "*").Val() {
		var v any
		switch s.Type(ctx, k).Val() {
		case "zset":
			var members []string
			for _, z := range s.ZRangeWithScores(ctx, k, 0, -1).Val() {
				members = append(members, fmt.Sprint(z.Member, z.Score == 0))
			}
			v = members
		case "list":
			v = s.LRange(ctx, k, 0, -1).Val()
		default:
			v = s.Get(ctx, k).Val()
		}
		ttl := s.PTTL(ctx, k).Val()
		all = append(all, fmt.Sprint(k, " ", v, " ", ttl.Round(10*time.Second)))
	}
	slices.Sort(all)
	return all
}
