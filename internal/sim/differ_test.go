package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// The simulated servers answer as Redis does: random calls of the lock scripts, and of the
// commands in them, have the same replies and leave the same keys. Keys have long ttls, or
// expire at once; counters begin at the clock, so only their distance is compared.
func TestServersAnswerAsRedisDoes(t *testing.T) {
	real := redistest.StartServer(t).Client(t)
	ctx := context.Background()
	in := newInterpreter()
	began := time.Now()
	var listeners int64 // at each inbox
	for seed := range uint64(80) {
		if seed == 40 {
			told := real.PSubscribe(ctx, "flightlock:inbox:*")
			defer told.Close()
			if _, err := told.Receive(ctx); err != nil {
				t.Fatal(err)
			}
			listeners = 1
		}
		r := rand.New(rand.NewPCG(seed, 9))
		if err := real.FlushAll(ctx).Err(); err != nil {
			t.Fatal(err)
		}
		sim := newStore(func() int64 { return time.Now().UnixMicro() })
		for step := range 60 {
			c := randomCall(r)
			want, err := real.Eval(ctx, c.script.Source, c.keys, c.args...).Result()
			if errors.Is(err, redis.Nil) {
				want, err = nil, nil
			}
			if err := in.compile(c.script.Source); err != nil {
				t.Fatal(err)
			}
			got := in.run(c.script.Source, c.keys, texts(c.args), func(args []string) any {
				if args[0] == "PUBLISH" {
					return listeners
				}
				if c.keys == nil {
					return sim.call(args)
				}
				for _, k := range keysOf(args) {
					if !slices.Contains(c.keys, k) {
						t.Errorf("%v accesses %q by %s", c, k, args[0])
					}
				}
				return sim.call(args)
			})
			if g, w := loosely(got, began), loosely(orError(want, err), began); g != w {
				t.Fatalf("seed %d, step %d: %v gives %s, in Redis %s", seed, step, c, g, w)
			}
		}
		for _, k := range []string{keyOf, bucketOf, wantsOf, offersOf, readersOf} {
			v, err := real.Dump(ctx, k).Result()
			if there := sim.find(k) != nil; there != (err == nil && v != "") {
				t.Fatalf("seed %d: %s is there: %v, in Redis: %v", seed, k, there, err == nil)
			}
		}
	}
}

const (
	keyOf     = "lock:{k}"
	bucketOf  = "bucket:{k}"
	wantsOf   = "wants:{k}"
	readersOf = "readers:{k}"
	offersOf  = "offers:{k}"
	markerOf  = "marker:{k}"
)

// call is one call of a script.
type call struct {
	script lua.Script
	keys   []string
	args   []any
}

func (c call) String() string {
	return fmt.Sprintf("%s %v %v", scriptName(c.script.Source), c.keys, c.args)
}

// raw executes one command, as a script of its own.
func raw(args ...any) call {
	return call{script: lua.Script{Source: "-- raw:\nreturn redis.call(unpack(ARGV))"}, args: args}
}

// membersOf are those of a sorted set, in any order: what is scored by the time differs by a millisecond.
func membersOf(key string) call {
	const sorted = "-- members:\nlocal all = redis.call('ZRANGE', ARGV[1], 0, 9)\ntable.sort(all)\nreturn all"
	return call{script: lua.Script{Source: sorted}, args: []any{key}}
}

