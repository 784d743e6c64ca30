package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/flightlock/flightlock"
)

// A state is what who and watch show of a key.
type state struct {
	Key string `json:"key"`
	// that a majority of the nodes has; "": nobody has the lock, if that is known
	Owner    string   `json:"owner"`
	Known    bool     `json:"known"` // false: nodes that could not be read may make a majority for somebody
	Left     int64    `json:"left_ms"`
	Fence    int64    `json:"fence"`    // the largest token so far
	Retained bool     `json:"retained"` // the owner's process may keep it for its next caller
	Waiting  []string `json:"waiting"`  // processes, in order
	Others   []string `json:"others"`   // nodes that have another owner, or none, or have not answered
}

func stateOf(in flightlock.Inspection) state {
	s := state{Key: in.Key, Owner: in.Owner, Left: in.TTL.Milliseconds(), Fence: in.Fence, Retained: in.Retained,
		Waiting: in.Waiting}
	unread, votes, most := 0, map[string]int{}, 0
	for _, n := range in.Nodes {
		if n.Err != nil {
			unread++
			s.Others = append(s.Others, n.Node+": "+n.Err.Error())
		} else if n.Owner != in.Owner {
			s.Others = append(s.Others, fmt.Sprintf("%s: its owner is %q", n.Node, n.Owner))
			votes[n.Owner]++
			most = max(most, votes[n.Owner])
		}
	}
	s.Known = s.Owner != "" || unread == 0 || most+unread <= len(in.Nodes)/2
	return s
}

// err is what is not known.
func (s state) err() error {
	if s.Known {
		return nil
	}
	return fmt.Errorf("it is not known who has the lock on %q: %w", s.Key, flightlock.ErrUnavailable)
}

// String is s for people.
func (s state) String() string {
	lines := []string{fmt.Sprintf("%q: nobody has the lock", s.Key)}
	if s.Owner != "" {
		left := time.Duration(s.Left) * time.Millisecond
		lines[0] = fmt.Sprintf("%q: %s, for %v unless it is refreshed", s.Key, s.Owner, left)
	} else if !s.Known {
		lines[0] = fmt.Sprintf("%q: it is not known who has the lock", s.Key)
	}
	if s.Retained {
		lines = append(lines, "it may be kept for the next caller of its process")
	}
	for i, w := range s.Waiting {
		lines = append(lines, fmt.Sprintf("waits, %d: %s", i+1, w))
	}
	return strings.Join(append(lines, s.Others...), "\n  ") + "\n"
}

// parseKey is parse for a command with one argument, KEY, before the flags or behind them.
func (f *common) parseKey(args []string) (key string, code int, ok bool) {
	if code, ok = f.parse(args); !ok {
		return "", code, false
	}
	if key = f.Arg(0); key == "" {
		return "", refuse(errors.New("KEY is missing")), false
	}
	if code, ok = f.parse(f.Args()[1:]); !ok {
		return "", code, false
	}
	if err := f.noArguments(); err != nil {
		return "", refuse(err), false
	}
	return key, 0, true
}

// who is Client.Inspect.
func who(args []string) int { return look("who", args) }

// watch is who, again whenever the holder or the queue has changed.
func watch(args []string) int { return look("watch", args) }

// look looks at a key, once or until Ctrl-C. That disturbs nobody: it does not join the queue to be told.
func look(name string, args []string) int {
	f, every := flags(name), time.Duration(0)
	if name == "watch" {
		f.DurationVar(&every, "every", time.Second/2, "how often to look; a holder that is quicker may not be seen")
	}
	key, code, ok := f.parseKey(args)
	if !ok {
		return code
	}
	return f.query(func(ctx context.Context, c *flightlock.Client) error {
		last, unknown := "", error(nil) // what was shown, and what it leaves open
		for {
			in, err := c.Inspect(ctx, key)
			if len(in.Nodes) == 0 || last == "" && ctx.Err() != nil {
				return err
			}
			if ctx.Err() != nil {
				return unknown
			}
			s := stateOf(in)
			now := fmt.Sprint(s.Owner, s.Waiting, s.Others)
			switch {
			case now == last:
			case f.json:
				writeJSON(s)
			case name == "watch":
				fmt.Print(time.Now().Format("15:04:05.000 "), s)
			default:
				fmt.Print(s)
			}
			last, unknown = now, s.err()
			if name == "who" {
				return unknown
			}
			select {
			case <-time.After(max(every, 10*time.Millisecond)):
			case <-ctx.Done():
				return unknown
			}
		}
	})
}

// revoke is Client.Revoke, or RevokeForce.
func revoke(args []string) int {
	f := flags("revoke")
	owner := f.String("owner", "", "the whole `OWNER`, as who shows it: only its lock ends")
	force := f.Bool("force", false,
		"delete the key without asking its holder, which goes on until its next refresh,\n"+
			"beside the next holder: only if it is known to be gone or stopped")
	key, code, ok := f.parseKey(args)
	if !ok {
		return code
	}
	return f.query(func(ctx context.Context, c *flightlock.Client) error {
		if *force {
			return c.RevokeForce(ctx, key, *owner)
		}
		return c.Revoke(ctx, key, *owner)
	})
}
