package redistest

import (
	"strings"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
)

// tracking has a miniredis tell connections which keys have changed, as Redis does after CLIENT TRACKING ON
// BCAST with prefixes: all that have changed together, a moment after some command. What the test has changed
// itself is found then, too.
type tracking struct {
	mini *miniredis.Miniredis

	// guards what follows; not held while mini is asked, whose scripts call the hook
	mu    sync.Mutex
	told  map[*server.Peer][]string // the prefixes of each
	known map[string]string         // what keys had when they were looked at last
	soon  bool                      // they are about to be
}

// answer is a hook of the server, called before each command. It reports whether it has replied.
func (t *tracking) answer(c *server.Peer, cmd string, args ...string) bool {
	if cmd == "CLIENT" && len(args) > 2 && strings.EqualFold(args[0], "TRACKING") &&
		strings.EqualFold(args[2], "BCAST") {
		var prefixes []string
		for i := 3; i+1 < len(args) && strings.EqualFold(args[i], "PREFIX"); i += 2 {
			prefixes = append(prefixes, args[i+1])
		}
		t.tell()
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.told == nil {
			t.told = map[*server.Peer][]string{}
		}
		t.told[c] = prefixes
		c.OnDisconnect(func() {
			t.mu.Lock()
			defer t.mu.Unlock()
			delete(t.told, c)
		})
		c.WriteOK()
		return true
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.told) > 0 && !t.soon {
		t.soon = true
		time.AfterFunc(time.Millisecond, t.tell)
	}
	return false
}

// keys are all keys, with what they have.
func (t *tracking) keys() map[string]string {
	keys := map[string]string{}
	for _, part := range strings.Split("\n"+t.mini.Dump(), "\n- ")[1:] {
		key, value, _ := strings.Cut(part, "\n")
		keys[key] = value
	}
	return keys
}

// tell tells which keys have changed.
func (t *tracking) tell() {
	t.mu.Lock()
	t.soon = false
	t.mu.Unlock()
	now := t.keys()
	t.mu.Lock()
	defer t.mu.Unlock()
	before := t.known
	t.known = now
	for c, prefixes := range t.told {
		var changed []string
		for _, some := range []map[string]string{before, now} {
			for key := range some {
				old, was := before[key]
				if value, is := now[key]; (value != old || is != was) && begins(key, prefixes) {
					changed = append(changed, key)
				}
			}
		}
		if len(changed) == 0 {
			continue
		}
		c.Block(func(w *server.Writer) {
			w.WritePushLen(2)
			w.WriteBulk("invalidate")
			if len(now) == 0 { // flushed
				w.WriteNull()
			} else {
				w.WriteStrings(changed)
			}
		})
		c.Flush()
	}
}

func begins(key string, prefixes []string) bool {
	for _, prefix := range prefixes {
		if strings.HasPrefix(key, prefix) {
			return true
		}
	}
	return false
}
