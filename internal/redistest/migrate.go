package redistest

import (
	"slices"
	"testing"
)

// Moving a slot takes three steps, and a client sees a different answer in each:
//
//   - SetMigrating. From then on a key that the old master does not hold is answered by
//     ASK; the new master answers MOVED to the one that does not say ASKING first.
//   - MigrateKeys moves some of the keys. A command with several keys of which only
//     some are there is answered by TRYAGAIN, on either side.
//   - FinishMigration moves the rest and tells everybody. From then on the old master
//     answers MOVED.

// SetMigrating begins to move a slot from the master that serves it to another one.
func (c *Cluster) SetMigrating(tb testing.TB, slot int, from, to *Server) {
	tb.Helper()
	to.Do(tb, "CLUSTER", "SETSLOT", slot, "IMPORTING", c.id(tb, from))
	from.Do(tb, "CLUSTER", "SETSLOT", slot, "MIGRATING", c.id(tb, to))
}

// MigrateKeys moves the given keys from one master to the other, with their TTLs. Keys
// that are not there are passed over.
func (c *Cluster) MigrateKeys(tb testing.TB, from, to *Server, keys ...string) {
	tb.Helper()
	if len(keys) == 0 {
		return
	}
	args := []any{"MIGRATE", "127.0.0.1", to.Port(), "", 0, adminTimeout.Milliseconds()}
	if pw := to.password(); pw != "" {
		args = append(args, "AUTH", pw)
	}
	args = append(args, "KEYS")
	for _, k := range keys {
		args = append(args, k)
	}
	from.Do(tb, args...)
}

// FinishMigration moves the keys of the slot that are left and makes the new master the
// owner on every node. All masters must be up.
func (c *Cluster) FinishMigration(tb testing.TB, slot int, from, to *Server) {
	tb.Helper()
	for {
		keys := from.Do(tb, "CLUSTER", "GETKEYSINSLOT", slot, 100).([]any)
		if len(keys) == 0 {
			break
		}
		names := make([]string, len(keys))
		for i, k := range keys {
			names[i] = k.(string)
		}
		c.MigrateKeys(tb, from, to, names...)
	}
	// The new owner comes first: were the old one first, both would for a moment point
	// a client to the other.
	told := []*Server{to, from}
	for _, s := range c.servers {
		if !slices.Contains(told, s) {
			told = append(told, s)
		}
	}
	for _, s := range told {
		s.Do(tb, "CLUSTER", "SETSLOT", slot, "NODE", c.id(tb, to))
	}
}

// id is the cluster's name for one of its masters.
func (c *Cluster) id(tb testing.TB, s *Server) string {
	tb.Helper()
	i := slices.Index(c.servers, s)
	if i < 0 {
		tb.Fatalf("%s is not a node of this cluster", s.Addr())
	}
	return c.ids[i]
}
