package flightlock

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/node"
)

// Two clients that lock the same keys on different sets of nodes exclude each other only
// if every majority of the one meets every majority of the other. A service that is moved
// from 3 nodes to 5 has clients of both kinds for a while, and 2 of the old 3 together
// with 3 others of the new 5 are all the nodes there are: two holders.
//
// So each client leaves word on its nodes of the set that it locks on: soon after its first
// lock, and each minute from then on, beside the lock traffic. The answer tells of all
// other sets that were heard of within setLife. Sets are compared by how many nodes they
// count and on how many of ours they are known, not by addresses: the same servers have
// other names elsewhere. Clients with another KeyPrefix lock other keys and do not matter.

const (
	setDelay    = 10 * time.Second // from the first lock to the first word
	setInterval = time.Minute
	setLife     = 5 * time.Minute
)

// nodeSet is what a client leaves word of.
type nodeSet struct {
	N      int      `json:"n"`
	Keys   string   `json:"keys"`             // a hash of the prefix, which may be long, and no text in JSON
	Prefix string   `json:"prefix,omitempty"` // itself; for people
	Nodes  []string `json:"nodes,omitempty"`  // as that client calls them; for people
	By     string   `json:"by"`               // the last client that said so
}

// maxSetText bounds what a client writes; what is for people is left out first.
const maxSetText = 4 << 10

// keysOf tells the keys of one prefix from those of another.
func keysOf(prefix string) string {
	sum := sha256.Sum256([]byte(prefix))
	return fmt.Sprintf("%x", sum[:8])
}

