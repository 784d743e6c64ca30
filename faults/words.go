//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/flightlock/flightlock"
)

// inWords returns the kind of error that err is, and the kinds of nodes' answers behind it.
func inWords(err error) string {
	var words []string
	for _, s := range []struct {
		err  error
		name string
	}{
		{flightlock.ErrUnavailable, "ErrUnavailable"}, {flightlock.ErrNotAcquired, "ErrNotAcquired"},
		{flightlock.ErrLockLost, "ErrLockLost"}, {flightlock.ErrNotHeld, "ErrNotHeld"},
		{flightlock.ErrInvalid, "ErrInvalid"}, {flightlock.ErrClosed, "ErrClosed"},
		{context.DeadlineExceeded, "deadline"},
	} {
		if errors.Is(err, s.err) {
			words = append(words, s.name)
		}
	}
	if len(words) == 0 {
		words = append(words, err.Error())
	}
	var q *flightlock.QuorumError
	if !errors.As(err, &q) {
		return strings.Join(words, ", ")
	}
	var said []string
	for _, n := range q.Nodes {
		if n.Err != nil {
			said = append(said, answer(n.Err))
		}
	}
	slices.Sort(said)
	if said = slices.Compact(said); len(said) > 0 {
		return fmt.Sprintf("%s (%s)", strings.Join(words, ", "), strings.Join(said, ", "))
	}
	return strings.Join(words, ", ")
}

// answers are the names of what a node answered, or why it did not, by a part of the error.
var answers = []struct{ part, word string }{
	{"suspended", "suspended"}, {"not sent", "suspended"}, {"uarantin", "quarantined"},
	{"OOM", "OOM"}, {"LOADING", "LOADING"}, {"READONLY", "READONLY"}, {"MASTERDOWN", "MASTERDOWN"},
	{"NOREPLICAS", "NOREPLICAS"}, {"TRYAGAIN", "TRYAGAIN"},
	{"refused", "refused"}, {"reset", "reset"}, {"EOF", "reset"}, {"broken pipe", "reset"},
	{"timeout", "no answer"}, {"no answer", "no answer"}, {"deadline", "no answer"},
	{"key is gone", "key is gone"},
}

func answer(err error) string {
	for _, a := range answers {
		if strings.Contains(err.Error(), a.part) {
			return a.word
		}
	}
	return err.Error()
}

// expired reports whether a lock ended because its validity had run out.
func expired(err error) bool { return strings.Contains(err.Error(), "validity") }
