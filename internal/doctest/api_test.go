package doctest

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var updateAPI = flag.Bool("update-api", false, "write api/next.txt")

// nextAPI lists what the next version exports and no released version did. A release renames it to
// api/VERSION.txt.
const nextAPI = "api/next.txt"

// The exported API is what the lists in api say. What a released version exports stays; what is new
// is listed in api/next.txt, so that every change of the API shows up in review.
func TestExportedAPI(t *testing.T) {
	current := exportedAPI(t)
	released := map[string]string{} // the version of each line
	files, err := filepath.Glob("api/v*.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		for _, line := range linesOf(t, file) {
			released[line] = file
		}
	}
	for line, file := range released {
		if !slices.Contains(current, line) {
			t.Errorf("%s has %q, which is gone or changed: users of that version no longer compile", file, line)
		}
	}
	added := slices.DeleteFunc(slices.Clone(current), func(line string) bool { return released[line] != "" })
	if *updateAPI {
		if err := os.WriteFile(nextAPI, []byte(strings.Join(added, "\n")+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const hint = "if that is intended, name it in CHANGELOG.md and run:\n" +
		"go test ./internal/doctest -run TestExportedAPI -update-api"
	listed := linesOf(t, nextAPI)
	for _, line := range added {
		if !slices.Contains(listed, line) {
			t.Errorf("new: %s\n%s", line, hint)
		}
	}
	for _, line := range listed {
		if !slices.Contains(added, line) {
			t.Errorf("gone or changed: %s\n%s", line, hint)
		}
	}
}

// linesOf are the lines of a list. Without the file there are none.
func linesOf(t *testing.T, file string) []string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return strings.FieldsFunc(string(text), func(r rune) bool { return r == '\n' || r == '\r' })
}

// exportedAPI lists what the module's packages export, one line for each function, method, type,
// field, constant and variable. Package lua is for this module alone by its own documentation.
func exportedAPI(t *testing.T) []string {
	t.Helper()
	list := exec.Command("go", "list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Name}} {{.Export}}",
		"./...")
	list.Env = append(os.Environ(), "GOPROXY=off")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	const module = "github.com/flightlock/flightlock"
	files, public := map[string]string{}, []string{} // the files that the compiler imports
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) < 3 {
			continue // it has tests only
		}
		files[f[0]] = f[2]
		ours := f[0] == module || strings.HasPrefix(f[0], module+"/")
		if ours && f[1] != "main" && !strings.Contains(f[0], "/internal/") && f[0] != module+"/lua" {
			public = append(public, f[0])
		}
	}
	imp := importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(files[path])
	})
	var lines []string
	for _, path := range public {
		pkg, err := imp.Import(path)
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, packageAPI(pkg)...)
	}
	slices.Sort(lines)
	return lines
}

// packageAPI lists what one package exports.
func packageAPI(pkg *types.Package) (lines []string) {
	name := func(p *types.Package) string {
		if p == pkg {
			return ""
		}
		return p.Path()
	}
	add := func(format string, args ...any) {
		lines = append(lines, "pkg "+pkg.Path()+", "+fmt.Sprintf(format, args...))
	}
	for _, id := range pkg.Scope().Names() {
		switch obj := pkg.Scope().Lookup(id).(type) {
		case nil:
		case *types.Const:
			if obj.Exported() {
				add("const %s %s = %s", id, types.TypeString(obj.Type(), name), obj.Val().ExactString())
			}
		case *types.Var:
			if obj.Exported() {
				add("var %s %s", id, types.TypeString(unnamed(obj.Type()), name))
			}
		case *types.Func:
			if obj.Exported() {
				add("func %s%s", id, signature(obj.Type(), name))
			}
		case *types.TypeName:
			if obj.Exported() {
				for _, line := range typeAPI(obj, name) {
					add("%s", line)
				}
			}
		}
	}
	return lines
}

