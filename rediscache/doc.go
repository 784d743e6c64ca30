// Package rediscache caches values in Redis. It is what one would otherwise write over a
// [flightlock.Fetcher]: encoding, ttls, stale values, remembered "not found", and invalidation that
// holds.
//
//	users, err := rediscache.New(locks, rdb, loadUser, rediscache.Options[User]{Name: "user", Fresh: time.Minute})
//	u, err := users.Get(ctx, "42")         // a miss is one load across all processes
//	err = users.Invalidate(ctx, "42")      // after the commit that changed it
//
// After Invalidate or Set has returned, no load that began before it is stored, and no Get that
// begins after it returns what was loaded before, in any process that uses the same Redis, Name and
// Version. That needs no lock and no fencing token: each entry has a stamp, and a load is stored by
// comparing the stamp that it found before it began. What expires, is evicted or flushed costs a
// load, and never brings an old value back. Exempt are
//
//   - [Options.Local], a tier in the process: other processes may serve a value from theirs for as
//     long as that says;
//   - a Redis that loses writes which it has acknowledged: one that fails over to a replica, or is
//     restarted from an old dump;
//   - an origin from which a load reads what was current earlier: a replica that lags behind;
//   - entries of another [Options.Version].
//
// The locks and the values may be on different servers. A hit is one GET.
package rediscache
