package main

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
)

// With all rules nothing is wrong, and each rule is needed: without it, some world finds what the
// rule prevents. (`make model` runs more worlds.)
func TestEachRuleIsNeeded(t *testing.T) {
	const sound, broken = 40, 2000 // worlds
	for _, v := range variants {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			if v.breaks == "" {
				if err := v.play(sound).asExpected(v); err != nil {
					t.Error(err)
				}
				return
			}
			for seed := range uint64(broken) {
				if v.world(rare[v.name]+seed, nil).run().found == v.breaks {
					return
				}
			}
			t.Errorf("%d worlds have not found %s", broken, v.breaks)
		})
	}
}

// A seed determines a whole world, so what it finds can be examined.
func TestASeedIsAWorld(t *testing.T) {
	var a, b bytes.Buffer
	for _, out := range []*bytes.Buffer{&a, &b} {
		if err := play(out, 0, "grants", 7); err != nil {
			t.Fatal(err)
		}
	}
	if a.String() != b.String() || !strings.Contains(a.String(), "holds the key as") {
		t.Error("two worlds of one seed are not the same, or nothing happens in them")
	}
	if err := play(&a, 1, "no such", -1); err == nil {
		t.Error("a variant that does not exist was played")
	}
}

// An outcome that is not the expected one is an error.
func TestWhatIsNotExpectedIsAnError(t *testing.T) {
	sound, broken := variants[0], variants[4]
	if sound.breaks != "" || broken.breaks == "" {
		t.Fatal("other variants")
	}
	quiet := outcome{worlds: 1}
	loud := outcome{worlds: 1, found: map[string]int{broken.breaks: 1}}
	if quiet.asExpected(sound) != nil || loud.asExpected(broken) != nil {
		t.Error("what is expected is an error")
	}
	if quiet.asExpected(broken) == nil || loud.asExpected(sound) == nil {
		t.Error("what is not expected is none")
	}
}

// The result of every exhaustive search is as expected: of the quick ones always, and of all if
// FLIGHTLOCK_LONG is set, which takes some minutes.
func TestExhaustively(t *testing.T) {
	err := searchAll(t.Output(), ".", os.Getenv("FLIGHTLOCK_LONG") != "")
	if errors.Is(err, errNoSpin) {
		t.Skip(err)
	}
	if err != nil {
		t.Error(err)
	}
}
