package flightlock

import (
	"strings"
	"testing"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/quorum"
)

// A node that has not granted the key of an attempt has not lost it: "gone" is for a lock that somebody had.
func TestANodeWithoutTheKeyOfAnAttemptHasNotLostIt(t *testing.T) {
	for op, want := range map[string]string{
		"acquire": "a: it has not granted the key", "refresh": "a: the key is gone", "release": "a: the key is gone",
	} {
		err := quorumError("k", &quorum.Failure{Op: op, Reason: quorum.Unreachable, Need: 1,
			Nodes: []quorum.NodeAnswer{{Name: "a", Reply: node.Reply{Kind: node.Missing}}}})
		if !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
