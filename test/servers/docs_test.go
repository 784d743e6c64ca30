package servers

import (
	"flag"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/flightlock/flightlock/internal/testkit"
)

var updateDocs = flag.Bool("update-docs", false, "write the table of docs/servers.md")

const page = "docs/servers.md"

// docs/servers.md shows the table of this package.
func TestTheDocsShowTheTable(t *testing.T) {
	text, err := os.ReadFile(testkit.File(page))
	testkit.Must(t, err)
	want := string(text)
	const begin, end = "<!-- cells: begin -->\n", "<!-- cells: end -->"
	before, rest, found := strings.Cut(want, begin)
	_, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		t.Fatalf("%s has no %q, or no %q behind it", page, begin, end)
	}
	want = before + begin + strings.Join(cellRows(), "\n") + "\n" + end + after
	if want == string(text) {
		return
	}
	if !*updateDocs {
		t.Fatalf("the table of %s is another: go test ./test/servers -run TestTheDocsShowTheTable -update-docs",
			page)
	}
	testkit.Must(t, os.WriteFile(testkit.File(page), []byte(want), 0o600))
}

// kindsOfTheDocs are the rows of docs/servers.md: for each the name of a kind, and the rows of the table that
// it was tried as.
func kindsOfTheDocs(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile(testkit.File(page))
	testkit.Must(t, err)
	kinds := map[string][]string{}
	for _, row := range regexp.MustCompile(`(?m)^\| \*\*(.*)\*\* \|.*\| (.*) \|$`).FindAllStringSubmatch(
		string(text), -1) {
		kinds[row[1]] = strings.Split(row[2], ", ")
	}
	return kinds
}

// What docs/servers.md says was tried is in the table of this package, and all of that.
func TestTheDocsHaveAllKinds(t *testing.T) {
	tried := slices.Concat(slices.Collect(maps.Values(kindsOfTheDocs(t)))...)
	for _, name := range tried {
		if name != "" && !slices.ContainsFunc(table, func(r row) bool { return r.kind == name }) {
			t.Errorf("%s: no kind %s", page, name)
		}
	}
	for _, r := range table {
		if !slices.Contains(tried, r.kind) {
			t.Errorf("%s is in the table, and not in %s", r.kind, page)
		}
	}
}

// cellRows are the table of this package.
func cellRows() []string {
	head, line := "| kind |", "|---|"
	for _, try := range tries {
		head, line = head+" "+try.name+" |", line+"---|"
	}
	rows := []string{head, line}
	for _, r := range table {
		cells := "| " + r.kind + " |"
		for _, try := range tries {
			one := (&subject{kind: r.kind, urls: make([]string, 1)}).expected(try.name)
			three := (&subject{kind: r.kind, urls: make([]string, 3)}).expected(try.name)
			if one == three || try.name == "loss" { // which is tried on three
				cells += " " + three + " |"
			} else {
				cells += " " + one + "; 3 nodes: " + three + " |"
			}
		}
		rows = append(rows, strings.ReplaceAll(cells, refused+" |", "refused |"))
	}
	return rows
}
