package doctest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"unicode"
	"unicode/utf8"
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

// code is the text of each file of Go and Lua of the repository, in every module, by its path.
var code = sync.OnceValues(func() (map[string]string, error) {
	texts := map[string]string{}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, ".lua") {
			return err
		}
		text, err := os.ReadFile(path)
		texts[filepath.ToSlash(path)] = string(text)
		return err
	})
	return texts, err
})

// sources are the files of code whose paths end so.
func sources(t *testing.T, suffix string) map[string]string {
	t.Helper()
	all, err := code()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 400 {
		t.Fatalf("only %d files found", len(all))
	}
	some := map[string]string{}
	for path, text := range all {
		if strings.HasSuffix(path, suffix) {
			some[path] = text
		}
	}
	return some
}

// tests are the tests, benchmarks and examples that there are, in any package of any module.
func tests(t *testing.T) map[string]bool {
	t.Helper()
	there := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Example|Fuzz)\w+)\(`)
	for _, text := range sources(t, "_test.go") {
		for _, m := range declared.FindAllStringSubmatch(text, -1) {
			there[m[1]] = true
		}
	}
	return there
}

// Every test that the docs name exists, in one of the modules.
func TestTestsInTheDocsExist(t *testing.T) {
	there, named := tests(t), 0
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

// Every file that the docs point to exists.
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

// Every error text that the on-call table of docs/operations.md quotes is one that the code
// returns.
func TestErrorTextsInTheDocsExist(t *testing.T) {
	var library strings.Builder
	for path, text := range sources(t, ".go") {
		if !strings.HasSuffix(path, "_test.go") {
			library.WriteString(text)
		}
	}
	_, table, _ := strings.Cut(pages(t)["docs/operations.md"], "## On call")
	table, _, _ = strings.Cut(table, "\n## ")
	variable := regexp.MustCompile(`\.\.\.:?|\d+ms|NodeTimeout$`) // between the constant parts of a text
	quoted := 0
	for _, m := range regexp.MustCompile("`([a-zA-Z][^`|]* [^`|]*)`").FindAllStringSubmatch(table, -1) {
		for _, part := range variable.Split(m[1], -1) {
			part = strings.TrimSpace(part)
			oneWord := !strings.Contains(part, " ")
			if oneWord || part == "i/o timeout" || part == "connection refused" { // texts of the operating system
				continue
			}
			if quoted++; !strings.Contains(library.String(), part) {
				t.Errorf("docs/operations.md quotes %q: no error has the text %q", m[1], part)
			}
		}
	}
	if quoted < 15 {
		t.Errorf("only %d texts are quoted: is this the right pattern?", quoted)
	}
}

// The map names what is there: every word in backticks in docs/design.md is one of the code, and
// every file that it names exists.
func TestNamesInTheMapExist(t *testing.T) {
	// members of the packages and types of this module
	words, owns := map[string]bool{}, map[string]map[string]bool{}
	for path, text := range sources(t, "") {
		for word := range strings.FieldsFuncSeq(text, noWord) {
			words[word] = true
		}
		if strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
			if err := addMembers(owns, path, text); err != nil {
				t.Fatal(err)
			}
		}
	}
	text := pages(t)["docs/design.md"]
	named := regexp.MustCompile("`([A-Za-z_.]+)`").FindAllStringSubmatch(text, -1)
	for _, m := range named {
		parts := strings.Split(m[1], ".")
		if parts[0] == "redis" { // members of go-redis that are called here
			parts = parts[len(parts)-1:]
		}
		for i, word := range parts {
			if !words[word] || i > 0 && owns[parts[i-1]] != nil && !owns[parts[i-1]][word] {
				t.Errorf("docs/design.md names %s, which is not in the code", m[1])
			}
		}
	}
	if len(named) < 50 {
		t.Errorf("only %d names: is this the right pattern?", len(named))
	}
	for _, file := range regexp.MustCompile(`[\w/]+\.(?:go|lua)\b`).FindAllString(text, -1) {
		if _, err := os.Stat(file); err != nil {
			t.Errorf("docs/design.md: %v", err)
		}
	}
}

// noWord reports whether r is not part of a name. (A regular expression takes seconds for all
// files, with the race detector.)
func noWord(r rune) bool { return r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r) }

// addMembers adds what a file declares: to its package, and fields and methods to their types.
func addMembers(owns map[string]map[string]bool, path, text string) error {
	file, err := parser.ParseFile(token.NewFileSet(), path, text, 0)
	if err != nil {
		return err
	}
	add := func(owner, name string) {
		if owns[owner] == nil {
			owns[owner] = map[string]bool{}
		}
		owns[owner][name] = true
	}
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			owner := file.Name.Name
			if d.Recv != nil {
				owner = strings.TrimLeft(types.ExprString(d.Recv.List[0].Type), "*")
				owner, _, _ = strings.Cut(owner, "[")
			}
			add(owner, d.Name.Name)
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				if spec, is := spec.(*ast.TypeSpec); is {
					add(file.Name.Name, spec.Name.Name)
					ast.Inspect(spec.Type, func(n ast.Node) bool {
						if f, is := n.(*ast.Field); is {
							for _, name := range f.Names {
								add(spec.Name.Name, name.Name)
							}
						}
						return true
					})
				}
			}
		}
	}
	return nil
}

// Each row of the map's table of packages names what its packages import of this module.
func TestImportsInTheMap(t *testing.T) {
	_, table, _ := strings.Cut(pages(t)["docs/design.md"], "## Packages")
	table, _, _ = strings.Cut(table, "\n## ")
	rows := 0
	row := regexp.MustCompile(`(?m)^\| ([\w/, ]+) \| .* \| ([^|]+) \|$`)
	for _, row := range row.FindAllStringSubmatch(table, -1) {
		packages, named := packagesIn(row[1]), packagesIn(row[2])
		if strings.Contains(row[2], "some of") || len(packages) == 0 {
			continue
		}
		rows++
		imported := map[string]bool{}
		for dir := range packages {
			for path := range importsOf(t, dir) {
				imported[path] = true
			}
		}
		for path := range imported {
			if !named[path] {
				t.Errorf("docs/design.md: %s imports %s", row[1], path)
			}
		}
		for path := range named {
			if !imported[path] {
				t.Errorf("docs/design.md: %s does not import %s", row[1], path)
			}
		}
	}
	if rows < 12 {
		t.Errorf("only %d rows: is this the right pattern?", rows)
	}
}

// packagesIn are the directories of the packages that a cell of the table names; without what is in
// parentheses, and internal ones also without their prefix.
func packagesIn(cell string) map[string]bool {
	dirs := map[string]bool{}
	names := regexp.MustCompile(`\(.*?\)`).ReplaceAllString(cell, "")
	for _, name := range strings.FieldsFunc(names, func(r rune) bool { return r == ',' || r == ' ' }) {
		for _, dir := range []string{name, "internal/" + name} {
			if files, err := filepath.Glob(filepath.Join(dir, "*.go")); err == nil && len(files) > 0 {
				dirs[dir] = true
			}
		}
		if name == "root" {
			dirs["."] = true
		}
	}
	return dirs
}

// importsOf are the packages of this module that the package in dir imports, but for those of its own
// row, without its tests.
func importsOf(t *testing.T, dir string) map[string]bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	paths := map[string]bool{}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range file.Imports {
			path, ours := strings.CutPrefix(strings.Trim(i.Path.Value, `"`), "github.com/flightlock/flightlock")
			if ours {
				paths[filepath.ToSlash(filepath.Clean("./"+path))] = true
			}
		}
	}
	return paths
}

