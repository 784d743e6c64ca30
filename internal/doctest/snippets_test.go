package doctest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

// known are the packages that the snippets of the docs use without importing them.
var known = map[string]string{
	"context": "context", "errors": "errors", "fmt": "fmt", "time": "time", "os": "os",
	"slog": "log/slog", "http": "net/http", "json": "encoding/json",
	"redis": "github.com/redis/go-redis/v9", "flightlock": "github.com/flightlock/flightlock",
	"fetch":          "github.com/flightlock/flightlock/fetch",
	"election":       "github.com/flightlock/flightlock/election",
	"once":           "github.com/flightlock/flightlock/once",
	"semaphore":      "github.com/flightlock/flightlock/semaphore",
	"fenced":         "github.com/flightlock/flightlock/fenced",
	"rediscache":     "github.com/flightlock/flightlock/rediscache",
	"flightlocktest": "github.com/flightlock/flightlock/flightlocktest",
	"prom":           "github.com/flightlock/flightlock/prom",
	"prometheus":     "github.com/prometheus/client_golang/prometheus",
	"promhttp":       "github.com/prometheus/client_golang/prometheus/promhttp",
}

// A snippet is a block of Go in README.md or docs. It is a file, declarations, or the statements of
// a function.
type snippet struct {
	name   string // its page and heading, and "#2" if it is the second one there that is a function
	at     string // file:line
	source string // of a file in package main, or in one of its own
	own    bool
	call   string // an expression of type (any, error) that runs it; "" if it has no statements
}

// snippetsOf are all the snippets of the docs.
func snippetsOf(t *testing.T) (all []snippet) {
	t.Helper()
	texts, names := pages(t), map[string]int{}
	files := make([]string, 0, len(texts))
	for file := range texts {
		files = append(files, file)
	}
	slices.Sort(files)
	heading := regexp.MustCompile(`(?m)^#+ (.*)$`)
	for _, file := range files {
		text := texts[file]
		for _, at := range regexp.MustCompile("(?ms)^```go\n(.*?)^```").FindAllStringSubmatchIndex(text, -1) {
			line := 1 + strings.Count(text[:at[2]], "\n")
			s, err := parseSnippet(text[at[2]:at[3]], file, line, fmt.Sprintf("snippet%d", len(all)))
			if err != nil {
				t.Errorf("%s:%d: %v", file, line, err)
				continue
			}
			headings := heading.FindAllStringSubmatch(text[:at[0]], -1)
			s.name = file + ": " + headings[len(headings)-1][1]
			if s.call != "" {
				if names[s.name]++; names[s.name] > 1 {
					s.name += fmt.Sprintf(" #%d", names[s.name])
				}
			}
			all = append(all, s)
		}
	}
	if len(all) < 10 {
		t.Fatalf("only %d snippets: is this the right pattern?", len(all))
	}
	return all
}

// parseSnippet makes a file of a block; its statements become a function of the given name.
func parseSnippet(block, file string, line int, function string) (snippet, error) {
	s := snippet{at: fmt.Sprintf("%s:%d", file, line)}
	block = strings.ReplaceAll(block, `"127.0.0.1:6379"`, "os.Args[2]") // the server of the test
	at := "//line " + s.at + "\n"
	if _, err := parser.ParseFile(token.NewFileSet(), "", block, 0); err == nil {
		s.source, s.own = at+block, true
		return s, nil
	}
	var err error
	declarations := "package main\n\n" + at + block
	if _, err := parser.ParseFile(token.NewFileSet(), "", declarations, 0); err == nil {
		s.source, err = withImports(declarations)
		return s, err
	}
	body := func(results, end string) string {
		return "package main\n\nfunc " + function + "() " + results + " {\n" + at + block + end + "}\n"
	}
	results, end, err := resultsOf(body("", ""))
	if err != nil {
		return s, err
	}
	s.call = map[string]string{
		"":                "func() (any, error) { " + function + "(); return nil, nil }()",
		"error":           "func() (any, error) { return nil, " + function + "() }()",
		"([]byte, error)": "func() (any, error) { v, err := " + function + "(); return string(v), err }()",
	}[results]
	s.source, err = withImports(body(results, end))
	return s, err
}

// resultsOf finds out what the function at the end of a file returns, and what to append to its
// last statement.
func resultsOf(source string) (results, end string, err error) {
	f, err := parser.ParseFile(token.NewFileSet(), "", source, 0)
	if err != nil {
		return "", "", err
	}
	fn := f.Decls[len(f.Decls)-1].(*ast.FuncDecl)
	n, value := 0, false
	ast.Inspect(fn.Body, func(node ast.Node) bool {
		if r, ok := node.(*ast.ReturnStmt); ok {
			n = max(n, len(r.Results))
			if len(r.Results) == 1 {
				call, is := r.Results[0].(*ast.CallExpr)
				value = value || is && givesValue(call.Fun)
			}
		}
		_, literal := node.(*ast.FuncLit)
		return !literal
	})
	if value {
		n = 2
	}
	if _, returns := fn.Body.List[len(fn.Body.List)-1].(*ast.ReturnStmt); !returns && n == 1 {
		end = "return nil\n"
	}
	return []string{"", "error", "([]byte, error)"}[n], end, nil
}

