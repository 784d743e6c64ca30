package check

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/errtext"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// Two clients that lock the same keys on different sets of nodes exclude each other only if every
// majority of one set shares a node with every majority of the other. A service that moves from 3
// nodes to 5 has clients of both kinds for a while. 2 of the old 3 nodes are a majority of the old
// set, and the 3 others are one of the new set: a key can have two holders.
//
// So each client announces on its nodes the set that it locks on (see Announce). The reply lists
// all other sets that were announced within setLife. Sets are compared by the number of their nodes
// and by how many of our nodes know them, not by addresses, because the same server may have other
// names elsewhere. Clients with another KeyPrefix lock other keys, and are ignored.
//
// Clients with equal lists share a name for their set. Sentinel-managed masters of different sets may have
// equal names, so the list has the masters' addresses. After a failover a client's set has another name, and
// the nodes know the one of before for setLife, except a master that has not copied it: that is no other set.

// setsKey is the key with the announced sets. A Cluster is one node, so it has one such key.
const setsKey = node.Reserved + "sets}"

// nodeSet is what a client announces.
type nodeSet struct {
	N      int    `json:"n"`
	Keys   string `json:"keys"`             // a hash of the prefix, which may be long, and no text in JSON
	Prefix string `json:"prefix,omitempty"` // the prefix itself, for people
	// as that client calls them, and masters by their addresses; for people
	Nodes []string `json:"nodes,omitempty"`
	By    string   `json:"by"` // the last client that announced it
}

// maxSetText limits the length of an announcement. Fields for people are left out first.
const maxSetText = 4 << 10

// keysOf returns a name for the keys of one prefix.
func keysOf(prefix string) string {
	sum := sha256.Sum256([]byte(prefix))
	return fmt.Sprintf("%x", sum[:8])
}

// ownSet returns this client's set, and a name for it that all clients with equal lists share.
func (c *Config) ownSet() (name, text string) {
	set := nodeSet{N: len(c.Nodes), Keys: keysOf(c.KeyPrefix), Prefix: c.KeyPrefix, By: c.Process}
	for _, n := range c.Nodes {
		set.Nodes = append(set.Nodes, listed(n))
	}
	slices.Sort(set.Nodes)
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q", set.Prefix, set.Nodes))
	data, _ := json.Marshal(set) // strings and a number: no error
	if len(data) > maxSetText {
		set.Nodes, set.Prefix = nil, ""
		data, _ = json.Marshal(set)
	}
	return fmt.Sprintf("%x", sum[:8]), string(data)
}

// listed is how the list of a set calls a node.
func listed(n *node.Node) string {
	if s := n.Server(); s != nil && s.Master() != "" {
		return s.Master()
	}
	return n.Name()
}

// announce announces a set on a node, for life, and returns all sets that the node knows, in the
// format of lua/sets.lua.
func announce(ctx context.Context, client redis.UniversalClient, name, text string,
	life time.Duration) (string, error) {
	c, err := serverOf(ctx, client, setsKey)
	if err != nil {
		return "", err
	}
	got, err := node.Eval(ctx, c, lua.Sets, []string{setsKey}, name, text, life.Milliseconds())
	all, _ := got.(string)
	return all, err
}

// setsOn reads the sets that are announced on a node.
func setsOn(ctx context.Context, client redis.UniversalClient) (string, error) {
	c, err := serverOf(ctx, client, setsKey)
	if err != nil {
		return "", err
	}
	all, err := c.Get(ctx, setsKey).Result()
	if errors.Is(err, redis.Nil) {
		return "", nil
	}
	return all, err
}

// serverOf returns a client of the server that has key, with timeouts of our own.
func serverOf(ctx context.Context, client redis.UniversalClient, key string) (*redis.Client, error) {
	if cluster, ok := client.(*redis.ClusterClient); ok {
		c, err := cluster.MasterForKey(ctx, key)
		if err != nil {
			return nil, err
		}
		return conn.WithTimeout(c, stepTime), nil
	}
	return conn.WithTimeout(client.(*redis.Client), stepTime), nil
}