// README is read in ten minutes, and prose is no wider than a page.
func TestSizeOfTheDocs(t *testing.T) {
	for file, text := range pages(t) {
		lines := strings.Split(text, "\n")
		if file == "README.md" && len(lines) > 201 {
			t.Errorf("%s has %d lines, more than 200", file, len(lines)-1)
		}
		block, generated := "", false // blocks of commands, and the output of programs, may be wider
		for i, line := range lines {
			switch {
			case strings.HasPrefix(line, "```") && block == "":
				block = line
			case strings.HasPrefix(line, "```"):
				block = ""
			case strings.Contains(line, "begin -->"), strings.HasPrefix(line, "<!-- the output"):
				generated = true
			case strings.Contains(line, "end -->"), strings.HasPrefix(line, "<!-- end"):
				generated = false
			case block != "" && !strings.HasPrefix(block, "```go"), generated:
			case strings.HasPrefix(line, "|"), strings.HasPrefix(line, "!["), strings.HasPrefix(line, "`"):
			case utf8.RuneCountInString(line) > 100:
				t.Errorf("%s:%d has more than 100 columns", file, i+1)
			}
		}
	}
}

// Code is no wider than 110 columns, with a tab as one. Only the output of an example may be: it is as long
// as it is.
func TestWidthOfTheCode(t *testing.T) {
	for path, text := range sources(t, ".go") {
		output := false // in the comment that ends an example
		for i, line := range strings.Split(text, "\n") {
			comment := strings.TrimSpace(line)
			output = strings.HasPrefix(comment, "// Output:") || output && strings.HasPrefix(comment, "//")
			if !output && utf8.RuneCountInString(line) > 110 {
				t.Errorf("%s:%d has more than 110 columns", path, i+1)
			}
		}
	}
}
