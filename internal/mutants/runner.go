package main

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/procs"
)

const (
	module     = "github.com/flightlock/flightlock"
	simulation = "internal/sim"
)

// pkg is a package with tests.
type pkg struct {
	path string   // from the root of the module
	deps []string // the packages of the module that the tests include, as paths
	sum  string   // of all their files

	mu sync.Mutex // held while it is run without a mutant
}

// runner tries mutants.
type runner struct {
	dir      string // for what is built
	packages map[string]*pkg

	mu      sync.Mutex // guards what follows, and the file of results
	results map[key]*result
}

func newRunner(tried []mutant) (*runner, error) {
	r := &runner{packages: map[string]*pkg{}, results: map[key]*result{}}
	var err error
	if !*sim {
		if r.results, err = readResults(*results); err != nil {
			return nil, err
		}
	}
	if *fresh {
		for k := range r.results {
			if slices.ContainsFunc(tried, func(m mutant) bool { return m.id == k.id }) {
				delete(r.results, k)
			}
		}
	}
	if r.dir, err = os.MkdirTemp("", "mutants"); err != nil {
		return nil, err
	}
	out, err := exec.Command("go", "list", "-test", "-f", `{{.ImportPath}} {{join .Deps ","}}`, "./...").Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	for line := range strings.Lines(string(out)) {
		name, deps, _ := strings.Cut(strings.TrimSpace(line), " ")
		if tested, ok := strings.CutSuffix(name, ".test"); ok {
			p := &pkg{path: local(tested)}
			for dep := range strings.SplitSeq(deps, ",") {
				dep, _, _ = strings.Cut(dep, " ") // "p [q.test]" is p
				if dep == module || strings.HasPrefix(dep, module+"/") {
					p.deps = append(p.deps, strings.TrimSuffix(local(dep), "_test"))
				}
			}
			slices.Sort(p.deps)
			p.deps = slices.Compact(p.deps)
			p.sum = p.sumOfFiles()
			r.packages[p.path] = p
		}
	}
	return r, nil
}

func (r *runner) close() { _ = os.RemoveAll(r.dir) }

// local is a package's path from the root of the module.
func local(name string) string {
	return strings.TrimPrefix(path.Clean("."+strings.TrimPrefix(name, module)), "/")
}

// sumOfFiles is of what the test is made of: Go and Lua.
func (p *pkg) sumOfFiles() string {
	var parts []string
	for _, dep := range p.deps {
		files, _ := filepath.Glob(filepath.Join(dep, "*.*"))
		for _, file := range files {
			switch ext := filepath.Ext(file); {
			case ext != ".go" && ext != ".lua", dep != p.path && strings.HasSuffix(file, "_test.go"):
				continue
			}
			if text, err := os.ReadFile(file); err == nil {
				parts = append(parts, file, string(text))
			}
		}
	}
	return sumOf(parts...)
}

func sumOf(parts ...string) string {
	sum := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(sum, "%d\n%s", len(p), p)
	}
	return hex.EncodeToString(sum.Sum(nil))[:12]
}

// pkg is the path of the package that m changes.
func (m mutant) pkg() string { return path.Dir(m.file) }

// patched is the mutated text of m's file, and sum is what a result of m is good for.
func (m mutant) patched() (text, sum string, err error) {
	b, err := os.ReadFile(m.file)
	if err != nil {
		return "", "", err
	}
	if n := strings.Count(string(b), m.old); n != 1 {
		return "", "", fmt.Errorf("%s has the text to be replaced %d times, want once:\n%s", m.file, n, m.old)
	}
	return strings.Replace(string(b), m.old, m.new, 1), sumOf(string(b), m.old, m.new), nil
}

func (m mutant) sum() (string, error) {
	_, sum, err := m.patched()
	return sum, err
}

// seconds is how long p's tests take without a mutant, as far as is known.
func (r *runner) seconds(p *pkg) int {
	if x := r.known(without, p.path, p.sum); x != nil {
		return x.seconds
	}
	return 0
}

// result is that of the pair: an earlier one, or it is made.
func (r *runner) result(m mutant, p *pkg) (*result, error) {
	sum, err := m.sum()
	if err != nil {
		return nil, err
	}
	none := sumOf(sum, p.sum) // another test may kill it
	if x := cmp.Or(r.known(m.id, p.path, sum), r.known(m.id, p.path, none)); x != nil {
		return x, nil
	}
	clean, err := r.clean(p)
	if err != nil {
		return nil, err
	}
	bin, err := r.build(m, p)
	if err != nil {
		return nil, err
	}
	defer os.Remove(bin)
	began := time.Now()
	limit := time.Minute + 3*time.Duration(clean.seconds)*time.Second
	killers := p.killers(bin, limit, clean.tests)
	x := &result{id: m.id, pkg: p.path, seconds: int(time.Since(began).Seconds()), sum: sum}
	if x.tests = killers; !x.kills() {
		x.sum = none
	}
	return x, r.add(x)
}

// clean is the result of p's tests without a mutant.
func (r *runner) clean(p *pkg) (*result, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if *sim {
		return &result{seconds: 80}, nil
	}
	if x := r.known(without, p.path, p.sum); x != nil {
		return x, nil
	}
	bin, err := r.build(mutant{id: without}, p)
	if err != nil {
		return nil, err
	}
	defer os.Remove(bin)
	began := time.Now()
	x := &result{id: without, pkg: p.path, sum: p.sum}
	x.tests = p.test(bin, 15*time.Minute, "", "")
	x.seconds = int(time.Since(began).Seconds())
	return x, r.add(x)
}

