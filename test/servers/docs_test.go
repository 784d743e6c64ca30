package servers

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	servers "github.com/flightlock/flightlock/internal/check"
	"github.com/flightlock/flightlock/internal/testkit"
)

var updateDocs = flag.Bool("update-docs", false, "write the tables of docs/servers.md")

// docs/servers.md shows the kinds of servers as Check names them, and the table of this package.
func TestTheDocsShowTheTable(t *testing.T) {
	const page = "docs/servers.md"
	text, err := os.ReadFile(testkit.File(page))
	testkit.Must(t, err)
	want := string(text)
	for name, rows := range map[string][]string{"kinds": kindRows(t), "cells": cellRows()} {
		begin, end := "<!-- "+name+": begin -->\n", "<!-- "+name+": end -->"
		before, rest, found := strings.Cut(want, begin)
		_, after, ended := strings.Cut(rest, end)
		if !found || !ended {
			t.Fatalf("%s has no %q, or no %q behind it", page, begin, end)
		}
		want = before + begin + strings.Join(rows, "\n") + "\n" + end + after
	}
	if want == string(text) {
		return
	}
	if !*updateDocs {
		t.Fatalf("the tables of %s are others: go test ./test/servers -run TestTheDocsShowTheTable -update-docs", page)
	}
	testkit.Must(t, os.WriteFile(testkit.File(page), []byte(want), 0o600))
}

// kindRows are the table of check.Kinds. What they say was tried is in the table of this package, all of it.
func kindRows(t *testing.T) []string {
	t.Helper()
	rows := []string{"| your Redis | products and services | how to connect | what works | what does not | tried as |",
		"|---|---|---|---|---|---|"}
	tried := map[string]bool{}
	for _, k := range servers.Kinds {
		for _, kind := range k.Tried {
			tried[kind] = true
			if !slices.ContainsFunc(table, func(r row) bool { return r.kind == kind }) {
				t.Errorf("%s: no kind %s", k.Name, kind)
			}
		}
		rows = append(rows, fmt.Sprintf("| **%s** | %s | %s | %s | %s | %s |", k.Name, k.Who, k.Connect, k.Works, k.Lacks,
			strings.Join(k.Tried, ", ")))
	}
	for _, r := range table {
		if !tried[r.kind] {
			t.Errorf("%s is in the table, and no kind of Check's", r.kind)
		}
	}
	return rows
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
