package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/scanner"
	"go/token"
	"io"
	"path"
)

// lines are numbers of lines. One with code and a comment is code.
type lines struct{ code, comments, blank int }

func (l lines) all() int { return l.code + l.comments + l.blank }

func (l lines) plus(other lines) lines {
	return lines{l.code + other.code, l.comments + other.comments, l.blank + other.blank}
}

// print writes a row of a table.
func (l lines) print(w io.Writer, name string, budget int) {
	of := ""
	if budget > 0 {
		of = fmt.Sprint(budget)
	}
	fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%d\n", name, of, l.all(), l.code, l.comments, l.blank)
}

// countGo counts the lines of a file of Go by its tokens, so that what is in a string is code.
func countGo(text []byte) (n lines) {
	fset := token.NewFileSet()
	file := fset.AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, scanner.ScanComments)
	code, comments := map[int]bool{}, map[int]bool{}
	for {
		pos, tok, literal := s.Scan()
		if tok == token.EOF {
			break
		}
		if tok == token.SEMICOLON && literal != ";" { // inserted at the end of a line
			continue
		}
		first, set := file.Line(pos), code
		if tok == token.COMMENT {
			set = comments
		}
		for line := range 1 + bytes.Count([]byte(literal), []byte("\n")) {
			set[first+line] = true
		}
	}
	for line := range bytes.Count(text, []byte("\n")) {
		switch {
		case code[line+1]:
			n.code++
		case comments[line+1]:
			n.comments++
		default:
			n.blank++
		}
	}
	return n
}

// countLua counts the lines of a script. There are no comments of several lines.
func countLua(text []byte) (n lines) {
	for line := range bytes.Lines(text) {
		switch line = bytes.TrimSpace(line); {
		case len(line) == 0:
			n.blank++
		case bytes.HasPrefix(line, []byte("--")):
			n.comments++
		default:
			n.code++
		}
	}
	return n
}

// A shape is what makes a package hard to hold in one's head.
type shape struct {
	mutexes int      // fields and variables
	types   []typ    // the structs
	long    []string // files, with their numbers of lines
}

type typ struct {
	name   string
	fields int
}

// add adds what a file declares.
func (s *shape) add(name string, text []byte, n lines) error {
	if n.all() > 450 {
		s.long = append(s.long, fmt.Sprintf("%s %d", path.Base(name), n.all()))
	}
	if path.Ext(name) != ".go" {
		return nil
	}
	file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncType: // parameters are no mutexes of their own
			return false
		case *ast.TypeSpec:
			if fields, is := n.Type.(*ast.StructType); is {
				s.types = append(s.types, typ{n.Name.Name, fields.Fields.NumFields()})
			}
		case *ast.Field:
			s.mutex(n.Type, len(n.Names))
		case *ast.ValueSpec:
			s.mutex(n.Type, len(n.Names))
		}
		return true
	})
	return nil
}

// mutex counts fields or variables of a type, if it is one of sync's mutexes. One that is embedded has no
// name.
func (s *shape) mutex(of ast.Expr, names int) {
	if sel, is := of.(*ast.SelectorExpr); is && (sel.Sel.Name == "Mutex" || sel.Sel.Name == "RWMutex") {
		if pkg, is := sel.X.(*ast.Ident); is && pkg.Name == "sync" {
			s.mutexes += max(1, names)
		}
	}
}
