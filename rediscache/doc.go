// Package rediscache caches values in Redis: a [fetch.Fetcher] with encoding, ttls, stale values, negative
// caching, and an invalidation that no load undoes.
//
//	users, err := rediscache.New(locks, rdb, fetch.Each(loadUser),
//		rediscache.Options[User]{Name: "user", Fresh: time.Minute})
//	u, err := users.Get(ctx, "42")         // a miss is one load across all processes
//	err = users.Invalidate(ctx, "42")      // after the commit that changed it
//
// When Invalidate, Set, InvalidateTag or Clear has returned nil, no load that began before is stored, and no
// Get that begins later returns what was loaded before, in any process with the same Redis, Name and Version.
// Exceptions are local tiers of other processes (Options.Local, for 1s at most), a server of values that
// loses acknowledged writes, and an origin from which loads read old data. docs/caches.md has the details.
//
// The locks and the values may be on different servers. A hit is one GET. A caller may hold the lock
// "user:42" while it gets the entry "42" of the Cache "user".
package rediscache