// ownSet is this client's set, and a name for it that all clients with equal lists share.
func (c *Client) ownSet() (name, text string) {
	set := nodeSet{N: len(c.nodes), Keys: keysOf(c.opts.KeyPrefix), Prefix: c.opts.KeyPrefix, By: hostLabel()}
	for _, n := range c.nodes {
		set.Nodes = append(set.Nodes, n.Name())
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

// word is what clients have left on one node.
type word struct {
	text string
	err  error
}

// otherSet is another set of nodes that is in use for our keys.
type otherSet struct {
	nodeSet
	on     []int // our nodes that know of it
	danger bool  // there may be two holders of one key
}

func (o otherSet) String() string {
	s := fmt.Sprintf("%s counts %d nodes", o.By, o.N)
	if len(o.Nodes) > 0 {
		s += fmt.Sprintf(" (%s)", strings.Join(o.Nodes, ", "))
	}
	return s + fmt.Sprintf(", and %d of ours know of it", len(o.on))
}

// otherSets finds the sets in words that are not ours. sure is false if a node that gave no
// word might turn what is a danger into none.
func (c *Client) otherSets(words []word) (others []otherSet, sure bool) {
	own, _ := c.ownSet()
	keys := keysOf(c.opts.KeyPrefix)
	found := map[string]*otherSet{}
	silent := 0
	for i, w := range words {
		if w.err != nil {
			silent++
		}
		for line := range strings.Lines(w.text) {
			_, rest, _ := strings.Cut(strings.TrimSpace(line), " ") // the node itself forgets what is due
			name, text, _ := strings.Cut(rest, " ")
			var set nodeSet
			if name == own || json.Unmarshal([]byte(text), &set) != nil || set.N < 1 || set.Keys != keys {
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
		n := len(words)
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

func (l *look) judgeSets() Finding {
	f := Finding{Check: "node sets", Status: StatusOK, Found: "no other set of nodes is known to be in use for keys with this prefix",
		Why: "clients that lock the same keys on different sets of nodes may both get a lock: 2 of 3 and 3 of 5 nodes need not meet"}
	others, sure := l.c.otherSets(l.words)
	if !sure {
		f.Status, f.Found = StatusUnknown, "another set of nodes is in use; whether it meets this one, the nodes that did not answer could tell"
	}
	var texts []string
	for _, o := range others {
		texts = append(texts, o.String())
		if o.danger {
			f.Status = StatusFail
		} else if f.Status != StatusFail {
			f.Status = StatusWarn
		}
	}
	switch {
	case f.Status == StatusFail:
		f.Found = "others lock on another set, and a majority of it need not meet a majority of this one: " + strings.Join(texts, "; ")
		f.Fix = "give all clients the same nodes; to move, add or remove one node at a time, and all clients before the next"
	case len(others) > 0:
		f.Found = "others lock on another set; majorities still meet: " + strings.Join(texts, "; ")
		f.Fix = "let all clients have the same nodes before the next change"
	}
	if f.Status == StatusOK {
		for _, w := range l.words {
			if w.err != nil {
				f.Status, f.Found = StatusUnknown, "a node did not tell: "+w.err.Error()
			}
		}
	}
	return f
}

// wordOf leaves this client's word on its nodes while it lives.
type wordOf struct {
	begun atomic.Bool

	mu     sync.Mutex // guards what follows
	timer  *time.Timer
	closed bool
	heard  map[string]int // how many times in a row a dangerous set of others was found
}

// leaveWord begins with the first lock. It is on the way of every lock, so all that it does
// later is to look.
func (c *Client) leaveWord() {
	if c.word.begun.Load() || !c.word.begun.CompareAndSwap(false, true) {
		return
	}
	c.word.mu.Lock()
	defer c.word.mu.Unlock()
	if !c.word.closed {
		c.word.timer = time.AfterFunc(setDelay, func() { c.tasks.Go(c.spreadWord) })
	}
}

// stop has no more word left.
func (w *wordOf) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	if w.timer != nil {
		w.timer.Stop()
	}
}

// spreadWord leaves word on all nodes that answer, looks at what others have left there, and
// has itself called again.
func (c *Client) spreadWord() {
	ctx, cancel := c.tasks.context(context.Background())
	defer cancel()
	ctx, stop := context.WithTimeout(ctx, checkTime)
	defer stop()
	name, text := c.ownSet()
	words := c.words(func(i int, w *word) {
		if w.err = errSuspended; !c.nodes[i].Suspended() {
			w.text, w.err = node.Await(ctx, c.spawn, func() (string, error) {
				return node.LeaveWord(ctx, c.opts.Nodes[i], name, text, setLife)
			})
		}
	})
	others, _ := c.otherSets(words)
	c.word.mu.Lock()
	defer c.word.mu.Unlock()
	c.warnLocked(others)
	if !c.word.closed {
		c.word.timer.Reset(setInterval)
	}
}

var errSuspended = errors.New("suspended")

// warnLocked logs sets that may give a key two holders, each once while it is in use. That
// is when it is found for the second time: a client that leaves its first word just now is
// known on some of its nodes only, and looks more foreign than it is.
func (c *Client) warnLocked(others []otherSet) {
	now := map[string]int{}
	for _, o := range others {
		if !o.danger {
			continue
		}
		id := fmt.Sprint(o.N, o.Nodes)
		now[id] = c.word.heard[id] + 1
		if now[id] == 2 {
			c.log(slog.LevelWarn, "flightlock: other clients lock the same keys on another set of nodes: two may hold one key",
				"their_nodes", o.Nodes, "our_nodes", len(c.nodes), "by", o.By)
		}
	}
	c.word.heard = now
}

// readWords reads what clients have left on the nodes. It looks twice when it finds a
// danger, for the reason of warnLocked.
func (c *Client) readWords(ctx context.Context) []word {
	for again := true; ; again = false {
		words := c.words(func(i int, w *word) {
			w.text, w.err = node.Await(ctx, c.spawn, func() (string, error) { return node.Word(ctx, c.opts.Nodes[i]) })
		})
		others, _ := c.otherSets(words)
		if !again || !slices.ContainsFunc(others, func(o otherSet) bool { return o.danger }) {
			return words
		}
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// words asks all nodes at once.
func (c *Client) words(ask func(i int, w *word)) []word {
	words := make([]word, len(c.nodes))
	var wg sync.WaitGroup
	for i := range words {
		wg.Go(func() { ask(i, &words[i]) })
	}
	wg.Wait()
	return words
}
