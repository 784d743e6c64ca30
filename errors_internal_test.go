package flightlock

import (
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/quorum"
)

// What a node has replied is a text: one that has not granted the key of an attempt has not lost it, so "gone" is for a
// lock that somebody had; and a key may have an empty value, and no ttl.
func TestTextsOfReplies(t *testing.T) {
	missing, empty := node.Reply{Kind: node.Missing}, "a: held by a client of another library: the key has an empty value"
	for _, c := range []struct {
		op    string
		reply node.Reply
		want  string
	}{
		{"acquire", missing, "a: it has not granted the key"},
		{"refresh", missing, "a: the key is gone"},
		{"release", missing, "a: the key is gone"},
		{"acquire", node.Reply{Kind: node.Held, TTL: 3 * time.Second}, empty + ", for 3s"},
		{"acquire", node.Reply{Kind: node.Held, TTL: -1}, empty},
		{"refresh", node.Reply{Kind: node.Held, TTL: -1}, empty},
	} {
		err := quorumError("k", &quorum.Failure{Op: c.op, Reason: quorum.Unreachable, Need: 1,
			Nodes: []quorum.NodeAnswer{{Name: "a", Reply: c.reply}}})
		if n := err.Nodes[0]; !strings.HasSuffix(err.Error(), c.want) || n.Err == nil || n.HolderTTL != c.reply.TTL {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}