// build builds p's tests with the mutant, if it has a text.
func (r *runner) build(m mutant, p *pkg) (bin string, err error) {
	dir, err := os.MkdirTemp(r.dir, "")
	if err != nil {
		return "", err
	}
	bin = filepath.Join(dir, "mutant.test")
	args := []string{"test", "-c", "-vet=off", "-o", bin}
	if m.file != "" {
		overlay, err := m.overlay(dir)
		if err != nil {
			return "", err
		}
		args = append(args, "-overlay", overlay)
	}
	if out, err := exec.Command("go", append(args, "./"+p.path)...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s with %s does not build: %w\n%s", p.path, m.id, err, out)
	}
	return bin, nil
}

// overlay writes the file that makes the go command use the mutated text.
func (m mutant) overlay(dir string) (file string, err error) {
	text, _, err := m.patched()
	if err != nil {
		return "", err
	}
	at, err := filepath.Abs(m.file)
	if err != nil {
		return "", err
	}
	changed := filepath.Join(dir, filepath.Base(m.file))
	replace, err := json.Marshal(map[string]map[string]string{"Replace": {at: changed}})
	if err != nil {
		return "", err
	}
	file = filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(changed, []byte(text), 0o600); err != nil {
		return "", err
	}
	return file, os.WriteFile(file, replace, 0o600)
}

// killers are the tests that fail with the mutant of bin, but not without it: clean are those that do. A test
// that panics ends the run, so the others are run again without it, a few times.
func (p *pkg) killers(bin string, limit time.Duration, clean []string) (all []string) {
	skip := ""
	for range 5 {
		failed := slices.DeleteFunc(p.test(bin, limit, "", skip), func(test string) bool {
			return slices.Contains(clean, test)
		})
		all = append(all, p.confirm(bin, limit, failed)...)
		if !slices.ContainsFunc(failed, func(test string) bool { return strings.HasSuffix(test, panics) }) {
			break
		}
		names := regexp.MustCompile(`[\w]+`).FindAllString(strings.Join(all, " "), -1)
		skip = "^(" + strings.Join(names, "|") + ")$"
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// confirm repeats tests that have failed: those that were running when one panicked by themselves, because
// only one of them did.
func (p *pkg) confirm(bin string, limit time.Duration, failed []string) (confirmed []string) {
	var plain []string
	for _, test := range failed {
		name, panicked := strings.CutSuffix(test, panics)
		switch {
		case panicked:
			if again := p.test(bin, limit, "^"+name+"$", ""); len(again) == 0 {
				test = name + once
			}
			confirmed = append(confirmed, test)
		case strings.Contains(test, "("):
			confirmed = append(confirmed, test)
		default:
			plain = append(plain, test)
		}
	}
	if len(plain) == 0 {
		return confirmed
	}
	again := p.test(bin, limit, "^("+strings.Join(plain, "|")+")$", "")
	for _, test := range plain {
		repeats := func(other string) bool {
			return strings.HasPrefix(other, test) || strings.HasPrefix(other, "(")
		}
		if !slices.ContainsFunc(again, repeats) {
			test += once
		}
		confirmed = append(confirmed, test)
	}
	return confirmed
}

// test runs the tests that match a pattern, and returns those that have failed, in order. If none has, but
// the test itself, as by a goroutine that was left, that is called (package).
func (p *pkg) test(bin string, limit time.Duration, pattern, skip string) []string {
	first, seeds := "1", "300"
	if *sim { // those of make sim are tried without mutants
		pattern, first, seeds = "^TestSim$", "1201", "1000"
	}
	args := []string{"-test.v=test2json", "-test.timeout", limit.String(), "-test.parallel", "8",
		"-test.run", pattern, "-test.skip", skip}
	if p.path == simulation {
		args = append(args, "-first", first, "-seeds", seeds, "-enough", "1")
	}
	cmd := exec.Command(bin, args...)
	cmd.Dir = p.path
	cmd.Env = append(os.Environ(), "FLIGHTLOCK_REQUIRE_REDIS=1")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	child, err := procs.Start(cmd) // which ends with this process
	if err != nil {
		return []string{"(" + err.Error() + ")"}
	}
	err = child.WaitOrKill(limit + time.Minute)
	return failures(out.String(), err != nil)
}

// failures are the tests that have failed by the output of a run, and if it ended by a panic, those that were
// running.
func failures(out string, failed bool) (tests []string) {
	running := map[string]bool{}
	for line := range strings.Lines(out) {
		_, mark, ok := strings.Cut(line, "\x16")
		f := strings.Fields(mark)
		if !ok || len(f) < 3 || strings.Contains(f[2], "/") {
			continue
		}
		switch what, test := f[1], f[2]; what {
		case "RUN", "CONT":
			running[test] = true
		case "PAUSE":
			delete(running, test)
		case "FAIL:", "PASS:", "SKIP:":
			if delete(running, test); what == "FAIL:" {
				tests = append(tests, test)
			}
		}
	}
	how, crashed := panics, regexp.MustCompile(`(?m)^(panic|fatal error): `).MatchString(out)
	if strings.Contains(out, "panic: test timed out after") {
		how = "(timeout)"
	}
	for test := range running {
		tests = append(tests, test+how)
	}
	switch n := len(tests); {
	case failed && n == 0:
		tests = []string{"(package)"}
	case crashed && len(running) == 0: // by the one that has failed last
		tests[n-1] += how
	}
	slices.Sort(tests)
	return slices.Compact(tests)
}
