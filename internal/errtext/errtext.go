// Package errtext phrases errors that are made of others.
package errtext

import (
	"fmt"
	"strings"
)

// Within is err as a part of an error of package pkg: its text does not name the package a second time.
func Within(pkg string, err error) error { return &part{err, pkg + ": "} }

type part struct {
	error
	prefix string
}

func (p *part) Error() string { return strings.TrimPrefix(p.error.Error(), p.prefix) }

func (p *part) Unwrap() error { return p.error }

// OneLine is what there is to say of v, an error or the value of a panic, on one line: for logs that take a
// line for an entry. go-redis, for one, joins the answers of several Sentinels by line ends.
func OneLine(v any) string { return strings.ReplaceAll(fmt.Sprint(v), "\n", "; ") }
