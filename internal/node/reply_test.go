package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/link"
	"github.com/flightlock/flightlock/internal/redistest"

	"github.com/redis/go-redis/v9"
)

// Each shape of reply of a script has one meaning; see the .lua files.
func TestParse(t *testing.T) {
	held := []any{"other", int64(1500)}
	for _, c := range []struct {
		op   op
		val  any
		want Reply
	}{
		{opAcquire, int64(7), Reply{Kind: Granted, Counter: 7}},
		{opAcquire, []any{int64(7), "x"}, Reply{Kind: Granted, Counter: 7, Rival: "x"}},
		{opAcquire, int64(-7), Reply{Kind: Replayed, Counter: 7}},
		{opRepair, int64(7), Reply{Kind: Granted, Counter: 7}},
		{opRepair, int64(-7), Reply{Kind: Replayed, Counter: 7}},
		{opRefresh, int64(7), Reply{Kind: Renewed, Counter: 7}},
		{opRefresh, int64(0), Reply{Kind: Missing}},
		{opRelease, int64(1), Reply{Kind: Deleted}},
		{opRelease, int64(0), Reply{Kind: Missing}},
		{opAcquire, held, Reply{Kind: Held, Holder: "other", TTL: 1500 * time.Millisecond}},
		{opRepair, held, Reply{Kind: Held, Holder: "other", TTL: 1500 * time.Millisecond}},
		{opRefresh, held, Reply{Kind: Held, Holder: "other", TTL: 1500 * time.Millisecond}},
		{opRelease, held, Reply{Kind: Held, Holder: "other", TTL: 1500 * time.Millisecond}},
		{opAcquire, []any{"", int64(-1)}, Reply{Kind: Held, TTL: -time.Millisecond}},
		// longer than a time.Duration can be: not unknown, and not about to end
		{opAcquire, []any{"x", int64(9223372036855)}, Reply{Kind: Held, Holder: "x", TTL: math.MaxInt64}},
		{opAcquire, []any{"x", int64(18446744073710)}, Reply{Kind: Held, Holder: "x", TTL: math.MaxInt64}},
		{opAcquire, []any{"x", int64(math.MaxInt64)}, Reply{Kind: Held, Holder: "x", TTL: math.MaxInt64}},
		{opAcquire, []any{"x", int64(math.MinInt64)}, Reply{Kind: Held, Holder: "x", TTL: math.MinInt64}},
	} {
		if got := parse(c.op, valueOf(c.val)); got != c.want {
			t.Errorf("%s %v: %v, want %v", c.op, c.val, got, c.want)
		}
	}
}

// valueOf is what a server has sent as v: nil, an int64, a string, an error, or several of these.
func valueOf(v any) *link.Value {
	switch v := v.(type) {
	case int64:
		return &link.Value{Kind: link.Int, N: v}
	case string:
		return &link.Value{Kind: link.String, Text: []byte(v)}
	case redisError:
		return &link.Value{Kind: link.Error, Text: []byte(v)}
	case []any:
		array := &link.Value{Kind: link.Array}
		for _, item := range v {
			array.Items = append(array.Items, *valueOf(item))
		}
		return array
	}
	return &link.Value{}
}

// A shape that no script replies is not a vote.
func TestUnknownRepliesAreFailures(t *testing.T) {
	for _, o := range []op{opAcquire, opRepair, opRefresh, opRelease} {
		for _, val := range []any{
			nil, "OK", "1.5", redisError("x"), []any{}, []any{"a"}, []any{int64(0), "a"}, []any{"a", "b"},
			[]any{"a", int64(1), int64(2)}, []any{nil, nil}, []any{[]any{"a", int64(1)}, int64(1)},
		} {
			if rep := parse(o, valueOf(val)); rep.Kind != Failed || rep.Err == nil {
				t.Errorf("%s %#v: %v", o, val, rep)
			}
		}
	}
	for o, val := range map[op]int64{opAcquire: 0, opRepair: 0, opRefresh: -1, opRelease: 4} {
		if rep := parse(o, valueOf(val)); rep.Kind != Failed {
			t.Errorf("%s %d: %v", o, val, rep)
		}
	}
}

// FuzzParse feeds arbitrary replies: no panic, and nothing but the known shapes is a vote.
func FuzzParse(f *testing.F) {
	f.Add(uint8(0), uint8(0), int64(1), "o", "")
	f.Add(uint8(2), uint8(1), int64(-1), "o", "")
	f.Add(uint8(3), uint8(2), int64(0), "", "WRONGTYPE x")
	f.Add(uint8(1), uint8(3), int64(0), "", "ERR Error running script")
	f.Fuzz(func(t *testing.T, o, shape uint8, n int64, s, text string) {
		shapes := []any{
			n, []any{s, n}, s, nil, []any{n, s}, []any{s}, []any{s, n, s}, []any{s, n, s, n}, []any{n},
			[]any{[]any{s, n}, n}, []any{s, s}, redisError(s),
		}
		at := int(shape) % len(shapes)
		v := valueOf(shapes[at])
		if text != "" {
			v = valueOf(redisError(text))
		}
		kind := op(o % 4)
		rep := parse(kind, v)
		rival := at == 4 && (kind == opRefresh || kind == opAcquire) // {counter, rival}
		known := text == "" && (at < 2 || rival)
		switch {
		case rep.Kind == Pending || rep.Kind > Held:
			t.Errorf("kind %d", rep.Kind)
		case rep.Kind == Failed != (rep.Err != nil):
			t.Errorf("reply %v", rep)
		case rep.Kind != Failed && !known:
			t.Errorf("%v of an unknown shape", rep)
		}
		if rep.Err != nil {
			_, _ = Final(rep.Err), neverRan(rep.Err)
		}
	})
}

