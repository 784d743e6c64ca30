package main

import (
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// A line with code is code, one with nothing but a comment is a comment, and what is in a string is code.
func TestCodeCommentsAndBlanksAreToldApart(t *testing.T) {
	source := "// Package p.\npackage p\n\n/* two\nlines */\nvar s = `a\n\n// no comment`\n\nvar v int // code\n"
	if got, want := countGo([]byte(source)), (lines{code: 5, comments: 3, blank: 2}); got != want {
		t.Errorf("Go: %+v, want %+v", got, want)
	}
	if got, want := countLua([]byte("-- head\n\nlocal a -- code\nreturn a")), (lines{2, 1, 1}); got != want {
		t.Errorf("Lua: %+v, want %+v", got, want)
	}
}

// Each file is counted in one room, and each package of the library has its mutexes, largest types and long
// files.
func TestARepositoryIsCountedByRooms(t *testing.T) {
	file := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	got, err := read(fstest.MapFS{
		"lock.go": file("package flightlock\n\nimport \"sync\"\n\ntype Lock struct {\n\tmu, other " +
			"sync.Mutex\n\ta int\n}\ntype small struct{ sync.RWMutex }\ntype none struct{}\ntype two struct{ a, b " +
			"int }\nfunc f(*sync.Mutex, sync.Locker) {}\n"),
		"lock_test.go":             file("package flightlock\n"),
		"fetch/fetch.go":           file("package fetch\n"),
		"lua/acquire.lua":          file("-- acquire\nreturn 1\n"),
		"internal/conn/conn.go":    file("package conn\n" + strings.Repeat("\n", 450)),
		"internal/new/new.go":      file("package new\n"),
		"internal/new/testdata/x":  file("x"),
		"test/forget/x_test.go":    file("package forget\n"),
		"internal/testkit/log.go":  file("package testkit\n"),
		"test/scale/e_test.go":     file("package scale\n"),
		"rediscache/a_test.go":     file("package rediscache\n"),
		"bench/bench_test.go":      file("package bench\n"),
		"docs/check/check.go":      file("package check\n"),
		"cmd/flightlock/a.go":      file("package main\n"),
		"cmd/flightlock/a_test.go": file("package main\n"),
		".git/hook.go":             file("not counted"),
		"README.md":                file("not counted"),
	})
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := got.print(&out); err != nil {
		t.Fatal(err)
	}
	rows := map[string]bool{}
	for line := range strings.Lines(out.String()) {
		rows[strings.Join(strings.Fields(line), " ")] = true
	}
	for _, row := range []string{
		"fetch 2000 1 1 0 0", "root 2800 12 10 0 2", "lua 700 2 1 1 0",
		"internal/link (conn) 1600 451 1 0 450", "internal/coalesce, check and what is small 2600 1 1 0 0",
		"sum 19630 467 14 1 452",
		"root, and examples 1 1 0 0", "test 2 2 0 0",
		"internal/redistest, testkit, procs, clocktest 1 1 0 0", "beside the source, below the root 1 1 0 0",
		"sum 36000 6 6 0 0", "bench, bench/peers 1 1 0 0", "docs/check 1 1 0 0", "sum 1200 3 3 0 0",
		"cmd/flightlock 1200 1 1 0 0", "cmd/flightlock 1 1 0 0",
		". 3 Lock 3, two 2, small 1", "internal/conn 0 conn.go 451", "sum 3",
	} {
		if !rows[row] {
			t.Errorf("no row %q in:\n%s", row, &out)
		}
	}
}

// No two places of the library share eight lines.
func TestTheLibrarySaysNothingTwice(t *testing.T) {
	got, err := read(os.DirFS("../.."))
	if err != nil {
		t.Fatal(err)
	}
	for _, places := range got.twice {
		t.Errorf("%s: what they share belongs into a function", places)
	}

	const head, block = "package p\n",
		"var a int\nvar b int\nvar c int\n// whatever\nvar d int\nvar e int\nvar f int\nvar g int\n"
	got, err = read(fstest.MapFS{
		"fetch/a.go":       {Data: []byte(head + block + "\tvar h int\n")},
		"fetch/b.go":       {Data: []byte(head + "var i int\n" + block)},
		"rediscache/c.go":  {Data: []byte(head + "var x int\n" + block + "\nvar h int\n")},
		"fetch/a_test.go":  {Data: []byte(head + block + "var h int\n")},
		"test/forget/d.go": {Data: []byte(head + block + "var h int\n")},
	})
	if want := []string{"fetch/a.go:2 and rediscache/c.go:3"}; err != nil || !slices.Equal(got.twice, want) {
		t.Errorf("%q, %v, want %q", got.twice, err, want)
	}
}
