package flightlock

import (
	"testing"

	"github.com/flightlock/flightlock/lua"
)

// The name of a memory fits into what a server reads from a dump as a short string, for a
// thousand years of two names a second.
func TestNamesOfMemoriesAreShort(t *testing.T) {
	c := &Client{id: "#01234567-89ab-cdef-0123-456789abcdef-"}
	c.memories.Store(7e10)
	first, second := c.memoryName(), c.memoryName()
	if len(first) > lua.MaxName || first == second || first[:17] != "0123456789abcdefm" {
		t.Errorf("%s, then %s", first, second)
	}
}
