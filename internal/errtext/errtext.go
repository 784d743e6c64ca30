// Package errtext phrases errors that are made of others.
package errtext

import "strings"

// Within is err as a part of an error of package pkg: its text does not name the package a second time.
func Within(pkg string, err error) error { return &part{err, pkg + ": "} }

type part struct {
	error
	prefix string
}

func (p *part) Error() string { return strings.TrimPrefix(p.error.Error(), p.prefix) }

func (p *part) Unwrap() error { return p.error }

// OneLine is the text of err on one line: go-redis joins the answers of several Sentinels by line ends.
func OneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
