package links

import (
	"strings"
	"testing"
)

// With all rules no walk finds anything, and each rule is needed unless its variant says that another one
// suffices: without it, some walk finds what the rule prevents. (`make model` makes more walks, and writes
// what they find.)
func TestEachRuleOfLinksIsNeeded(t *testing.T) {
	for _, v := range variants {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			if err := v.play(nil, 1500); err != nil {
				t.Error(err)
			}
		})
	}
}

// A walk that is made again, or made shorter, finds the same; what is not expected is an error.
func TestAWalkCanBeMadeAgain(t *testing.T) {
	v := variants[1]
	for seed := range 100 {
		walk, w := v.walk(seed)
		again := newWorld(v.without, nil)
		if again.run(walk) != w.found || again.now != w.now || again.ids != w.ids {
			t.Fatalf("with seed %d: %q, then %q", seed, w.found, again.found)
		}
	}
	var out strings.Builder
	if err := v.play(&out, 100); err != nil || !strings.Contains(out.String(), "*** "+v.breaks) {
		t.Error(err, out.String())
	}
	if v.breaks = ""; v.play(nil, 100) == nil {
		t.Error("what is not expected is no error")
	}
	if v = variants[0]; variant.play(variant{v.name, v.without, twoHolders, v.plot}, nil, 10) == nil {
		t.Error("what is not found is no error")
	}
	if played, err := Play(&out, 1, "no such"); played != 0 || err != nil {
		t.Error(played, err)
	}
}
