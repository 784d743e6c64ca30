// Package forget tests nodes that lose their data, or another server in their place: restarts, flushes,
// failovers, and the quarantine that follows.
package forget

import (
	"testing"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
)

func TestMain(m *testing.M) {
	redistest.SayWhatIsLeftOut("most moments at which nodes can forget", "make forget")
	testkit.Main(m)
}
