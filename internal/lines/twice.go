package main

import (
	"fmt"
	"strings"
)

// together is how many lines of code in a row two places may not share. Comments, blanks and imports are no
// such lines.
const together = 8

// windows are the places of the library by what stands there, so many lines in a row.
type windows map[[together]string]string

// add returns the places of a file that share their lines with a place that was added before.
func (w windows) add(file, text string) (twice []string) {
	type numbered struct {
		number int
		code   string
	}
	var all []numbered
	n := 0
	for line := range strings.Lines(text) {
		n++
		code := strings.TrimSpace(line)
		switch {
		case code == "", strings.HasPrefix(code, "//"),
			strings.HasPrefix(code, `"`) && strings.HasSuffix(code, `"`):
			continue
		}
		all = append(all, numbered{n, code})
	}
	for i := 0; i+together <= len(all); i++ {
		var window [together]string
		for j := range window {
			window[j] = all[i+j].code
		}
		here := fmt.Sprintf("%s:%d", file, all[i].number)
		if before, is := w[window]; is {
			twice = append(twice, before+" and "+here)
			continue
		}
		w[window] = here
	}
	return twice
}
