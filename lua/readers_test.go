package lua_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

const (
	readers = "flightlock:{}:readers:lock:k"
	shared  = "flightlock:readers#readers-R" // the reserved owner
)

// of are the keys of a read lease's script, from those of the script of the same verb.
func of(keys []string) []string { return slices.Concat(keys[:1], []string{readers, wants}, keys[1:]) }

func (s *store) rlock(args ...any) any {
	s.t.Helper()
	return s.must(lua.SharedAcquire, of(alone), anyEpoch(args...)...)
}

// rcontend is an attempt of a reader that waits.
func (s *store) rcontend(owner, contender string) any {
	s.t.Helper()
	return s.must(lua.SharedAcquire, of(all), anyEpoch(owner, minute, 1, 0, contender, offer(contender))...)
}

func (s *store) rrefresh(args ...any) any {
	s.t.Helper()
	return s.must(lua.SharedRefresh, of([]string{key, bucket}), args...)
}

func (s *store) rdone(owner string) any {
	s.t.Helper()
	return s.must(lua.SharedDone, of([]string{key, wants}), owner)
}

func (s *store) rundo(args ...any) any {
	s.t.Helper()
	return s.must(lua.SharedUndo, of(undone), args...)
}

// wantReaders says whose shares there are, and that the key lives as long as the last of them.
func (s *store) wantReaders(left int64, owners ...string) {
	s.t.Helper()
	got, err := s.ZRange(s.t.Context(), readers, 0, -1).Result()
	if slices.Sort(got); err != nil || !slices.Equal(got, owners) {
		s.t.Errorf("readers %q %v, want %q", got, err, owners)
	}
	s.want(s.value(key), shared)
	s.wantTTL(left)
}

// Readers share the key: each has tokens and a share of its own, and the key lives as long as the last share
// that is left. The last reader releases it.
func TestReadersShareTheKey(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.set(bucket, 100, 0)
		s.want(s.rlock("a", minute, 1), 101)
		s.wantReaders(minute, "a")
		s.want(s.rlock("b", 10*minute, 1), 102)
		s.want(s.rlock("c", minute, 1), 103)
		s.wantReaders(10*minute, "a", "b", "c")
		s.want(s.rlock("c", 2*minute, 1), -103) // once more
		s.wantHeld(s.acquire("w", minute, 1), shared, 10*minute)
		s.wantHeld(s.acquire("w", minute, 0, 5), shared, 10*minute) // a repair

		s.want(s.rrefresh("a", 3*minute, 200, 0), 200)
		s.want(s.rrefresh("a", minute, 0, 0), 200) // which shortens nothing
		s.want(s.rrefresh("z", minute, 300, 0), 0)
		s.wantCounter(200)
		s.want(s.rdone("b"), 1)
		s.wantReaders(3*minute, "a", "c")
		s.wantHeld(s.rdone("b"), shared, 3*minute)
		s.want(s.rundo("a"), 1)
		s.wantReaders(2*minute, "c")
		s.want(s.rdone("c"), 1)
		s.want(s.value(key), "<none>")
		s.want(s.Exists(s.t.Context(), readers).Val(), 0)
		s.want(s.acquire("w", minute, 1), 201)
	})
}

// A share ends with its ttl, whatever others do: it cannot be refreshed then, and does not keep the key.
func TestAShareEndsWithItsTTL(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.set(bucket, 100, 0)
		s.rlock("a", minute, 1)
		s.rlock("b", minute, 1)
		s.ZAdd(t.Context(), readers, redis.Z{Score: float64(time.Now().Add(-time.Second).UnixMilli()), Member: "a"})
		s.want(s.rrefresh("a", minute, 0, 0), 0)
		s.want(s.rlock("a", minute, 1), 103) // anew
		s.ZAdd(t.Context(), readers, redis.Z{Score: float64(time.Now().Add(-time.Second).UnixMilli()), Member: "a"})
		s.want(s.rdone("b"), 1)
		s.want(s.value(key), "<none>")
	})
}

// Shares of readers whose key is gone are over: somebody else may have had it since.
func TestSharesOfAKeyThatIsGoneAreOver(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.set(bucket, 100, 0)
		s.rlock("a", minute, 1)
		s.Del(t.Context(), key)
		s.want(s.rrefresh("a", minute, 0, 0), 0)
		s.want(s.acquire("w", minute, 1), 102)
		s.wantHeld(s.rrefresh("a", minute, 0, 0), "w", minute)
		s.wantHeld(s.rdone("a"), "w", minute)
		s.want(s.done("w"), 1)
		s.want(s.rlock("b", minute, 1), 103)
		s.wantReaders(minute, "b")
		s.want(s.rrefresh("a", minute, 0, 0), 0)
		s.wantHeld(s.rdone("a"), shared, minute)
	})
}

// A reader that may not join because a writer waits does not keep that one's want, which ends if the writer
// is gone.
func TestAReaderThatWaitsKeepsNoWriter(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.rlock("a", minute, 1)
		s.wantHeld(s.contend("w", "z-1", offer("z-1")), shared, minute)
		s.PExpire(t.Context(), wants, 3*time.Second)
		for range 2 { // it is registered, and polls
			s.wantHeld(s.rcontend("b", "l#y-1S"), shared, minute)
			if left := s.PTTL(t.Context(), wants).Val(); left > 3*time.Second {
				t.Errorf("the wants live for %v", left)
			}
		}
		s.wantHeld(s.contend("w", "z-1", offer("z-1")), shared, minute)
		if left := s.PTTL(t.Context(), wants).Val(); left <= 3*time.Second {
			t.Errorf("the wants live for %v although the writer has polled", left)
		}
	})
}

