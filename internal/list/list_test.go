package list

import (
	"math/rand/v2"
	"slices"
	"testing"
)

type item struct {
	n     int
	links Links[item]
}

func (i *item) ListLinks() *Links[item] { return &i.links }

// A List holds the same as a slice after the same random steps.
func TestAgainstASlice(t *testing.T) {
	var l List[item, *item]
	var want []*item
	r := rand.New(rand.NewPCG(1, 2))
	for n := range 10_000 {
		switch i := r.IntN(len(want) + 1); {
		case len(want) > 20 || r.IntN(2) == 0 && i < len(want):
			i = min(i, len(want)-1)
			l.Remove(want[i])
			if want[i].links != (Links[item]{}) {
				t.Fatal("a removed element has links")
			}
			want = slices.Delete(want, i, i+1)
		default:
			e := &item{n: n}
			l.PushBack(e)
			want = append(want, e)
		}
		var got []*item
		for e := l.Front(); e != nil; e = l.Next(e) {
			got = append(got, e)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("step %d: %d elements, want %d", n, len(got), len(want))
		}
	}
}
