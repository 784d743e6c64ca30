package check

import (
	"errors"
	"testing"
	"time"
)

// Each node counts once for the middle clock, however many masters it has: those of a Cluster run on the
// machines of one deployment, often with one wrong time service, and must not outvote the other nodes.
func TestTheMastersOfAClusterAreOneClock(t *testing.T) {
	at := func(offsets ...time.Duration) (n nodeInfo) {
		for _, d := range offsets {
			n.servers = append(n.servers, serverInfo{Clock: clockInfo{Offset: d}})
		}
		return n
	}
	unknown := nodeInfo{servers: []serverInfo{{ClockErr: errors.New("no TIME")}, {Err: errors.New("down")}}}
	const wrong = time.Hour
	for name, tc := range map[string]struct {
		nodes []nodeInfo
		want  time.Duration
	}{
		"no clock":                   {[]nodeInfo{unknown, {}}, 0},
		"a Cluster that is wrong":    {[]nodeInfo{at(0), at(wrong, wrong, wrong, wrong), at(1)}, 1},
		"one master that is wrong":   {[]nodeInfo{at(2, wrong, 1)}, 2},
		"a node that is not known":   {[]nodeInfo{at(3), unknown, at(4), at(wrong)}, 4},
		"the lower one of two nodes": {[]nodeInfo{at(wrong), at(5)}, 5},
	} {
		in := &inspections{nodes: tc.nodes}
		if got := in.middleClock(); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}
