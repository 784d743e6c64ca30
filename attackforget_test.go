package flightlock_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
)

// oddAmnesias are ways to lose data that no fault causes, but somebody at the server's console
// does: the process continues, has the scripts, and has the data of another time or place.
var oddAmnesias = []amnesia{
	{name: "an old snapshot loaded by the same process",
		args: []string{"--dbfilename", "dump.rdb", "--enable-debug-command", "yes"},
		prepare: func(tr *trio) func() {
			tr.servers[0].Do(tr.t, "SAVE")
			return func() { tr.servers[0].Do(tr.t, "DEBUG", "RELOAD", "NOSAVE") }
		}},
	{name: "the data of another node", prepare: func(tr *trio) func() {
		return func() {
			follow(tr.t, tr.servers[0], tr.servers[2])
			tr.servers[0].Do(tr.t, "REPLICAOF", "NO", "ONE")
		}
	}},
	{name: "flushed, and the marker put back", prepare: func(tr *trio) func() {
		return func() {
			rdb := tr.servers[0].Client(tr.t)
			dumped := map[string]string{}
			for _, key := range []string{"flightlock:{boot}", "flightlock:{boot}:past"} {
				if v, err := rdb.Dump(tr.t.Context(), key).Result(); err == nil { // else there is no quarantine
					dumped[key] = v
				}
			}
			rdb.FlushAll(tr.t.Context())
			for key, value := range dumped {
				must(tr.t, rdb.Restore(tr.t.Context(), key, 0, value).Err())
			}
		}
	}},
	{name: "an empty database swapped in", prepare: func(tr *trio) func() {
		return func() { tr.servers[0].Do(tr.t, "SWAPDB", 0, 9) }
	}},
}

// Nobody is granted the key a second time once the last check of the server's identity has expired.
func TestNoSecondGrantByANodeWithOtherData(t *testing.T) {
	t.Parallel()
	for i, a := range oddAmnesias {
		t.Run(a.name, func(t *testing.T) {
			forgets := a
			forgets.prepare = func(tr *trio) func() {
				forget := a.prepare(tr)
				return func() {
					forget()
					time.Sleep(120 * time.Millisecond) // a look counts for 100
				}
			}
			tr := newTrio(t, a.args...)
			holder, rival := tr.client(flightlock.Options{}), tr.client(flightlock.Options{})
			if n := secondGrants(tr, forgets, fmt.Sprint("k", i), holder, rival, tr.client(flightlock.Options{})); n > 0 {
				t.Errorf("%d others got the key", n)
			}
		})
	}
}
