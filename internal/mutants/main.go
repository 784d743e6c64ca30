// Command mutants breaks the code, one rule at a time, and writes which tests notice it: make mutations. The
// table of mutants is in table.go, the results are in killed.tsv.
//
// A mutant is another text in one file, in builds of its own (go test -overlay). The tests of the packages
// that import the changed one are run, those that cost least first: its own, the simulation if that must
// notice, the others, and at last those that mostly talk to real servers. By default they end with the first
// package in which a test fails, since the mutant is dead then. A mutant that nothing kills is an error: a
// test is missing.
//
// A test kills a mutant if it fails with it twice in a row, or panics or hangs, and does not fail without it.
// Each package is therefore run without a mutant, too, once, before the first mutant that needs it.
//
// Every run is written down when it ends. The next one leaves out mutants that were killed if neither they
// nor the texts of their files have changed, and a test that has killed them is still there; and what else
// has been tried, if no file of the test has changed.
package main

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// mutant breaks one rule.
type mutant struct {
	// for good: the rule (G1... of docs/guarantees.md, S1... of docs/design.md), and what is broken
	id       string
	breaks   string // what happens; docs/guarantees.md quotes it
	file     string // from the root of the module
	old, new string // old must occur exactly once
	sim      bool   // the simulation must notice it within 1,000 seeds: -sim tries that
}

var (
	all = flag.Bool("all", false,
		"run the tests of all packages, not only up to the first in which one fails")
	fresh = flag.Bool("fresh", false, "forget earlier results of the mutants that are tried")
	only  = flag.String("only", "", "try those mutants whose id matches this regular expression")
	sim   = flag.Bool("sim", false,
		"try the simulation alone, on those that it must notice, and write no results")
	results = flag.String("results", "internal/mutants/killed.tsv", "the file of results")
	most    = flag.Int("p", 2, "how many are tried at the same time")
)

func main() {
	flag.Parse()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run() error {
	pattern, err := regexp.Compile(*only)
	if err != nil {
		return err
	}
	tried := slices.DeleteFunc(slices.Clone(mutants), func(m mutant) bool {
		return !pattern.MatchString(m.id) || *sim && !m.sim
	})
	r, err := newRunner(tried)
	if err != nil {
		return err
	}
	defer r.close()
	var mu sync.Mutex
	var bad []string
	var wg sync.WaitGroup
	slots := make(chan struct{}, max(*most, 1))
	for _, m := range tried {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			began := time.Now()
			how, err := r.try(m)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				how = "CANNOT BE TRIED: " + err.Error()
				bad = append(bad, m.id)
			case how == "":
				how = "SURVIVED: " + m.breaks
				bad = append(bad, m.id)
			}
			fmt.Printf("%-34s %4.0fs  %s\n", m.id, time.Since(began).Seconds(), how)
		})
	}
	wg.Wait()
	if err := r.write(); err != nil {
		return err
	}
	if len(bad) > 0 {
		return fmt.Errorf("%d of %d mutants are not killed: %s", len(bad), len(tried), strings.Join(bad, " "))
	}
	fmt.Printf("all %d mutants are killed\n", len(tried))
	return nil
}

// try runs tests with m, and reports which of them have killed it, by package; "": none.
func (r *runner) try(m mutant) (killed string, err error) {
	var by []string
	packages := r.packagesOf(m)
	if sum, err := m.sum(); !*all && err == nil {
		if i := slices.IndexFunc(packages, func(p *pkg) bool { return r.known(m.id, p.path, sum) != nil }); i >= 0 {
			packages = packages[i:]
		}
	}
	for _, p := range packages {
		x, err := r.result(m, p)
		if err != nil {
			return "", err
		}
		if !x.kills() {
			continue
		}
		by = append(by, fmt.Sprintf("by %s in %s", shown(x.tests), p.path))
		if !*all {
			break
		}
	}
	return strings.Join(by, "; "), nil
}

// shown names a few tests.
func shown(tests []string) string {
	if n := len(tests); n > 3 {
		return fmt.Sprintf("%s and %d more", strings.Join(tests[:3], ", "), n-3)
	}
	return strings.Join(tests, ", ")
}

// packagesOf are those whose tests include the package of m, in the order in which they are tried.
func (r *runner) packagesOf(m mutant) []*pkg {
	if *sim {
		return []*pkg{r.packages[simulation]}
	}
	dir := m.pkg()
	var in []*pkg
	for _, p := range r.packages {
		if slices.Contains(p.deps, dir) {
			in = append(in, p)
		}
	}
	rank := func(p *pkg) int {
		switch {
		case p.path == dir && dir != ".":
			return 0
		case p.path == simulation && m.sim:
			return 1
		case p.path == "." || strings.HasPrefix(p.path, "test/"): // on real servers
			return 3
		}
		return 2
	}
	slices.SortFunc(in, func(a, b *pkg) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(r.seconds(a), r.seconds(b)),
			cmp.Compare(a.path, b.path))
	})
	return in
}
