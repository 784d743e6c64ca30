package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// search is one exhaustive search of a model, which examines every interleaving.
type search struct {
	file, name, defines string
	finds               string // what it must find, in spin's words; "": nothing
	quick               bool   // it takes a few seconds, most of them for the compiler
}

// What grants.pml finds is a state with two valid leases, or with a token that does not rise.
const violated = "assertion violated"

// What retained.pml finds: the name of what must never be, or a rival that waits for ever.
const (
	twoAtOnce   = "!(twoHolders)"
	afterRecall = "!(givenAfterRecall)"
	tooLate     = "!(givenTooLate)"
	afterClose  = "!(retainedAfterClose)"
	forever     = "acceptance cycle"
)

const once = "-DLIVE -DONCE -DN=3 -DNO_CHECK"

var searches = []search{
	{"grants.pml", "polls, offers, grants", "", "", false},
	{"grants.pml", "and refreshes", "-DREFRESH", "", false},
	{"grants.pml", "loss of memory, three clients", "-DLOSS -DC=3 -DSTAMPS=1", "", false},
	{"grants.pml", "loss, refreshes, no offers", "-DLOSS -DREFRESH -DNO_OFFERS", "", false},
	{"grants.pml", "tokens", "-DTOKENS -DSTAMPS=1 -DMOST=2", "", false},
	{"grants.pml", "no S8", "-DTOKENS -DSTAMPS=1 -DMOST=2 -DNO_S8", violated, false},
	{"grants.pml", "no S15", "-DNO_S15", violated, false},
	{"grants.pml", "no S17", "-DNO_S17 -DLOSS", violated, false},
	{"grants.pml", "no S18", "-DNO_S18", violated, false},
	{"grants.pml", "no S19", "-DNO_S19", violated, false},
	{"grants.pml", "the largest validity", "-DNO_MINIMUM", violated, false},
	{"grants.pml", "a forgetful node confirms refreshes", "-DLOSS -DREFRESH -DNO_OFFERS -DAT_ONCE", violated,
		false},

	{"retained.pml", "a lease is kept and recalled", "", "", true},
	{"retained.pml", "and closed", "-DCLOSE", "", false},
	{"retained.pml", "three nodes, one client retains", "-DN=3 -DONE", "", false},
	{"retained.pml", "three clients, one retains", "-DC=3 -DONE", "", false},
	{"retained.pml", "no S21: given after its validity", "-DNO_VALIDITY", twoAtOnce, false},
	{"retained.pml", "half of it is gone", "-DNO_HALF", tooLate, false},
	{"retained.pml", "no S22: given before the release", "-DNO_S22", twoAtOnce, false},
	{"retained.pml", "no S22: a renewal wins over a recall", "-DNO_PRIORITY", afterRecall, false},
	{"retained.pml", "retained by a closed client", "-DCLOSE -DNO_CLOSE", afterClose, false},
	{"retained.pml", "a rival is served: recalls", "-DLIVE -DNO_CHECK", "", false},
	{"retained.pml", "by checks, no recall arrives", "-DLIVE -DDEAF", "", false},
	{"retained.pml", "by the end, the holder has stopped", "-DLIVE -DDEAF -DNO_CHECK -DSTOPS", "", false},
	{"retained.pml", "recalls are ignored", "-DLIVE -DNO_CHECK -DNO_RECALL", forever, false},
	{"retained.pml", "no recall arrives, renewals do not check", "-DLIVE -DDEAF -DNO_CHECK", forever, true},
	{"retained.pml", "a recall of a lease in use is forgotten", "-DLIVE -DNO_CHECK -DNO_NEWS", forever, false},
	{"retained.pml", "refreshed while nobody uses it", "-DLIVE -DDEAF -DNO_CHECK -DSTOPS -DIDLE", forever,
		false}, {"retained.pml", "one poll is enough, an inbox breaks", once + " -DBREAKS=1", "", false},
	{"retained.pml", "two do, the majority stays the same", once + " -DSAME", "", false},
	{"retained.pml", "two do, the majority may change", once, forever, false},
	{"retained.pml", "retained without a majority", once + " -DSAME -DNO_UNMARK", forever, false},
	{"retained.pml", "a recall of an attempt is forgotten", once + " -DSAME -DNO_EARLY", forever, false},
}

// errNoSpin says that nothing was searched.
var errNoSpin = errors.New("spin or gcc is not on this machine")

// searchAll runs the searches of the models in dir, the quick ones or all, and returns an error if
// one does not find what it should.
func searchAll(out io.Writer, dir string, all bool) error {
	for _, tool := range []string{"spin", "gcc"} {
		if _, err := exec.LookPath(tool); err != nil {
			return errNoSpin
		}
	}
	for _, s := range searches {
		if !all && !s.quick {
			continue
		}
		if err := s.run(out, dir); err != nil {
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

func (s search) run(out io.Writer, models string) error {
	source, err := os.ReadFile(filepath.Join(models, s.file))
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "model")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, s.file), source, 0o600); err != nil {
		return err
	}
	// A search for a run in which somebody waits for ever assumes that whatever can happen from some
	// time on does happen (weak fairness).
	kind, search := "-DSAFETY", ""
	if strings.Contains(s.defines, "-DLIVE") {
		kind, search = "-DNFAIR=8", " -a -f"
	}
	optimize := "-O1"
	if s.quick {
		optimize = "-O0"
	}
	// 2 GB at most, and ten minutes: a search that needs more is an error, never a smaller search.
	for _, command := range []string{
		"spin " + s.defines + " -a " + s.file,
		"gcc -w " + optimize + " " + kind + " -DNOREDUCE -DCOLLAPSE -DMEMLIM=2000 -o pan pan.c",
		"./pan -E -m3000000 -Q10" + search,
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
		fmt.Fprintf(out, "%-12s: %-43s %8s states, depth %7s: %s\n", s.file, s.name, states[1], depth[1], what)
		switch {
		case found != (s.finds != "") || !bytes.Contains(text, []byte(s.finds)):
			return fmt.Errorf("it has not found what it should, or what it should not: %s", text)
		case !found && (err != nil || incomplete.Match(text)):
			return fmt.Errorf("it is not complete: %s", text)
		}
	}
	return nil
}
