package node

import "testing"

// A contender's messages arrive through its client's inbox, by its number; on a Cluster through the
// key's channel. This holds for a label of any bytes.
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
		{inbox, "#id-7", "flightlock:inbox:id", "7", "7 failed b failed#other-z",
			Notice{Failed: "b failed#other-z"}}, {inbox, "#id-7", "flightlock:inbox:id", "7", "7", Notice{}},
		{inbox, "none", "flightlock:inbox:", "none", "none turn", Notice{Contender: "none"}},
		{cluster, "#id-7", "k", "", "#id-7", Notice{Contender: "#id-7"}},
		{cluster, "#id-7", "k", "", "#id-8", Notice{Contender: "#id-8"}},
		{cluster, "#id-7", "k", "", "#id-8 failed", Notice{Failed: "#id-8"}},
	} {
		channel, name := c.n.Channel("k", c.contender)
		if channel != c.channel || name != c.name {
			t.Errorf("%q is notified in %q as %q, want %q, %q", c.contender, channel, name, c.channel, c.name)
		}
		if got := ParseNotice(name, c.contender, c.text); got != c.want {
			t.Errorf("%q: %+v, want %+v", c.text, got, c.want)
		}
	}
}

// A recall has three texts of any bytes; one that is cut off, or of another form, is ignored.
func TestParseRecall(t *testing.T) {
	want := Recall{Key: "lock: 3 x", Owner: "a b#c-1R", Contender: "d #e-2"}
	text := "recall: 8 6 a b#c-1Rd #e-2lock: 3 x"
	if got, ok := ParseRecall(text); !ok || got != want {
		t.Errorf("got %+v, %t", got, ok)
	}
	if got, ok := ParseRecall("recall: 8 0 a b#c-1Rk"); !ok || got != (Recall{Key: "k", Owner: "a b#c-1R"}) {
		t.Errorf("without a contender: %+v, %t", got, ok)
	}
	for i := range len(text) - len(want.Key) + 1 {
		if got, ok := ParseRecall(text[:i]); ok {
			t.Errorf("%q is none: %+v", text[:i], got)
		}
	}
	for _, text := range []string{
		"recall: -1 3 abc", "recall: x 3 abc", "recall: 99999999999999999999 0 a",
		"recall: 9223372036854775807 1 abc", "turn 1 1 abc",
	} {
		if got, ok := ParseRecall(text); ok {
			t.Errorf("%q is none: %+v", text, got)
		}
	}
}

// Only owners of this library's form have the mark, whatever a label or another library's value is.
func TestRetains(t *testing.T) {
	for owner, want := range map[string]bool{
		"host#uuid-1zR": true, "a#bR#uuid-R": true, "host#uuid-1z": false, "R": false, "labelR": false,
		"": false, "host#R": false, "#-R": false, TurnOf + "host#uuid-1zR": false, "uuid-1R": false,
	} {
		if got := Retains(owner); got != want {
			t.Errorf("%q: %t", owner, got)
		}
	}
}
