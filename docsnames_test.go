package flightlock_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// pages are the texts of README.md and docs by their file names.
func pages(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	texts := map[string]string{}
	for _, file := range append(files, "README.md") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		texts[file] = string(text)
	}
	if len(texts) < 4 {
		t.Fatalf("only %d pages found", len(texts))
	}
	return texts
}

// Every test that the docs name is there, in one of the modules.
func TestTestsInTheDocsExist(t *testing.T) {
	there := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Example|Fuzz)\w+)\(`)
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, m := range declared.FindAllStringSubmatch(string(source), -1) {
			there[m[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	named := 0
	for file, text := range pages(t) {
		for _, m := range regexp.MustCompile(`\b(?:Test|Benchmark|Example|Fuzz)[A-Z]\w*`).FindAllString(text, -1) {
			if named++; !there[m] {
				t.Errorf("%s names %s, which does not exist", file, m)
			}
		}
	}
	if named == 0 {
		t.Error("no test is named: is this the right pattern?")
	}
}

// Every file that the docs point to is there.
func TestLinksInTheDocsLead(t *testing.T) {
	for file, text := range pages(t) {
		for _, m := range regexp.MustCompile(`\]\(([^)#]+)[^)]*\)`).FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(file), m[1])); err != nil {
				t.Errorf("%s: %v", file, err)
			}
		}
	}
}
