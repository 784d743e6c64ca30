package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// short shows a figure by three digits or so.
func short(v float64) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v):
		return ""
	case a >= 100:
		return thousands(int64(math.Round(v)))
	case a >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case a >= 0.1 || v == 0:
		return strconv.FormatFloat(v, 'f', 2, 64)
	case a < 0.00005:
		return strconv.FormatFloat(v, 'e', 0, 64)
	default:
		return strconv.FormatFloat(v, 'g', 2, 64)
	}
}

func thousands(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// span shows microseconds as a time.
func span(us float64) string {
	switch {
	case math.IsNaN(us):
		return ""
	case us >= 1e6:
		return fmt.Sprintf("%.2f s", us/1e6)
	case us >= 10e3:
		return fmt.Sprintf("%.0f ms", us/1e3)
	case us >= 1e3:
		return fmt.Sprintf("%.1f ms", us/1e3)
	case us >= 10:
		return fmt.Sprintf("%.0f µs", us)
	}
	return fmt.Sprintf("%.2f µs", us)
}

// markdown is a table: its first row is the head.
func markdown(rows [][]string) string {
	var b strings.Builder
	for i, r := range rows {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(r, " | "))
		if i == 0 {
			fmt.Fprintf(&b, "|%s\n", strings.Repeat("---|", len(r)))
		}
	}
	return b.String()
}