// redisError is an error reply.
type redisError string

func (e redisError) Error() string { return string(e) }
func (redisError) RedisError()     {}

var _ redis.Error = redisError("")

// classes says of each error line whether repeating the request cannot help, and whether it proves
// that nothing was written.
var classes = []struct {
	line         string
	final, clean bool
}{
	{"WRONGTYPE Operation against a key holding the wrong kind of value", true, true},
	{"NOAUTH Authentication required.", true, true},
	{"WRONGPASS invalid username-password pair or user is disabled.", true, true},
	{"NOPERM this user has no permissions to run the 'evalsha' command", true, true},
	{"READONLY You can't write against a read only replica.", false, true},
	{"LOADING Redis is loading the dataset in memory", false, true},
	{"OOM command not allowed when used memory > 'maxmemory'.", false, true},
	{"OOM command not allowed when used memory > 'maxmemory'. script: 6f, on @user_script:1.", false, true},
	{"MISCONF Redis is configured to save RDB snapshots", false, true},
	{"NOREPLICAS Not enough good replicas to write.", false, true},
	{"MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", false, true},
	{"BUSY Redis is busy running a script.", false, true},
	{"CLUSTERDOWN The cluster is down", false, true},
	{"TRYAGAIN Multiple keys request during rehashing of slot", false, true},
	{"MOVED 1 127.0.0.1:1", false, true},
	{"ERR something else", false, false},
	{"ERR max number of clients reached", false, false},
	{"WRONGTYPE Operation against a key holding the wrong kind of value script: 6f, on @user_script:61.", true,
		false},
	{"ERR The user executing the script can't run this command or subcommand script: 6f, on @user_script:1.",
		true, false},
	{"ERR ACL failure in script: User app has no permissions to run the 'incrby' command script: 6f, on " +
		"@user_script:35.",
		true, false},
	{"ERR ACL failure in script: User app has no permissions to run the 'get' command", true, false},
	{"ERR Error running script (call to f_6f): @user_script:1: WRONGTYPE Operation against a key", true, false},
	{"ERR Error running script (call to f_6f): @user_script:1: @user_script: 1: -WRONGTYPE Operation", true,
		false},
	{"ERR Error running script (call to f_6f): @user_script:1: -NOPERM The user executing the script", true,
		false},
	{"ERR Error running script (call to f_6f): @user_script:30: @user_script: 30: -OOM command not allowed",
		false, true},
	{"ERR Error running script (call to f_6f): @user_script:30: -READONLY You can't write", false, true},
	{"ERR wrong WRONGTYPE in the text", false, false},
	{"WRONGTYPEX no such code", false, false},
}

func TestErrorsAreClassified(t *testing.T) {
	for _, c := range classes {
		for _, err := range []error{redisError(c.line), fmt.Errorf("wrapped: %w", redisError(c.line))} {
			if conn.Says(err, conn.AboutKey|conn.Rights) != c.final && err == error(redisError(c.line)) {
				t.Errorf("%v: final %v", err, !c.final)
			}
			if err == error(redisError(c.line)) && neverRan(err) != c.clean {
				t.Errorf("%v: clean %v", err, !c.clean)
			}
		}
	}
	// What only resembles a server's error proves nothing.
	for _, err := range []error{errors.New("NOAUTH x"), io.EOF, context.DeadlineExceeded, ErrBusy} {
		if Final(err) || conn.Says(err, conn.Rights) || neverRan(err) {
			t.Errorf("%v passes for an answer", err)
		}
	}
}

// An error that proves that nothing was written leaves nothing to undo. Any other one is
// undone, and the undo is tried until it is answered.
func TestErrorRepliesAreUndoneWhenInDoubt(t *testing.T) {
	t.Parallel()
	for _, c := range classes {
		if c.line[:5] == "MOVED" {
			continue // of a Cluster; a standalone server never says so
		}
		t.Run(c.line[:min(len(c.line), 60)], func(t *testing.T) {
			t.Parallel()
			f := redistest.StartFake(t, func(cmd []string) string {
				if ends(cmd) {
					return ":0\r\n"
				}
				return redistest.ErrorFor("EVALSHA|EVAL", c.line)(cmd)
			})
			n := newNode(t, f.Client(t))
			a := newAttempt(t, n, "k")
			rep := a.acquire().want(t, Failed)
			if conn.Says(rep.Err, conn.AboutKey|conn.Rights) != c.final {
				t.Errorf("final %v: %v", !c.final, rep.Err)
			}
			if released := a.release(); c.clean {
				released.wantNow(t, Missing)
			} else {
				released.want(t, Missing)
			}
			wantDebts(t, n, 0)
			if asked := f.Commands(); slices.ContainsFunc(asked, ends) == c.clean {
				t.Errorf("%d commands: %v", len(asked), asked)
			}
		})
	}
}

// A server that refuses the handshake gives the reason, and received no request.
func TestARefusedHandshakeIsToldAndUndoesNothing(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t, "--requirepass", "secret")
	for name, password := range map[string]string{"WRONGPASS": "wrong", "NOAUTH": ""} {
		c := s.Client(t, func(o *redis.Options) { o.Password = password }, quick)
		n := newNode(t, c)
		a := newAttempt(t, n, "k")
		rep := a.acquire().want(t, Failed)
		if !conn.HasCode(rep.Err, name) || Final(rep.Err) {
			t.Errorf("error %v, want %s", rep.Err, name)
		}
		a.release().wantNow(t, Missing)
		wantDebts(t, n, 0)
	}
}
