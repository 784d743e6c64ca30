package sim

import (
	"slices"
	"strconv"
	"strings"
	"testing"
)

// drop leaves out the faults of those numbers, separated by commas.
func (p *plan) drop(numbers string) {
	var kept []fault
	for i, f := range p.faults {
		if !slices.Contains(strings.Split(numbers, ","), strconv.Itoa(i)) {
			kept = append(kept, f)
		}
	}
	p.faults = kept
}

// shrink leaves out faults, one after the other, as long as some invariant is still broken, and
// returns which: they can be given to -drop.
func shrink(t *testing.T, p *plan) *plan {
	if len(simulate(t, p, nil).violations) == 0 {
		t.Log("nothing to shrink: no invariant is broken")
		return p
	}
	left := make([]int, len(p.faults))
	for i := range left {
		left[i] = i
	}
	var dropped []string
	all := p.faults
	for i := 0; i < len(left); {
		fewer := slices.Delete(slices.Clone(left), i, i+1)
		if len(simulate(t, p.with(all, fewer), nil).violations) == 0 {
			i++
			continue
		}
		dropped = append(dropped, strconv.Itoa(left[i]))
		left = fewer
	}
	t.Logf("-drop=%s leaves %d of %d faults", strings.Join(dropped, ","), len(left), len(all))
	return p.with(all, left)
}

// with is p with some of these faults only.
func (p *plan) with(all []fault, numbers []int) *plan {
	same := *p
	same.faults = nil
	for _, i := range numbers {
		same.faults = append(same.faults, all[i])
	}
	return &same
}
