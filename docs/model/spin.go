package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// search is one exhaustive search of grants.pml, which examines every interleaving.
type search struct {
	name, defines string
	finds         bool // it must find a state with two valid leases, or with a token that does not rise
}

var searches = []search{
	{"polls, offers, grants", "", false},
	{"and refreshes", "-DREFRESH", false},
	{"loss of memory, three clients", "-DLOSS -DC=3 -DSTAMPS=1", false},
	{"loss, refreshes, no offers", "-DLOSS -DREFRESH -DNO_OFFERS", false},
	{"tokens", "-DTOKENS -DSTAMPS=1 -DMOST=2", false},
	{"no S8", "-DTOKENS -DSTAMPS=1 -DMOST=2 -DNO_S8", true},
	{"no S15", "-DNO_S15", true},
	{"no S17", "-DNO_S17 -DLOSS", true},
	{"no S18", "-DNO_S18", true},
	{"no S19", "-DNO_S19", true},
	{"the largest validity", "-DNO_MINIMUM", true},
	{"a forgetful node confirms refreshes at once", "-DLOSS -DREFRESH -DNO_OFFERS -DAT_ONCE", true},
}

// errNoSpin says that nothing was searched.
var errNoSpin = errors.New("spin or gcc is not on this machine")

// searchAll runs the searches of the protocol in file, and returns an error if one does not find
// what it should.
func searchAll(out io.Writer, file string) error {
	for _, tool := range []string{"spin", "gcc"} {
		if _, err := exec.LookPath(tool); err != nil {
			return errNoSpin
		}
	}
	source, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	for _, s := range searches {
		if err := s.run(out, source); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

var (
	statesLine = regexp.MustCompile(`(\d+) states, stored`)
	incomplete = regexp.MustCompile(`too small|not completed|out of memory`)
	depthLine  = regexp.MustCompile(`depth reached (\d+), errors: (\d+)`)
)

func (s search) run(out io.Writer, source []byte) error {
	dir, err := os.MkdirTemp("", "grants")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "grants.pml"), source, 0o600); err != nil {
		return err
	}
	// 2 GB at most, and ten minutes: a search that needs more is an error, never a smaller search.
	for _, command := range []string{
		"spin " + s.defines + " -a grants.pml",
		"gcc -w -O1 -DSAFETY -DNOREDUCE -DCOLLAPSE -DMEMLIM=2000 -o pan pan.c",
		"./pan -E -m2000000 -Q10",
	} {
		words := strings.Fields(command)
		c := exec.Command(words[0], words[1:]...) //nolint:gosec // these are above
		c.Dir = dir
		text, err := c.CombinedOutput()
		if words[0] != "./pan" {
			if err != nil {
				return fmt.Errorf("%s: %w: %s", words[0], err, text)
			}
			continue
		}
		states, depth := statesLine.FindSubmatch(text), depthLine.FindSubmatch(text)
		if states == nil || depth == nil {
			return fmt.Errorf("no result: %s", text)
		}
		found := string(depth[2]) != "0"
		what := "nothing found, in all states"
		if found {
			what = "found"
		}
		fmt.Fprintf(out, "exhaustive: %-37s %8s states, depth %7s: %s\n", s.name, states[1], depth[1], what)
		switch {
		case found != s.finds:
			return errors.New("it has not found what it should, or what it should not")
		case !found && (err != nil || incomplete.Match(text)):
			return fmt.Errorf("it is not complete: %s", text)
		}
	}
	return nil
}