func randomCall(r *rand.Rand) call {
	owner := pick(r, "a", "b", "ab")
	contender := pick(r, "x-1", "x-2", "y-1")
	ttl := pick(r, 500_000, 900_000)
	offer := "1 0 400000 12 - " + pick(r, "a", "b", "c")
	all := []string{keyOf, bucketOf, markerOf, wantsOf, offersOf}
	in := func(args ...any) []any {
		return append(pick(r, []any{"", 0, ""}, []any{"", 5, ""}, []any{"m", 0, ""}, []any{"m", 5, "raw - - -"}),
			args...)
	}
	shared := func(keys []string) []string {
		return slices.Concat(keys[:1], []string{readersOf, wantsOf}, keys[1:])
	}
	reader := pick(r, "x-1", "l#c-1S", "l#c-2S")
	switch r.IntN(24) {
	case 18, 19, 20:
		return pick(r,
			call{lua.SharedAcquire, shared(all[:3]), in(owner, ttl, 1+r.IntN(3))},
			call{lua.SharedAcquire, shared(all), in(owner, ttl, 1, 0, reader, offer)},
			call{lua.SharedAcquire, shared(all), in(owner, ttl, 1, 0, reader, offer, "waits")},
			call{lua.SharedAcquire, shared(all[:3]), in(owner, ttl, 0, 5)})
	case 21:
		return pick(r,
			call{lua.SharedRefresh, shared([]string{keyOf, bucketOf}), []any{owner, ttl, 7, r.IntN(3)}},
			call{lua.SharedRefresh, shared([]string{keyOf, bucketOf, wantsOf}), []any{owner, ttl, 7, 1, reader}})
	case 22:
		return pick(r,
			call{lua.SharedUndo, shared(all[:1]), []any{owner}},
			call{lua.SharedUndo, shared([]string{keyOf, keyOf, keyOf, wantsOf, offersOf}),
				[]any{owner, reader, offer}}, call{lua.SharedDone, shared([]string{keyOf, wantsOf}), []any{owner}},
			call{lua.SharedRelease, shared(all), in(owner, "PUBLISH", 400_000, pick(r, "", contender))})
	case 23:
		return pick(r,
			membersOf(readersOf), raw("DEL", readersOf), raw("ZADD", readersOf, 1, owner), raw("GET", keyOf),
			raw("SET", keyOf, node.Readers, "PX", ttl), raw("PTTL", keyOf), raw("PTTL", readersOf), raw("DEL", keyOf),
			raw("HSET", readersOf, "a", "b"))
	case 0, 1:
		return call{lua.Acquire, all[:3], in(owner, ttl, 1+r.IntN(3))}
	case 2, 3:
		return call{lua.Acquire, all[:4], in(owner, ttl, 1, 0, contender)}
	case 4, 5:
		return call{lua.Acquire, all, in(owner, ttl, 1, 0, contender, offer)}
	case 6, 7:
		return call{lua.Acquire, all, in(owner, ttl, 1, 0, contender, offer, "waits")}
	case 8:
		return call{lua.Acquire, all[:3], in(owner, ttl, 0, 5)}
	case 9:
		return call{lua.Refresh, []string{keyOf, bucketOf}, []any{owner, ttl, 7, r.IntN(3)}}
	case 10:
		return call{lua.Refresh, []string{keyOf, bucketOf, wantsOf}, []any{owner, ttl, 7, 1, contender}}
	case 11:
		undone := []string{keyOf, keyOf, keyOf, wantsOf, offersOf}
		return pick(r,
			call{lua.Undo, undone[:1], []any{owner}},
			call{lua.Undo, undone[:4], []any{owner, contender}},
			call{lua.Undo, undone, []any{owner, contender, offer}},
			call{lua.Undo, undone, []any{owner, contender, ""}},
			call{lua.Done, []string{keyOf, wantsOf}, []any{owner}})
	case 12:
		return call{lua.Release, pick(r, all, all[:4]), in(owner, "PUBLISH", 400_000, "")}
	case 13:
		return call{lua.Release, pick(r, all, all[:4]), in(owner, "PUBLISH", 400_000, contender)}
	case 14:
		rival := pick(r, "x-1", "y-1")
		return call{lua.Release, pick(r, all, all[:4]), in(owner, "PUBLISH", 400_000, contender, rival)}
	case 15:
		rival := pick(r, "", "x-1", "y-1")
		return call{lua.Release, all, in(owner, "PUBLISH", 400_000, contender, rival, "", "leaves", offer)}
	case 16:
		return pick(r,
			raw("DEL", keyOf), raw("DEL", bucketOf), raw("GET", keyOf), raw("GET", wantsOf),
			raw("ZADD", keyOf, 1, "m"), raw("INCRBY", wantsOf, 1), raw("INCRBY", keyOf, 1),
			raw("ZRANGE", wantsOf, 0, 9), raw("ZRANGE", wantsOf, -1, -1, "WITHSCORES"), raw("ZRANGE", wantsOf, -2, -1),
			raw("ZRANGE", wantsOf, -9, 0), raw("ZSCORE", bucketOf, "x-1"), raw("EXISTS", keyOf, wantsOf),
			raw("EXISTS", offersOf), raw("SET", keyOf, "c", "PX", 0), raw("SET", keyOf, "c", "XX"),
			raw("PEXPIRE", keyOf, 300_000), raw("PEXPIRE", "none", 5), raw("PTTL", bucketOf), raw("PTTL", "none"),
			raw("APPEND", keyOf, "d"), raw("APPEND", wantsOf, "d"), raw("APPEND", bucketOf, ""),
			raw("APPEND", offersOf, "d"), raw("OBJECT", "ENCODING", keyOf), raw("OBJECT", "ENCODING", bucketOf),
			raw("OBJECT", "ENCODING", "none"),
			raw("GET", offersOf), raw("INCRBY", offersOf, 1), raw("ZREM", offersOf, "x-1"),
			raw("HDEL", wantsOf, "x-1"), raw("HGET", keyOf, "x-1"), raw("HSET", wantsOf, "x-1", "1"),
			raw("HSET", offersOf, "x-1"),
			raw("HGET", "none", "x"), raw("NONE", 1), raw("GET"), raw("SET", keyOf, "c", "PX"),
			raw("ZADD", wantsOf, "no", "m"))
	default:
		return pick(r,
			raw("APPEND", keyOf, "e"), raw("OBJECT", "ENCODING", keyOf), raw("OBJECT", "ENCODING", wantsOf),
			raw("SET", keyOf, owner, "PX", ttl), raw("PEXPIRE", keyOf, -1),
			raw("SET", markerOf, "m"), raw("APPEND", markerOf, "m"), raw("APPEND", markerOf, ""), raw("DEL", markerOf),
			raw("HSET", offersOf, contender, offer), raw("HGET", offersOf, contender),
			raw("HDEL", offersOf, contender, "x-2"), raw("HSET", offersOf, contender, "1 0 400000 12 m c"),
			raw("OBJECT", "ENCODING", offersOf),
			raw("ZREM", wantsOf, contender), raw("ZADD", wantsOf, "XX", 0, contender))
	}
}

