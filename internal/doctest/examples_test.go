package doctest

import (
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Everything that the packages export is shown by an example that runs: a function by one with its
// own name or its package's, a method, a type, an error and a constant by any.
func TestEverythingExportedHasAnExample(t *testing.T) {
	for _, dir := range []string{".", "election", "fenced", "flightlocktest", "once", "rediscache",
		"semaphore"} {
		p := docsOf(t, dir)
		all := p.Examples
		funcs, values := p.Funcs, slices.Concat(p.Vars, p.Consts)
		for _, typ := range p.Types {
			funcs, values = append(funcs, typ.Funcs...), slices.Concat(values, typ.Vars, typ.Consts)
			all = append(all, typ.Examples...)
			for _, m := range typ.Methods {
				all = append(all, m.Examples...)
			}
		}
		for _, f := range funcs {
			all = append(all, f.Examples...)
			if len(f.Examples) == 0 && !uses(p.Examples, f.Name) {
				t.Errorf("%s has no example of %s", p.ImportPath, f.Name)
			}
		}
		for _, typ := range p.Types {
			if len(typ.Examples) == 0 && !uses(all, typ.Name) && !made(typ, all) {
				t.Errorf("no example of %s shows the type %s", p.ImportPath, typ.Name)
			}
			for _, m := range typ.Methods {
				if len(m.Examples) == 0 && !forOthers[m.Name] && !uses(all, m.Name) {
					t.Errorf("no example of %s shows %s.%s", p.ImportPath, typ.Name, m.Name)
				}
			}
		}
		for _, v := range values {
			for _, name := range v.Names {
				if ast.IsExported(name) && !uses(all, name) {
					t.Errorf("no example of %s shows %s", p.ImportPath, name)
				}
			}
		}
		for _, e := range all {
			if e.Output == "" && !e.EmptyOutput {
				t.Errorf("%s: Example%s has no output, so it does not run", p.ImportPath, e.Name)
			}
		}
	}
}

// made reports whether an example calls a function or method of typ, or uses one of its constants. Stats are
// what methods of that name return.
func made(typ *doc.Type, examples []*doc.Example) bool {
	if strings.HasSuffix(typ.Name, "Stats") {
		return uses(examples, "Stats")
	}
	var names []string
	for _, f := range slices.Concat(typ.Funcs, typ.Methods) {
		names = append(names, f.Name)
	}
	for _, v := range slices.Concat(typ.Consts, typ.Vars) {
		names = append(names, v.Names...)
	}
	return slices.ContainsFunc(names, func(name string) bool { return !forOthers[name] && uses(examples, name) })
}

// forOthers are methods that fmt and errors call.
var forOthers = map[string]bool{"Error": true, "Unwrap": true, "String": true}

// docsOf is a package as go doc sees it.
func docsOf(t *testing.T, dir string) *doc.Package {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	fset := token.NewFileSet()
	var files []*ast.File
	for _, name := range names {
		source, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		f, err := parser.ParseFile(fset, name, source, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	p, err := doc.NewFromFiles(fset, files, path.Join("github.com/flightlock/flightlock", dir))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// uses reports whether an example has that name in it.
func uses(examples []*doc.Example, name string) (found bool) {
	for _, e := range examples {
		ast.Inspect(e.Code, func(n ast.Node) bool {
			id, is := n.(*ast.Ident)
			found = found || is && id.Name == name
			return !found
		})
	}
	return found
}
