package doctest

import (
	"regexp"
	"strings"
	"testing"
)

// A claim is a paragraph of docs/guarantees.md with a number.
type claim struct {
	number    string
	text      string // as one line
	attackers string // what it names after "Attacked by"; "" if it does not say that
}

// claimsOf are the claims of a page.
func claimsOf(page string) (all []claim) {
	for _, m := range regexp.MustCompile(`(?m)^\*\*G(\d+)\.\*\* (?:.+\n)+`).FindAllStringSubmatch(page, -1) {
		c := claim{number: "G" + m[1], text: strings.Join(strings.Fields(m[0]), " ")}
		_, c.attackers, _ = strings.Cut(c.text, "Attacked by ")
		all = append(all, c)
	}
	return all
}

// problems are what is wrong with a claim. there are the tests that exist, and known are the texts that have
// the names of the invariants, mutations and faults that exist.
func (c claim) problems(there map[string]bool, known map[string]string) (all []string) {
	if strings.Contains(c.text, "Not tested.") {
		if c.attackers != "" {
			return []string{c.number + " names what attacks it, and says that it is not tested"}
		}
		return nil
	}
	named := regexp.MustCompile("`((?:Test|Fuzz)[A-Z]\\w*)`").FindAllStringSubmatch(c.attackers, -1)
	if len(named) == 0 {
		all = append(all, c.number+" names no test that attacks it, nor does it say that none does")
	}
	for _, m := range named {
		if !there[m[1]] {
			all = append(all, c.number+" names "+m[1]+", which does not exist")
		}
	}
	attacks := regexp.MustCompile(`(invariant|mutation|fault) "([^"]+)"`)
	for _, m := range attacks.FindAllStringSubmatch(c.attackers, -1) {
		if !strings.Contains(known[m[1]], m[2]) {
			all = append(all, c.number+" names the "+m[0]+", which does not exist")
		}
	}
	return all
}

// Every claim of docs/guarantees.md has a number of its own and names tests that attack it, wherever in the
// repository they are, or says that it is not tested. The tests that it names exist, and so do the invariants
// and mutations of the simulation, and the faults.
func TestEveryClaimNamesWhatAttacksIt(t *testing.T) {
	const page = "docs/guarantees.md"
	text := pages(t)[page]
	known := map[string]string{
		"invariant": flat(t, "internal/sim/check.go"),
		"mutation":  flat(t, "internal/sim/mutation_test.go", "internal/mutants/table.go"),
		"fault":     flat(t, "faults/scenarios.go"),
	}
	claims := claimsOf(text)
	if len(claims) < 30 || len(claims) != strings.Count(text, "\n**G") {
		t.Errorf("%d claims with a number, of %d", len(claims), strings.Count(text, "\n**G"))
	}
	there, seen := tests(t), map[string]bool{}
	for _, c := range claims {
		if seen[c.number] {
			t.Errorf("%s: two claims have the number %s", page, c.number)
		}
		seen[c.number] = true
		for _, problem := range c.problems(there, known) {
			t.Errorf("%s: %s", page, problem)
		}
	}
}

// flat is the text of those of the files that exist as one line, without the signs of comments.
func flat(t *testing.T, files ...string) string {
	t.Helper()
	text := ""
	for _, file := range files {
		text += "\n" + sources(t, file)[file]
	}
	return strings.Join(strings.Fields(strings.ReplaceAll(text, "\n//", "\n")), " ")
}

// A claim that loses its last test, one of several, or an invariant is noticed.
func TestAClaimThatLosesItsTestIsNoticed(t *testing.T) {
	there, known := map[string]bool{"TestA": true, "TestB": true},
		map[string]string{"invariant": "one at a time"}
	for page, want := range map[string]string{
		"It holds.\nAttacked by `TestA`, `TestB`; invariant \"one at\na time\".": "",
		"It holds. Not tested.":                               "",
		"It holds.\nAttacked by `TestA`, `TestLost`.":         "names TestLost, which does not exist",
		"It holds.\nAttacked by `FuzzLost`.":                  "names FuzzLost, which does not exist",
		"It holds. See `TestA`.":                              "names no test",
		"It holds.\nAttacked by invariant \"one at a time\".": "names no test",
		"It holds.\nAttacked by `TestA`; mutation \"two\".":   "names the mutation \"two\"",
		"It holds. Not tested.\nAttacked by `TestA`.":         "names what attacks it",
	} {
		claims := claimsOf("**G1.** " + page + "\n")
		if len(claims) != 1 {
			t.Fatalf("%q: %d claims", page, len(claims))
		}
		got := strings.Join(claims[0].problems(there, known), "; ")
		if (got == "") != (want == "") || !strings.HasPrefix(strings.TrimPrefix(got, "G1 "), want) {
			t.Errorf("%q: %q, want %q", page, got, want)
		}
	}
}
