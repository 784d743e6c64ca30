package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/redis/go-redis/v9"
)

// A locked is a key and one of its owners. Of a key that several processes want at once, for a moment each
// may have some nodes.
type locked struct {
	Key   string `json:"key"`
	Owner string `json:"owner"`
	Votes int    `json:"votes"`   // the nodes that have it
	Nodes int    `json:"nodes"`   // all nodes
	Held  bool   `json:"held"`    // by a majority
	Known bool   `json:"known"`   // false: nodes that could not be read may make it a majority
	Left  int64  `json:"left_ms"` // of the node that keeps it longest
}

// ls lists the keys that are locked.
func ls(args []string) int {
	f := flags("ls")
	if code, ok := f.parse(args); !ok {
		return code
	}
	pattern := "*"
	if f.NArg() > 0 {
		pattern = f.Arg(0)
	}
	if f.NArg() > 1 {
		return refuse(fmt.Errorf("unexpected argument %q: there is one PATTERN, to be quoted in a shell", f.Arg(1)))
	}
	return f.query(func(ctx context.Context, c *flightlock.Client) error {
		nodes := seam.Of(c).Nodes()
		all, errs := list(ctx, nodes, f.prefix, pattern)
		f.show(all)
		if failed := len(errs); len(nodes)-failed < len(nodes)/2+1 {
			return fmt.Errorf("%d of %d nodes could not be read: %w", failed, len(nodes), errors.Join(errs...))
		}
		for _, err := range errs {
			complain(err)
		}
		return nil
	})
}

// show writes a table, or a line of JSON for each row.
func (f *common) show(all []locked) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	if !f.json {
		fmt.Fprintln(w, "KEY\tOWNER\tNODES\tLEFT\t")
	}
	for _, l := range all {
		if f.json {
			writeJSON(l)
			continue
		}
		held := ""
		switch {
		case !l.Known:
			held = "not known: nodes could not be read"
		case !l.Held:
			held = "no majority: not held"
		}
		left := time.Duration(l.Left) * time.Millisecond
		fmt.Fprintf(w, "%q\t%s\t%d of %d\t%v\t%s\n", l.Key, l.Owner, l.Votes, l.Nodes, left, held)
	}
	_ = w.Flush()
}

// list reads all nodes at once. The errors are those of nodes that could not be read to the end.
func list(ctx context.Context, nodes []redis.UniversalClient, prefix,
	pattern string) (all []locked, errs []error) {
	locks := map[[2]string]*locked{} // by key and owner
	var mu sync.Mutex                // guards locks and errs
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() {
			// SCAN may return a key twice, and two masters while its slot moves; mu guards it
			seen := map[string]bool{}
			err := read(ctx, n, escape(prefix)+pattern, func(key, owner string, left time.Duration) {
				key = strings.TrimPrefix(key, prefix)
				mu.Lock()
				defer mu.Unlock()
				if seen[key] {
					return
				}
				seen[key] = true
				l := locks[[2]string{key, owner}]
				if l == nil {
					l = &locked{Key: key, Owner: owner}
					locks[[2]string{key, owner}] = l
				}
				l.Votes++
				l.Left = max(l.Left, left.Milliseconds())
			})
			if err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("node %d: %w", i, err))
			}
		})
	}
	wg.Wait()
	for _, l := range locks {
		most := len(nodes) / 2 // that is no majority
		l.Nodes, l.Held = len(nodes), l.Votes > most
		// A node that failed after it had named this key counts for both: what it did not say may be of another
		// owner.
		l.Known = l.Held || l.Votes+len(errs) <= most
		all = append(all, *l)
	}
	slices.SortFunc(all, func(a, b locked) int {
		return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(a.Owner, b.Owner))
	})
	return all, errs
}

// found is called for each key of a server.
type found func(key, owner string, left time.Duration)

// read reads a node: of a Cluster, all masters at once.
func read(ctx context.Context, node redis.UniversalClient, pattern string, f found) error {
	if c, is := node.(*redis.ClusterClient); is {
		return c.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error {
			return scan(ctx, c, pattern, f)
		})
	}
	return scan(ctx, node, pattern, f)
}

// longestOwner is what is read of a value: a label of 256 bytes, an id and a number are less. A value of
// something else may be of any size.
const longestOwner = 400

// scan reads a server. It asks for a thousand keys at a time, so no command of it is long.
func scan(ctx context.Context, c redis.Cmdable, pattern string, f found) error {
	for cursor, done := uint64(0), false; !done; done = cursor == 0 {
		var keys []string
		var err error
		if keys, cursor, err = c.ScanType(ctx, cursor, pattern, 1000, "string").Result(); err != nil {
			return err
		}
		values, ttls := make([]*redis.StringCmd, len(keys)), make([]*redis.DurationCmd, len(keys))
		if _, err := c.Pipelined(ctx, func(p redis.Pipeliner) error {
			for i, key := range keys {
				values[i], ttls[i] = p.GetRange(ctx, key, 0, longestOwner), p.PTTL(ctx, key)
			}
			return nil
		}); err != nil && !errors.Is(err, redis.Nil) {
			return err
		}
		for i, key := range keys {
			if left := ttls[i].Val(); values[i].Val() != "" && left > 0 { // a lock has a ttl
				f(key, values[i].Val(), left)
			}
		}
	}
	return nil
}

// escape makes a pattern of SCAN that matches only text.
func escape(text string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`).Replace(text)
}