// readSets reads the sets that are announced on all nodes. If it finds a danger, it reads them a
// second time: while a client announces its set for the first time, only some of its nodes have it,
// so the set seems to share fewer nodes with ours than it does.
func (c *Config) readSets(ctx context.Context) []result[string] {
	for again := true; ; again = false {
		all := each(ctx, c.Run, len(c.Nodes), func(i int) (string, error) { return setsOn(ctx, c.Clients[i]) })
		others, _ := c.otherSets(all)
		if !again || !slices.ContainsFunc(others, func(o otherSet) bool { return o.danger }) {
			return all
		}
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// otherSet is a set of nodes other than ours that clients use for our keys.
type otherSet struct {
	nodeSet
	on     []int // our nodes that know it
	danger bool  // there may be two holders of one key
}

func (o otherSet) String() string {
	s := fmt.Sprintf("%s counts %d nodes", o.By, o.N)
	if len(o.Nodes) > 0 {
		s += fmt.Sprintf(" (%s)", strings.Join(o.Nodes, ", "))
	}
	return s + fmt.Sprintf(", and %d of ours know of it", len(o.on))
}

// otherSets returns the sets that are not ours, of what was announced on each node, in the format of
// lua/sets.lua. sure is false if a danger was found that the reply of a node that did not answer could rule
// out.
func (c *Config) otherSets(all []result[string]) (others []otherSet, sure bool) {
	own, _ := c.ownSet()
	keys := keysOf(c.KeyPrefix)
	found := map[string]*otherSet{}
	silent := 0
	for i, a := range all {
		if a.err != nil {
			silent++
		}
		for line := range strings.Lines(a.v) {
			_, rest, _ := strings.Cut(strings.TrimSpace(line), " ") // the node removes what has expired
			name, text, _ := strings.Cut(rest, " ")
			var set nodeSet
			_, former := c.announced.Load(name)
			if name == own || former || json.Unmarshal([]byte(text), &set) != nil || set.N < 1 || set.Keys != keys {
				continue
			}
			if found[name] == nil {
				found[name] = &otherSet{nodeSet: set}
			}
			found[name].on = append(found[name].on, i)
		}
	}
	sure = true
	for _, name := range slices.Sorted(maps.Keys(found)) {
		o := found[name]
		n := len(all)
		if o.N == n && len(o.on) == n {
			continue // the same servers by other names
		}
		o.danger = !majoritiesMeet(n, o.N, len(o.on))
		if o.danger && majoritiesMeet(n, o.N, len(o.on)+silent) {
			sure = false
			continue
		}
		if o.N != n || len(o.on)+silent < n {
			others = append(others, *o)
		}
	}
	return others, sure
}

// majoritiesMeet reports whether any majority of a set of n nodes shares a node with any
// majority of a set of m, when the sets have common nodes in common.
func majoritiesMeet(n, m, common int) bool {
	return (n/2+1)+(m/2+1) > n+m-common
}

func (in *inspections) judgeSets() Finding {
	f := Finding{Check: "node sets", Status: OK,
		Found: "no other set of nodes is known to be in use for keys with this prefix",
		Why: "clients that lock the same keys on different sets of nodes may both get a lock: " +
			"2 of 3 and 3 of 5 nodes need not share a node"}
	others, sure := in.otherSets(in.sets)
	if !sure {
		f.Status = Unknown
		f.Found = "another set of nodes is in use; " +
			"whether it meets this one is not known without the nodes that did not answer"
	}
	var texts []string
	for _, o := range others {
		texts = append(texts, o.String())
		if o.danger {
			f.Status = Fail
		} else if f.Status != Fail {
			f.Status = Warn
		}
	}
	switch {
	case f.Status == Fail:
		f.Found = "others lock on another set, and a majority of it need not share a node with a majority of " +
			"this one: " +
			strings.Join(texts, "; ")
		f.Fix = "give all clients the same nodes; to move, add or remove one node at a time, and all clients " +
			"before the next"
	case len(others) > 0:
		f.Found = "others lock on another set; majorities still meet: " + strings.Join(texts, "; ")
		f.Fix = "let all clients have the same nodes before the next change"
	}
	if f.Status == OK {
		for _, w := range in.sets {
			if w.err != nil {
				f.Status, f.Found = Unknown, "a node did not answer: "+errtext.OneLine(w.err)
			}
		}
	}
	return f
}
