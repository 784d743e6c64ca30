package main

import (
	"slices"
	"testing"
)

// -demo stands anywhere, with one dash or two; without it the arguments are the service's.
func TestTheDemoIsAskedFor(t *testing.T) {
	for _, dash := range []string{"-demo", "--demo"} {
		rest, found := cutDemo([]string{"-only", "steady", dash, "-with", "flightlock"})
		if !found || !slices.Equal(rest, []string{"-only", "steady", "-with", "flightlock"}) {
			t.Errorf("%s: %v, %v", dash, rest, found)
		}
	}
	if rest, found := cutDemo([]string{"-name", "demo"}); found || len(rest) != 2 {
		t.Errorf("%v, %v", rest, found)
	}
}
