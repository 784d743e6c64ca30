// Lines prints the size of the repository: the library room by room beside its budget, tests wherever they
// live, and tools; and for each package of the library what makes it hard to hold in one's head. Run it in
// the root of the repository, as make lines does.
package main

import (
	"cmp"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"text/tabwriter"
)

// A room is a part of the repository that is counted apart, and may have a budget.
type room struct {
	list   string
	name   string
	budget int      // of lines; 0: none
	files  []string // patterns: "dir/" is all below it, "**x" all that ends in x, others are those of path.Match
}

// rooms are all rooms. A file is in the first one that has a pattern for it.
var rooms = []room{
	{"tools", "bench, bench/peers", 0, []string{"bench/"}},
	{"tools", "docs/check", 0, []string{"docs/check/"}},
	{"tools", "examples", 0, []string{"examples/"}},
	{"tools", "faults", 0, []string{"faults/"}},
	{"tools", "internal/lines, progress, histogram, checkrun", 0,
		[]string{"internal/lines/", "internal/progress/", "internal/histogram/", "internal/checkrun/"}},

	{"tests", "cmd/flightlock", 0, []string{"cmd/flightlock/*_test.go"}},
	{"tests", "root, and examples", 0, []string{"*_test.go"}},
	{"tests", "test", 0, []string{"test/"}},
	{"tests", "internal/redistest, testkit, procs, clocktest", 0,
		[]string{"internal/redistest/", "internal/testkit/", "internal/procs/", "internal/clocktest/"}},
	{"tests", "internal/sim, mutants", 0, []string{"internal/sim/", "internal/mutants/"}},
	{"tests", "docs/model", 0, []string{"docs/model/"}},
	{"tests", "internal/doctest", 0, []string{"internal/doctest/"}},
	{"tests", "beside the source, below the root", 0, []string{"**_test.go"}},

	{"tools", "cmd/flightlock", 1200, []string{"cmd/"}},

	{"library", "fetch", 2000, []string{"fetch/"}},
	{"library", "root", 2800, []string{"*.go"}},
	{"library", "rediscache", 2000, []string{"rediscache/"}},
	{"library", "fenced, flightlocktest, prom", 950, []string{"fenced/", "flightlocktest/", "prom/"}},
	{"library", "election", 250, []string{"election/"}},
	{"library", "once", 180, []string{"once/"}},
	{"library", "semaphore", 250, []string{"semaphore/"}},
	{"library", "lua", 700, []string{"lua/"}},
	{"library", "internal/flight", 2500, []string{"internal/flight/"}},
	{"library", "internal/quorum", 2000, []string{"internal/quorum/"}},
	{"library", "internal/node", 1800, []string{"internal/node/"}},
	{"library", "internal/link (conn)", 1600, []string{"internal/link/", "internal/conn/"}},
	{"library", "internal/coalesce, check and what is small", 2600, []string{"**"}},
}

// place is the index of a file's room.
func place(file string) int {
	return slices.IndexFunc(rooms, func(r room) bool {
		return slices.ContainsFunc(r.files, func(pattern string) bool {
			if end, is := strings.CutPrefix(pattern, "**"); is {
				return strings.HasSuffix(file, end)
			}
			match, _ := path.Match(pattern, file)
			return match || strings.HasSuffix(pattern, "/") && strings.HasPrefix(file, pattern)
		})
	})
}

// A tree is the size of a repository.
type tree struct {
	rooms    []lines           // as rooms
	packages map[string]*shape // of the library, by their directories
	twice    []string          // pairs of places in the library's Go that share their lines: see together
}

// read counts the files of Go and Lua below a directory.
func read(repository fs.FS) (tree, error) {
	t := tree{rooms: make([]lines, len(rooms)), packages: map[string]*shape{}}
	places := windows{}
	err := fs.WalkDir(repository, ".", func(file string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && file != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata"):
			return fs.SkipDir
		case d.IsDir(), path.Ext(file) != ".go" && path.Ext(file) != ".lua":
			return nil
		}
		text, err := fs.ReadFile(repository, file)
		if err != nil {
			return err
		}
		count := countGo
		if path.Ext(file) == ".lua" {
			count = countLua
		}
		i, n := place(file), count(text)
		t.rooms[i] = t.rooms[i].plus(n)
		if rooms[i].list != "library" {
			return nil
		}
		if path.Ext(file) == ".go" {
			t.twice = append(t.twice, places.add(file, string(text))...)
		}
		dir := path.Dir(file)
		if t.packages[dir] == nil {
			t.packages[dir] = &shape{}
		}
		return t.packages[dir].add(file, text, n)
	})
	return t, err
}

// print writes the tables.
func (t tree) print(to io.Writer) error {
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	for _, list := range []string{"library", "tests", "tools"} {
		fmt.Fprintf(w, "%s\tbudget\tlines\tcode\tcomments\tblank\n", list)
		sum, budget := lines{}, map[string]int{"tests": 36000}[list]
		for i, r := range rooms {
			if r.list == list {
				sum, budget = sum.plus(t.rooms[i]), budget+r.budget
				t.rooms[i].print(w, r.name, r.budget)
			}
		}
		sum.print(w, "sum", budget)
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w, "package\tmutexes\tfields of the largest types\tfiles over 450 lines")
	mutexes := 0
	for _, dir := range slices.Sorted(maps.Keys(t.packages)) {
		p := t.packages[dir]
		slices.SortFunc(p.types, func(a, b typ) int {
			return cmp.Or(b.fields-a.fields, cmp.Compare(a.name, b.name))
		})
		var largest []string
		for _, t := range p.types[:min(3, len(p.types))] {
			largest = append(largest, fmt.Sprintf("%s %d", t.name, t.fields))
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\n", dir, p.mutexes, strings.Join(largest, ", "), strings.Join(p.long, ", "))
		mutexes += p.mutexes
	}
	fmt.Fprintf(w, "sum\t%d\n", mutexes)
	for _, places := range t.twice {
		fmt.Fprintf(w, "%d lines are the same: %s\n", together, places)
	}
	return w.Flush()
}

func main() {
	t, err := read(os.DirFS("."))
	if err == nil {
		err = t.print(os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "lines:", err)
		os.Exit(1)
	}
}
