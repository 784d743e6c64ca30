// Package rediscache caches values in Redis. It adds to a [fetch.Fetcher] what users would otherwise write themselves:
// encoding, ttls, stale values, negative caching, and an invalidation that no load in progress undoes.
//
//	users, err := rediscache.New(locks, rdb, fetch.Each(loadUser),
//		rediscache.Options[User]{Name: "user", Fresh: time.Minute})
//	u, err := users.Get(ctx, "42")         // a miss is one load across all processes
//	err = users.Invalidate(ctx, "42")      // after the commit that changed it
//
// After Invalidate or Set has returned, no load that began before it is stored, and no Get that begins after it returns
// what was loaded before, in any process that uses the same Redis, Name and Version. That needs no lock and no fencing
// token: each entry has a stamp, and a load stores its value only if the entry still has the stamp that it had before
// the load began. An entry that expires, is evicted or flushed costs a load, and never brings an old value back. The
// exceptions are
//
//   - [Options.Local], a tier in the process: other processes may serve a value from theirs for as long as that says,
//     and for 1s at most;
//   - a Redis server that loses acknowledged writes: by a failover to a replica, or a restart from an old dump;
//   - an origin from which a load reads old data, such as a replica that lags behind;
//   - entries of another [Options.Version].
//
// The locks and the values may be on different servers. A hit is one GET. The lock of an entry is in a namespace of
// Fetchers, so a caller may hold "user:42" while it gets the entry "42" of the Cache "user".
package rediscache
