package redistest

import (
	"crypto/sha1" //nolint:gosec // Redis names scripts by it
	"encoding/hex"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/alicebob/miniredis/v2/server"
	lua "github.com/yuin/gopher-lua"
	"github.com/yuin/gopher-lua/parse"
)

// SmallStacks is for tests of this module, before the first script. miniredis makes a Lua state for each call
// of a script, with stacks of 100 kB. To allocate and clear these took a fifth of the processor time of tests
// in virtual time. Our scripts need less than a fifth of that; those of a user of package flightlocktest may
// need more.
func SmallStacks() { lua.RegistrySize, lua.CallStackSize = 1024, 64 }

// parsed has the texts of scripts that are known to be Lua.
var parsed sync.Map

// scriptLoads keeps the scripts that are loaded into a miniredis. miniredis parses a script with each SCRIPT
// LOAD, and clients load their scripts into every node that may not have them: if each node parses them only
// once, that is still a tenth of the processor time of tests in virtual time. Here a process parses a script
// once: its text is kept, and EVALSHA becomes EVAL, whose scripts miniredis compiles only once.
//
// SCRIPT LOAD is missing in the miniredis' count of commands. SetError drops the scripts.
type scriptLoads struct {
	server *server.Server
	off    atomic.Bool // the server does all by itself

	mu     sync.Mutex        // guards loaded
	loaded map[string]string // texts by their SHA1, since the last SCRIPT FLUSH
}

// answer is a hook of the server, called before each command. It reports whether it has replied.
func (s *scriptLoads) answer(c *server.Peer, cmd string, args ...string) bool {
	switch {
	case s.off.Load():
		return false
	case (cmd == "EVALSHA" || cmd == "EVALSHA_RO") && len(args) > 0:
		s.mu.Lock()
		text, loaded := s.loaded[args[0]]
		s.mu.Unlock()
		if loaded {
			s.server.Dispatch(c, slices.Concat([]string{strings.Replace(cmd, "SHA", "", 1), text}, args[1:]))
		}
		return loaded
	case cmd == "SCRIPT" && len(args) > 1 && strings.EqualFold(args[0], "EXISTS"):
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, sha := range args[1:] {
			if _, loaded := s.loaded[sha]; !loaded {
				return false // one that was executed by its text, maybe
			}
		}
		c.Block(func(w *server.Writer) {
			w.WriteLen(len(args) - 1)
			for range args[1:] {
				w.WriteInt(1)
			}
		})
		return true
	case cmd == "SCRIPT" && len(args) > 0 && strings.EqualFold(args[0], "FLUSH"):
		s.mu.Lock()
		defer s.mu.Unlock()
		clear(s.loaded)
		return false // those that it executed are gone, too
	case cmd == "SCRIPT" && len(args) == 2 && strings.EqualFold(args[0], "LOAD") && isLua(args[1]):
		sum := sha1.Sum([]byte(args[1]))
		sha := hex.EncodeToString(sum[:])
		s.mu.Lock()
		s.loaded[sha] = args[1]
		s.mu.Unlock()
		c.WriteBulk(sha)
		return true
	}
	return false
}

func isLua(text string) bool {
	if _, known := parsed.Load(text); known {
		return true
	}
	_, err := parse.Parse(strings.NewReader(text), "")
	if err == nil {
		parsed.Store(text, nil)
	}
	return err == nil
}
