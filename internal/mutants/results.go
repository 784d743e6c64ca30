package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// without is in the place of a mutant's id where a package was run without one.
const without = "-"

// result is what became of one package's tests with one mutant. A test that has panicked or hung, or was
// running then, is followed by (panic) or (timeout): there may be others behind it. One followed by (once)
// has failed, and not when it was repeated: it kills nothing.
type result struct {
	id, pkg string
	seconds int
	// of the mutant and its file; if it is not killed, or there is none, of all files of the test, too
	sum   string
	tests []string
}

const once, panics = "(once)", "(panic)"

func (x *result) kills() bool {
	return slices.ContainsFunc(x.tests, func(test string) bool { return !strings.HasSuffix(test, once) })
}

// isThere reports whether one of the tests that kill is in the directory still.
func (x *result) isThere(dir string) bool {
	files, _ := filepath.Glob(filepath.Join(dir, "*_test.go"))
	for _, file := range files {
		text, _ := os.ReadFile(file)
		for _, test := range x.tests {
			name, how, _ := strings.Cut(test, "(")
			if "("+how != once && bytes.Contains(text, []byte("\nfunc "+name+"(")) {
				return true
			}
		}
	}
	return false
}

func (x *result) String() string {
	return fmt.Sprintf("%s\t%s\t%d\t%s\t%s\n", x.id, x.pkg, x.seconds, x.sum,
		cmp.Or(strings.Join(x.tests, " "), "."))
}

const heading = "# Which tests kill which mutant of table.go, by make mutations. A dot: none has failed.\n" +
	"# mutant (- for none)\tpackage\tseconds\tsum of the file\ttests\n"

// key is what a result is looked up by.
type key struct{ id, pkg string }

// readResults reads those of earlier runs: of several of one pair the last.
func readResults(file string) (map[key]*result, error) {
	found := map[key]*result{}
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return found, nil
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Split(strings.TrimSpace(line), "\t")
		if len(f) != 5 || strings.HasPrefix(line, "#") {
			continue
		}
		seconds, _ := strconv.Atoi(f[2])
		x := &result{id: f[0], pkg: f[1], seconds: seconds, sum: f[3]}
		if f[4] != "." {
			x.tests = strings.Fields(f[4])
		}
		found[key{x.id, x.pkg}] = x
	}
	return found, err
}

// known is the earlier result of a pair, if it is still good.
func (r *runner) known(id, pkg, sum string) *result {
	r.mu.Lock()
	defer r.mu.Unlock()
	x := r.results[key{id, pkg}]
	if x == nil || x.sum != sum || id != without && x.kills() && !x.isThere(pkg) {
		return nil
	}
	return x
}

// add writes down what has been found, at once: the next run may begin here.
func (r *runner) add(x *result) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.results[key{x.id, x.pkg}] = x
	if *sim {
		return nil
	}
	f, err := os.OpenFile(*results, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteString(x.String())
	return errors.Join(err, f.Close())
}

// write writes all results in order, without those that are of no use any more.
func (r *runner) write() error {
	if *sim {
		return nil
	}
	sums := map[string]string{}
	for _, m := range mutants {
		sums[m.id], _ = m.sum()
	}
	var list []*result
	for _, x := range r.results {
		p := r.packages[x.pkg]
		if p != nil && slices.Contains([]string{p.sum, sums[x.id], sumOf(sums[x.id], p.sum)}, x.sum) {
			list = append(list, x)
		}
	}
	slices.SortFunc(list, func(a, b *result) int {
		return cmp.Or(cmp.Compare(a.id, b.id), cmp.Compare(a.pkg, b.pkg))
	})
	var text strings.Builder
	text.WriteString(heading)
	for _, x := range list {
		text.WriteString(x.String())
	}
	return os.WriteFile(*results, []byte(text.String()), 0o644)
}
