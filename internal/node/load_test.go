package node

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

// Lanes that find the scripts missing at the same time wait for the one that loads them, and no
// mutex is held meanwhile: virtual time would stand still.
func TestLanesWaitForTheScriptsWithoutAMutex(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		m.SetDelay(5 * time.Millisecond)
		n := newNode(t, m.Client(t))
		var ears []*ear
		for i := range 20 {
			ears = append(ears, newAttempt(t, n, fmt.Sprint("k", i)).acquire())
		}
		for _, e := range ears {
			e.want(t, Granted)
		}
	})
}