// givesValue reports whether a function whose results a snippet returns has two of them.
func givesValue(fun ast.Expr) bool {
	switch fun := fun.(type) {
	case *ast.Ident:
		return fun.Name == "load" || fun.Name == "loadAlone"
	case *ast.SelectorExpr:
		return fun.Sel.Name == "Get"
	}
	return false
}

// withImports adds the imports that are used.
func withImports(source string) (string, error) {
	f, err := parser.ParseFile(token.NewFileSet(), "", source, 0)
	if err != nil {
		return "", err
	}
	var imports []string
	ast.Inspect(f, func(node ast.Node) bool {
		if sel, ok := node.(*ast.SelectorExpr); ok {
			if pkg, ok := sel.X.(*ast.Ident); ok && known[pkg.Name] != "" {
				imports = append(imports, fmt.Sprintf("import %q\n", known[pkg.Name]))
			}
		}
		return true
	})
	slices.Sort(imports)
	head := "package main\n\n"
	return head + strings.Join(slices.Compact(imports), "") + strings.TrimPrefix(source, head), nil
}

// surroundings are what the snippets take for granted: the reader's own client, cache and
// functions. The program runs the snippet that its first argument names, on the server of its
// second, and prints the result.
const surroundings = `package main

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/redis/go-redis/v9"
)

var (
	ctx   context.Context
	c     *flightlock.Client
	rdb   *redis.Client
	key   = "user:7"
	log   = slog.New(slog.DiscardHandler)
	ready atomic.Bool
	cache values
)

type values struct{ sync.Map }

func (c *values) Get(_ context.Context, key string) ([]byte, bool) {
	v, ok := c.Load(key)
	if !ok {
		return nil, false
	}
	return v.([]byte), true
}

func (c *values) Set(_ context.Context, key string, v []byte) { c.Store(key, v) }

func load(ctx context.Context, key string) ([]byte, error) { return []byte("value of " + key), ctx.Err() }

func work(ctx context.Context) error { return ctx.Err() }

func send(ctx context.Context, id string, fence int64) error {
	if fence <= 0 {
		return errors.New("no token")
	}
	return ctx.Err()
}

func publish(ctx context.Context, c *flightlock.Client) error {
	return c.Do(ctx, "report", time.Minute, nil, func(ctx context.Context, _ *flightlock.Lock) error {
		<-ctx.Done()
		return ctx.Err()
	})
}

func serve(ctx context.Context, c *flightlock.Client) error {
	return c.Do(ctx, "served", time.Minute, nil, func(ctx context.Context, _ *flightlock.Lock) error {
		return ctx.Err()
	})
}

func main() {
	var cancel context.CancelFunc
	ctx, cancel = context.WithTimeout(context.Background(), 10*time.Second) // the leader leads for as long
	if len(os.Args) > 3 { // there is no server: nothing to wait for
		ctx, cancel = context.WithTimeout(context.Background(), 3*time.Second)
	}
	defer cancel()
	rdb = redis.NewClient(&redis.Options{Addr: os.Args[2]})
	var err error
	c, err = flightlock.New(flightlock.Options{NodeTimeout: time.Second}, rdb)
	if err != nil {
		panic(err)
	}
	v, err := snippets[os.Args[1]]()
	out := map[string]any{"Value": v, "Unavailable": errors.Is(err, flightlock.ErrUnavailable)}
	if err != nil {
		out["Err"] = err.Error()
	}
	json.NewEncoder(os.Stderr).Encode(out)
}
`

