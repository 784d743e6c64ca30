package flightlock_test

import (
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
	"testing"
)

// known are the packages that the snippets of the docs use without importing them.
var known = map[string]string{
	"context": "context", "errors": "errors", "fmt": "fmt", "time": "time", "slog": "log/slog", "os": "os", "http": "net/http",
	"json":  "encoding/json",
	"redis": "github.com/redis/go-redis/v9", "flightlock": "github.com/flightlock/flightlock",
	"fenced":         "github.com/flightlock/flightlock/fenced",
	"rediscache":     "github.com/flightlock/flightlock/rediscache",
	"flightlocktest": "github.com/flightlock/flightlock/flightlocktest",
	"prometheus":     "github.com/prometheus/client_golang/prometheus",
	"promhttp":       "github.com/prometheus/client_golang/prometheus/promhttp",
}

// surroundings are what the snippets take for granted: the reader's own client, cache and functions.
const surroundings = `
var (
	ctx context.Context
	c   *flightlock.Client
	rdb *redis.Client
	key string
)
var cache interface {
	Get(context.Context, string) ([]byte, bool)
	Set(context.Context, string, []byte)
}
var lookup func(context.Context, string) ([]byte, flightlock.Freshness, error)
var load func(context.Context, string) ([]byte, error)
var store func(context.Context, string, []byte, *flightlock.Lock) error
var publish func(context.Context, *flightlock.Client) error
var send func(ctx context.Context, id string, fence int64) error
`

// Every Go snippet of README.md and docs compiles.
func TestSnippetsCompile(t *testing.T) {
	dir, overlay := t.TempDir(), map[string]string{}
	var packages []string
	for file, text := range pages(t) {
		for _, at := range regexp.MustCompile("(?ms)^```go\n(.*?)^```").FindAllStringSubmatchIndex(text, -1) {
			line := 1 + strings.Count(text[:at[2]], "\n")
			source, err := program(text[at[2]:at[3]], file, line)
			if err != nil {
				t.Errorf("%s:%d: %v", file, line, err)
				continue
			}
			name := fmt.Sprintf("snippet%d", len(packages))
			real := filepath.Join(dir, name+".go")
			if err := os.WriteFile(real, []byte(source), 0o600); err != nil {
				t.Fatal(err)
			}
			overlay[filepath.Join(".", name, "snippet.go")] = real
			packages = append(packages, "./"+name)
		}
	}
	if len(packages) < 3 {
		t.Fatalf("%d snippets found", len(packages))
	}
	// The packages are in this module, so that they get its dependencies, but not on the disk.
	data, _ := json.Marshal(map[string]any{"Replace": overlay})
	if err := os.WriteFile(filepath.Join(dir, "overlay.json"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", append([]string{"build", "-overlay", filepath.Join(dir, "overlay.json")}, packages...)...)
	cmd.Env = append(os.Environ(), "GOPROXY=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("go build: %v\n%s", err, out)
	}
}

// program makes a file of a snippet, which may be a file, declarations, or statements.
func program(snippet, file string, line int) (string, error) {
	at := fmt.Sprintf("//line %s:%d\n", file, line)
	if _, err := parser.ParseFile(token.NewFileSet(), "", snippet, 0); err == nil {
		return at + snippet, nil
	}
	declarations := "package snippet\n\n" + surroundings + at + snippet
	if _, err := parser.ParseFile(token.NewFileSet(), "", declarations, 0); err == nil {
		return withImports(declarations)
	}
	body := func(results, end string) string {
		return "package snippet\n\n" + surroundings + "func snippet() " + results + " {\n" + at + snippet + end + "}\n"
	}
	results, end, err := resultsOf(body("", ""))
	if err != nil {
		return "", err
	}
	return withImports(body(results, end))
}

// resultsOf finds out what the function at the end of a file returns, and what to put behind its
// last statement.
func resultsOf(source string) (results, end string, err error) {
	f, err := parser.ParseFile(token.NewFileSet(), "", source, 0)
	if err != nil {
		return "", "", err
	}
	fn := f.Decls[len(f.Decls)-1].(*ast.FuncDecl)
	n := 0
	ast.Inspect(fn.Body, func(node ast.Node) bool {
		if r, ok := node.(*ast.ReturnStmt); ok {
			n = max(n, len(r.Results))
		}
		_, literal := node.(*ast.FuncLit)
		return !literal
	})
	if _, returns := fn.Body.List[len(fn.Body.List)-1].(*ast.ReturnStmt); !returns && n > 0 {
		end = "panic(0)\n"
	}
	return []string{"", "error", "([]byte, error)"}[n], end, nil
}

// withImports adds the imports of what is used.
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
	head := "package snippet\n\n"
	return head + strings.Join(slices.Compact(imports), "") + strings.TrimPrefix(source, head), nil
}
