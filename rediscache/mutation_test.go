package rediscache_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/flightlock/flightlock/internal/redistest"
)

// mutation breaks a part of the protocol: one file has another text.
type mutation struct{ name, file, old, new string }

var mutations = []mutation{
	{"a store compares no stamp", "rediscache/store.lua",
		"if stamp == '' or stamp ~= ARGV[2] then", "if stamp == '' then"},
	{"a store does not need the entry", "rediscache/store.lua",
		"if stamp == '' or stamp ~= ARGV[2] then", "if stamp ~= '' and stamp ~= ARGV[2] then"},
	{"a load without a stamp is stored", "fetchrun.go",
		`	if f.stamped() && r.scope.Stamp == "" {`, `	if r.scope.Stamp == "" {
		found, _ := f.src.LookupStamped(r.values, r.Key())
		r.scope.Stamp = found.Stamp
	}
	if false {`},
	{"any caller joins a flight", "internal/coalesce/coalesce.go", "return !s.Limited || came", "return true || came"},
	{"Invalidate keeps the stamp", "rediscache/invalidate.lua", "'fl1:t' .. newStamp()",
		"'fl1:t' .. (stampOf(redis.call('GET', KEYS[1])) ~= '' and stampOf(redis.call('GET', KEYS[1])) or newStamp())"},
	{"Invalidate does not wait", "rediscache/cache.go", "	failed := c.server.invalidate(ctx, full)\n",
		"	failed := map[string]error{}\n	go c.server.invalidate(context.Background(), full)\n"},
	{"the tier keeps what was invalidated", "rediscache/cache.go", "		c.tier.Remove(full)\n", "		_ = c.tier.Remove\n"},
	{"the tier takes what was read before that", "internal/hot/hot.go",
		"if s.removed.Load() != r.removed || old", "if old"},
	{"an age begins when the value enters the tier", "internal/hot/hot.go", "from: r.from}", "from: now}"},
}

// Each of them is noticed by the random histories. (That a lookup is shared with earlier callers only is
// too rare a case for them, and two Sets of one key at once do not occur in them:
// TestALookupIsSharedWithEarlierCallers in the root package and TestSetThatMeetsAnotherChange do that.)
func TestHistoriesNoticeMutations(t *testing.T) {
	redistest.OnlyLong(t)
	for _, m := range mutations {
		t.Run(m.name, func(t *testing.T) {
			out, err := exec.Command(m.build(t), "-test.run", "^TestRandomHistories$", "-test.v").CombinedOutput()
			if err == nil {
				t.Fatal("nobody noticed")
			}
			if !noticed(t, out, "was announced, got") {
				t.Errorf("%v\n%.2000s", err, out)
			}
		})
	}
}

// So it is by processes on real servers, within a minute: those that do not concern the tier, which is
// off there.
func TestFleetNoticesMutations(t *testing.T) {
	redistest.OnlyLong(t)
	for _, m := range mutations[:6] {
		t.Run(m.name, func(t *testing.T) {
			bin := m.build(t)
			for range 6 {
				out, err := exec.Command(bin, "-test.run", "^TestFleet$/tier=off", "-fleet", "10s", "-test.v").CombinedOutput()
				switch {
				case noticed(t, out, "was announced, saw"):
					return
				case err != nil:
					t.Fatalf("%v\n%.2000s", err, out)
				}
			}
			t.Fatal("nobody noticed")
		})
	}
}

// build makes a test binary with the mutation.
func (m mutation) build(t *testing.T) (bin string) {
	t.Helper()
	bin = filepath.Join(t.TempDir(), "mutated.test")
	build := exec.Command("go", "test", "-c", "-vet=off", "-overlay", overlay(t, m.file, m.old, m.new), "-o", bin, ".")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return bin
}

// noticed finds the line that says what was wrong.
func noticed(t *testing.T, out []byte, what string) bool {
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, what) {
			t.Log(strings.TrimSpace(line))
			return true
		}
	}
	return false
}

// overlay is a file that makes the go command use a changed text.
func overlay(t *testing.T, file, from, to string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("..", file))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(text), from); n != 1 {
		t.Fatalf("%s has %q %d times", file, from, n)
	}
	dir := t.TempDir()
	changed := filepath.Join(dir, filepath.Base(file))
	data, _ := json.Marshal(map[string]any{"Replace": map[string]string{path: changed}})
	for name, content := range map[string]string{
		changed:                            strings.Replace(string(text), from, to, 1),
		filepath.Join(dir, "overlay.json"): string(data),
	} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(dir, "overlay.json")
}
