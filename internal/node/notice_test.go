package node

import "testing"

// A contender's messages come through its client's inbox, by its number; on a Cluster through the key's
// channel. Whatever a label is made of, it does not matter.
func TestNotices(t *testing.T) {
	inbox, cluster := &Node{}, &Node{router: &router{}}
	for _, c := range []struct {
		n                        *Node
		contender, channel, name string
		text                     string
		want                     Notice
	}{
		{inbox, "host a#1#id-7", "flightlock:inbox:id", "7", "7 turn", Notice{Contender: "host a#1#id-7"}},
		{inbox, "x-y#id-7", "flightlock:inbox:id", "7", "7 other", Notice{}},
		{inbox, "#id-7", "flightlock:inbox:id", "7", "7 failed b failed#other-z", Notice{Failed: "b failed#other-z"}},
		{inbox, "#id-7", "flightlock:inbox:id", "7", "7", Notice{}},
		{inbox, "none", "flightlock:inbox:", "none", "none turn", Notice{Contender: "none"}},
		{cluster, "#id-7", "k", "", "#id-7", Notice{Contender: "#id-7"}},
		{cluster, "#id-7", "k", "", "#id-8", Notice{Contender: "#id-8"}},
		{cluster, "#id-7", "k", "", "#id-8 failed", Notice{Failed: "#id-8"}},
	} {
		channel, name := c.n.Channel("k", c.contender)
		if channel != c.channel || name != c.name {
			t.Errorf("%q is told in %q as %q, want %q, %q", c.contender, channel, name, c.channel, c.name)
		}
		if got := ParseNotice(name, c.contender, c.text); got != c.want {
			t.Errorf("%q: %+v, want %+v", c.text, got, c.want)
		}
	}
}