func texts(args []any) (all []string) {
	for _, a := range args {
		all = append(all, fmt.Sprint(a))
	}
	return all
}

func orError(v any, err error) any {
	if err != nil {
		return failure(err.Error())
	}
	return v
}

// loosely is a reply without what depends on time: of an error the code, of a number near the clock
// or a ttl its size.
func loosely(v any, began time.Time) string {
	switch v := v.(type) {
	case failure:
		code := string(v)
		for i, c := range code {
			if c == ' ' {
				return "error " + code[:i]
			}
		}
		return "error " + code
	case int64:
		switch now := began.UnixMicro(); {
		case v > now/2 && v < 2*now:
			return "clock"
		case v < -now/2:
			return "-clock"
		case v > 1000:
			return fmt.Sprint("about ", (v+50_000)/100_000)
		}
		return fmt.Sprint(v)
	case status:
		return string(v)
	case string:
		if len(v) == len("1234567890123456") {
			return "clock"
		}
		return v
	case []any:
		text := "{"
		for _, e := range v {
			text += loosely(e, began) + ","
		}
		return text + "}"
	}
	return fmt.Sprint(v)
}

// Scripts are told apart by their names: which node a release has freed depends on it.
func TestScriptsAreKnownByTheirNames(t *testing.T) {
	for source, want := range map[string]string{
		lua.Release.Source: "release", lua.Done.Source: "done", lua.SharedRelease.Source: "release",
		lua.Acquire.In("process").Source: "acquire", "return 1": "?",
	} {
		if got := scriptName(source); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
