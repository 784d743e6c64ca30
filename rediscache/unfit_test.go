package rediscache_test

import (
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/rediscache"
)

// A stale value is served until a new one was loaded. One that is not stored because of FreshFor takes its place,
// too: else the old one would be served for as long as Stale says, and each Get would load once more.
func TestAValueThatIsNotStoredEndsTheStaleOne(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{Stale: time.Hour, FreshFor: func(v string) time.Duration {
			if strings.HasSuffix(v, "@0") {
				return time.Second
			}
			return 0
		}})
		w.want("k", "k@0", c)
		w.origin.version.Add(1) // from now on it may not be cached
		time.Sleep(2 * time.Second)
		w.want("k", "k@0", c) // stale, and loaded behind
		time.Sleep(2 * time.Second)
		w.wantLoads(2)
		w.want("k", "k@1", c)
		w.want("k", "k@1", c)
		w.wantLoads(4)
	})
}