// typeAPI lists a type, its exported fields and its exported methods, promoted ones included. The
// methods of an interface are on one line, since a new one breaks the types that implement it.
func typeAPI(obj *types.TypeName, name types.Qualifier) (lines []string) {
	id := obj.Name()
	params := ""
	if named, is := obj.Type().(*types.Named); is && named.TypeParams().Len() > 0 {
		var all []string
		for p := range named.TypeParams().TypeParams() {
			all = append(all, p.String()+" "+types.TypeString(p.Constraint(), name))
		}
		params = "[" + strings.Join(all, ", ") + "]"
	}
	if obj.IsAlias() {
		return []string{"type " + id + params + " = " + types.TypeString(types.Unalias(obj.Type()), name)}
	}
	switch under := obj.Type().Underlying().(type) {
	case *types.Struct:
		lines = append(lines, "type "+id+params+" struct")
		for f := range under.Fields() {
			if f.Exported() {
				lines = append(lines, "type "+id+params+" struct, "+f.Name()+" "+types.TypeString(unnamed(f.Type()),
					name))
			}
		}
	case *types.Interface:
		var methods []string
		for m := range under.Methods() {
			methods = append(methods, m.Name()+signature(m.Type(), name))
		}
		return []string{"type " + id + params + " interface { " + strings.Join(methods, "; ") + " }"}
	default:
		lines = append(lines, "type "+id+params+" "+types.TypeString(unnamed(under), name))
	}
	values := types.NewMethodSet(obj.Type())
	for m := range types.NewMethodSet(types.NewPointer(obj.Type())).Methods() {
		if m.Obj().Exported() {
			star := "*"
			if values.Lookup(m.Obj().Pkg(), m.Obj().Name()) != nil {
				star = ""
			}
			lines = append(lines, "method ("+star+id+params+") "+m.Obj().Name()+signature(m.Type(), name))
		}
	}
	return lines
}

// signature is a function's type without "func" and without the names of parameters, which callers
// do not depend on.
func signature(t types.Type, name types.Qualifier) string {
	var b bytes.Buffer
	types.WriteSignature(&b, unnamed(t).(*types.Signature), name)
	return b.String()
}

// unnamed removes the names of parameters from function types.
func unnamed(t types.Type) types.Type {
	s, is := t.(*types.Signature)
	if !is {
		return t
	}
	tuple := func(vars *types.Tuple) *types.Tuple {
		var all []*types.Var
		for v := range vars.Variables() {
			all = append(all, types.NewVar(token.NoPos, nil, "", unnamed(v.Type())))
		}
		return types.NewTuple(all...)
	}
	var params []*types.TypeParam
	for p := range s.TypeParams().TypeParams() {
		params = append(params, types.NewTypeParam(p.Obj(), p.Constraint()))
	}
	return types.NewSignatureType(nil, nil, params, tuple(s.Params()), tuple(s.Results()), s.Variadic())
}

// The lists show what breaks users: each change of these sources changes a line.
func TestTheListsSeeChanges(t *testing.T) {
	api := func(source string) []string {
		t.Helper()
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, "p.go", "package p\n"+source, 0)
		if err != nil {
			t.Fatal(err)
		}
		pkg, err := (&types.Config{}).Check("p", fset, []*ast.File{f}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return packageAPI(pkg)
	}
	changes := map[string]string{
		"func F(a, b int) error { return nil }":   "func F(a int, b int64) error { return nil }",
		"func G[A any](a A) A { return a }":       "func G[A comparable](a A) A { return a }",
		"type I interface{ A() }":                 "type I interface{ A(); B() }",
		"type S struct{ A int }":                  "type S struct{ A string }",
		"type S[V any] struct{ F func(v V) int }": "type S[V any] struct{ F func(v V) }",
		"type T struct{}; func (T) M() {}":        "type T struct{}; func (*T) M() {}",
		"const C = 1":                             "const C = 2",
		"var V int":                               "var V, W int",
	}
	for _, before := range slices.SortedFunc(maps.Keys(changes), cmp.Compare[string]) {
		if after := changes[before]; slices.Equal(api(before), api(after)) {
			t.Errorf("%q and %q are the same: %q", before, after, api(after))
		}
	}
	for a, b := range map[string]string{
		"func F(a int, b string) {}":                "func F(x int, y string) {}",
		"type S struct{ A int; b int }":             "type S struct{ A int; b, c string }",
		"type t struct{ A int }; func f() {}":       "",
		"func F(f func(a int)) (err error) {for{}}": "func F(func(int)) error {for{}}",
	} {
		if !slices.Equal(api(a), api(b)) {
			t.Errorf("%q and %q differ: %q, %q", a, b, api(a), api(b))
		}
	}
}