// buildSnippets builds a program of the snippets in a module of its own that requires this one, as
// its users' modules do, and returns its path. It needs no network: what it needs of other modules
// is what this one was built with.
func buildSnippets(t *testing.T, all []snippet) string {
	t.Helper()
	root, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("go.mod",
		"module example.com/consumer\n\ngo 1.26\n\nrequire github.com/flightlock/flightlock v0.0.0\n\n"+
			"replace github.com/flightlock/flightlock => "+root+"\n")
	write("surroundings.go", surroundings)
	table := "package main\n\nvar snippets = map[string]func() (any, error){\n"
	for i, s := range all {
		if s.own {
			write(fmt.Sprintf("own%d/snippet.go", i), s.source)
			continue
		}
		write(fmt.Sprintf("snippet%d.go", i), s.source)
		if s.call != "" {
			table += fmt.Sprintf("%q: func() (any, error) { return %s },\n", s.name, s.call)
		}
	}
	write("snippets.go", table+"}\n")
	program := filepath.Join(dir, "program.exe")
	run := func(flags string, args ...string) {
		t.Helper()
		cmd := exec.Command("go", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOPROXY=off", "GOSUMDB=off", "GOWORK=off", "GOFLAGS="+flags)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	// With -e it does without the tests of other modules, which need not be on this machine.
	run("", "mod", "tidy", "-e")
	run("-mod=readonly", "build", "-o", program, ".")
	run("-mod=readonly", "build", "./...")
	return program
}

// The result of a snippet without Redis.
const (
	fails = "ErrUnavailable" // when its ctx ends
	value = "value"          // without a lock
	works = "works"          // it does not need Redis, or continues without it
)

// withoutRedis names each snippet that has statements. With Redis, each of them works.
var withoutRedis = map[string]string{
	"README.md: A first lock":                            fails,
	"README.md: A cache":                                 value,
	"docs/caches.md: Values in Redis: rediscache":        value,
	"docs/caches.md: Two forms":                          value,
	"docs/caches.md: Two forms #2":                       value,
	"docs/cookbook.md: Guard a job":                      fails,
	"docs/cookbook.md: Cache a row":                      value,
	"docs/cookbook.md: A leader":                         fails,
	"docs/cookbook.md: A leader #2":                      fails,
	"docs/cookbook.md: At most N at a time":              fails,
	"docs/cookbook.md: One request of a user at a time":  fails,
	"docs/cookbook.md: Readers and a writer":             fails,
	"docs/cookbook.md: Two accounts":                     fails,
	"docs/cookbook.md: A nightly job":                    fails,
	"docs/cookbook.md: Start here, finish there":         fails,
	"docs/cookbook.md: Who holds it":                     fails,
	"docs/metrics.md: Metrics":                           fails,
	"docs/migration.md: redsync":                         fails,
	"docs/migration.md: rueidislock":                     fails,
	"docs/operations.md: Deploys":                        works,
	"docs/usage.md: A lock that is used again and again": works,
	"docs/usage.md: Running a function under the lock":   fails,
	"docs/usage.md: Testing":                             works,
}

// Every Go snippet of README.md and docs compiles in a module that requires this one, and what has
// statements runs, with Redis up and down.
func TestSnippetsCompileAndRun(t *testing.T) {
	t.Parallel()
	all, named := snippetsOf(t), 0
	for _, s := range all {
		if s.call == "" {
			continue
		}
		if named++; withoutRedis[s.name] == "" {
			t.Errorf("%s: what comes of %q without Redis?", s.at, s.name)
		}
	}
	if named != len(withoutRedis) {
		t.Errorf("%d snippets have statements, and %d are named", named, len(withoutRedis))
	}
	program := buildSnippets(t, all)
	server := redistest.StartServer(t)
	for _, s := range all {
		if s.call != "" {
			runSnippet(t, works, program, s.name, server.Addr())
		}
	}
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for name, want := range withoutRedis {
		wg.Go(func() { runSnippet(t, want, program, name, server.Addr(), "down") })
	}
	wg.Wait()
}

// runSnippet runs one snippet, and compares its result.
func runSnippet(t *testing.T, want, program string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		t.Errorf("%s: %v\n%s", args, err, &stderr)
		return
	}
	var result struct {
		Value, Err  string
		Unavailable bool
	}
	lines := strings.Split(strings.TrimSpace(stderr.String()), "\n") // go-redis logs, too
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &result); err != nil {
		t.Errorf("%s: %v\n%s", args, err, &stderr)
	}
	ok := result.Err == ""
	switch want {
	case fails:
		ok = result.Unavailable
	case value:
		ok = ok && strings.HasPrefix(result.Value, "value of ")
	}
	if !ok {
		t.Errorf("%s: got %q and error %q, want %s", args, result.Value, result.Err, want)
	}
}

// docs/caches.md shows the code of the functions that tests mark by "// shown:" and a name, wherever these
// are.
func TestCachesShowsWhatIsTested(t *testing.T) {
	trimmed := func(code string) string { return regexp.MustCompile(`(?m)^\s+`).ReplaceAllString(code, "") }
	page := trimmed(pages(t)["docs/caches.md"])
	marked := regexp.MustCompile(`(?ms)^// shown: (\w+)\nfunc .*?{\n(.*?)^}\n`)
	shown := 0
	for path, text := range sources(t, "_test.go") {
		for _, at := range marked.FindAllStringSubmatch(text, -1) {
			shown++
			code := trimmed(at[2])
			if !strings.Contains(page, code) {
				t.Errorf("docs/caches.md shows another %q than %s tests:\n%s", at[1], path, code)
			}
		}
	}
	if shown < 1 {
		t.Errorf("only %d functions are marked: is this the right pattern?", shown)
	}
}
