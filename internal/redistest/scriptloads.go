package redistest

import (
	"crypto/sha1" //nolint:gosec // Redis names scripts by it
	"encoding/hex"
	"strings"
	"sync"

	"github.com/alicebob/miniredis/v2/server"
)

// scriptLoads answers SCRIPT LOAD for a script that the node has. miniredis parses it again each
// time, and a client loads its scripts whenever it is not sure that a node has them: the parser took
// most of the processor time of tests in virtual time.
//
// The first load of a script goes through. What is answered here is missing in the miniredis' count
// of commands.
type scriptLoads struct {
	mu     sync.Mutex          // guards loaded
	loaded map[string]struct{} // texts, since the last SCRIPT FLUSH
}

// answer is a hook of the server, called before each command. It reports whether it has replied.
func (s *scriptLoads) answer(c *server.Peer, cmd string, args ...string) bool {
	if cmd != "SCRIPT" || len(args) == 0 {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case strings.EqualFold(args[0], "FLUSH"):
		clear(s.loaded)
	case strings.EqualFold(args[0], "LOAD") && len(args) == 2:
		if _, known := s.loaded[args[1]]; known {
			sum := sha1.Sum([]byte(args[1]))
			c.WriteBulk(hex.EncodeToString(sum[:]))
			return true
		}
		s.loaded[args[1]] = struct{}{}
	}
	return false
}