// Readers join as long as nobody who wants the key for itself waits before them. What the last of them
// releases goes to whoever waits first: a reader has it for itself until it refreshes, and then those behind
// it are told.
func TestReadersWaitInTheQueueOfAll(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.set(bucket, 100, 0)
		told := s.listen()
		s.rlock("a", minute, 1)
		s.wantHeld(s.contend("w", "z-1", offer("z-1")), shared, minute)
		s.wantHeld(s.rlock("b", minute, 1), shared, minute) // the writer waits before it
		s.wantHeld(s.rcontend("b", "l#y-1S"), shared, minute)
		s.wantHeld(s.rcontend("c", "l#x-1S"), shared, minute)
		s.wantWaiting("z-1", "l#y-1S", "l#x-1S")
		s.want(s.rlock("d", minute, 0, 5), 101) // but a repair is of a lease that is held
		s.want(s.rdone("d"), 1)

		s.want(s.rdone("a"), -1) // the key is its own now
		s.want(s.value(key), "a")
		s.want(s.must(lua.SharedRelease, of(all), releasing("a", "a-1")...), 1)
		s.want(s.value(key), "oz")
		s.wantHeld(s.rcontend("b2", "l#y-1S"), "oz", minute/2)
		s.want(s.grant("oz", "z-1"), 1)
		s.want(s.value(key), "ol")
		s.want(s.rrefresh("ol", minute, 0, 0), s.value(bucket))
		s.wantReaders(minute, "ol")
		s.wantWaiting("l#x-1S")
		if all := s.heard(told); all[len(all)-1] != "x: 1S turn" {
			t.Errorf("messages %q", all)
		}
		s.rcontend("c2", "l#x-1S")
		s.wantReaders(minute, "c2", "ol")
		s.wantWaiting()
		s.want(s.offerOf("l#x-1S"), "<none>")
	})
}

// A writer that waits and finds readers has a recall published to all of them.
func TestAWriterThatWaitsRecallsTheReaders(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		told := s.listen()
		s.rlock("a", minute, 1)
		s.contend("w", "z-1", offer("z-1"))
		if all := s.heard(told); len(all) != 1 || all[0] != "readers: recall: 28 3 "+shared+"z-1"+key {
			t.Errorf("messages %q", all)
		}
	})
}

// A refresh of readers names the writer that waits longest, wherever it is among readers that wait, or are
// gone.
func TestARefreshOfReadersNamesTheWriter(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.set(bucket, 100, 0)
		s.rlock("a", minute, 1)
		rival := func(want string) {
			t.Helper()
			v := s.must(lua.SharedRefresh, of([]string{key, bucket, wants}), "a", minute, 0, 0, "l#own-1S")
			s.want(v.([]any)[1], want)
		}
		rival("")
		for i, name := range []string{"l#own-1S", "x#gone-1S", "x#gone-2S"} {
			s.ZAdd(t.Context(), wants, redis.Z{Score: float64(i + 1), Member: name})
		}
		rival("")
		s.contend("w", "z-1", offer("z-1"))
		s.contend("w", "z-2", offer("z-2"))
		rival("z-1")
	})
}

// Shares of readers that are gone do not stay for as long as others come.
func TestSharesThatHaveEndedGo(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.rlock("a", minute, 1)
		past := float64(time.Now().Add(-time.Second).UnixMilli())
		s.ZAdd(t.Context(), readers, redis.Z{Score: past, Member: "gone-1"}, redis.Z{Score: past, Member: "gone-2"})
		s.rlock("b", minute, 1)
		s.rlock("c", minute, 1)
		s.wantReaders(minute, "a", "b", "c")
	})
}

// A node whose epoch is not the caller's takes no readers.
func TestReadersJoinInTheirEpochOnly(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.rlock("a", minute, 1)
		s.set(lua.Marker, "other", 0)
		epoch := lua.Epoch{Name: "mine"}
		v, err := s.run(lua.SharedAcquire, of(alone), in(epoch, false, "b", minute, 1)...)
		if err == nil || !strings.HasPrefix(err.Error(), "EPOCH ") {
			t.Errorf("%v, %v", v, err)
		}
		s.wantReaders(minute, "a")
	})
}

// Where memory is full nobody joins, and readers leave all the same.
func TestReadersLeaveWhereMemoryIsFull(t *testing.T) {
	t.Parallel()
	s := &store{t: t, Client: redistest.StartServer(t).Client(t), real: true}
	s.rlock("a", minute, 1)
	s.rlock("b", minute, 1)
	if err := s.ConfigSet(t.Context(), "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	v, err := s.run(lua.SharedAcquire, of(alone), anyEpoch("c", minute, 1)...)
	if err == nil || !strings.HasPrefix(err.Error(), "OOM ") {
		t.Errorf("%v, %v", v, err)
	}
	s.wantReaders(minute, "a", "b")
	s.want(s.rdone("a"), 1)
	s.wantReaders(minute, "b")
	s.want(s.rdone("b"), 1)
	s.want(s.value(key), "<none>")
}
