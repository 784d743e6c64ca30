package demo

import (
	"os"
	"strconv"
	"strings"
)

// cpuTime reads how long the processors of this machine have been busy, and how long there were any, in the same unit.
func cpuTime() (busy, all float64) {
	data, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0
	}
	line, _, _ := strings.Cut(string(data), "\n")
	for i, field := range strings.Fields(line) {
		n, err := strconv.ParseFloat(field, 64)
		if err != nil || i > 8 { // the word "cpu"; guests, which are in the others
			continue
		}
		all += n
		if i != 4 && i != 5 { // idle, iowait
			busy += n
		}
	}
	return busy, all
}
