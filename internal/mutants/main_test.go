package main

import (
	"path/filepath"
	"regexp"
	"slices"
	"testing"
)

// Every mutant still finds its text, and has an id of its own. If one does not find it, the rule has moved,
// and so must the mutant.
func TestMutationsApply(t *testing.T) {
	t.Chdir("../..")
	seen := map[string]bool{}
	for _, m := range mutants {
		if _, _, err := m.patched(); err != nil {
			t.Errorf("%s: %v", m.id, err)
		}
		if seen[m.id] || !regexp.MustCompile(`^[GS][1-9]\d?[a-f]?-[A-Za-z-]+$`).MatchString(m.id) {
			t.Errorf("%s: there are two of that id, or it is none", m.id)
		}
		seen[m.id] = true
	}
}

// The table of results has a test for every mutant that kills it, and that is still there.
func TestEveryMutantIsKilled(t *testing.T) {
	found, err := readResults("killed.tsv")
	if err != nil {
		t.Fatal(err)
	}
	killed := map[string]bool{}
	for _, x := range found {
		killed[x.id] = killed[x.id] || x.isThere(filepath.Join("../..", x.pkg))
	}
	for _, m := range mutants {
		if !killed[m.id] {
			t.Errorf("killed.tsv has no test that kills %s: run make mutations ONLY='^%[1]s$'", m.id)
		}
	}
}

// The output of a run says which tests have failed, and which were running when it ended early.
func TestWhichTestsHaveFailed(t *testing.T) {
	const begin = "\x16=== RUN   TestA\n\x16--- PASS: TestA (0.00s)\n\x16=== RUN   TestB\n\x16=== RUN   " +
		"TestB/sub\n    b_test.go:1: bad\n\x16--- FAIL: TestB (0.10s)\n    \x16--- FAIL: TestB/sub (0.10s)\n"
	const hangs = begin +
		"\x16=== RUN   TestC\n\x16=== PAUSE TestC\n\x16=== RUN   TestD\nof D: \x16=== RUN   TestD/x\n"
	for _, x := range []struct {
		out    string
		failed bool
		want   []string
	}{
		{begin, true, []string{"TestB"}},
		{hangs + "panic: oh\n", true, []string{"TestB", "TestD(panic)"}},
		{hangs + "panic: test timed out after 1m0s\n", true, []string{"TestB", "TestD(timeout)"}},
		{begin + "panic: of TestB\n", true, []string{"TestB(panic)"}},
		{"\x16=== RUN   TestA\n\x16--- PASS: TestA (0.00s)\ngoleak\n", true, []string{"(package)"}},
		{"\x16=== RUN   TestA\n\x16--- PASS: TestA (0.00s)\n", false, nil},
	} {
		if got := failures(x.out, x.failed); !slices.Equal(got, x.want) {
			t.Errorf("got %q, want %q of\n%s", got, x.want, x.out)
		}
	}
}
