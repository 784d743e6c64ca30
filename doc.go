// Package flightlock is a distributed lock client over Redis, made for hot keys.
//
// It has two tiers. Within the process, all goroutines that want one key form one flight: a queue in order of
// arrival, in which a held lease is handed from one goroutine to the next without Redis. Across processes,
// the one contender of each flight acquires the lease from a majority of N independent Redis nodes (Redlock).
// Every lock carries a fencing token that is strictly larger than the tokens of all earlier locks on its key.
//
//	c, err := flightlock.New(flightlock.Options{}, rdb)
//	...
//	lock, err := c.SingleFlightLock(ctx, "order:42", 10*time.Second, nil)
//	if err != nil {
//		return err
//	}
//	defer lock.Release(ctx)
//
// # Clients
//
// A process needs one [Client] for each set of nodes. [New] makes it over go-redis clients, [Open] over
// URLs; [Options] has the settings and their defaults. Call [Client.Ready] with a deadline before the
// process takes traffic, [Client.Check] when the nodes are set up or changed, and [Client.Close] with a
// deadline at the end: it waits for holders until then, and releases the locks that are still held.
//
// # Locking
//
// [Client.SingleFlightLock] waits for a key, [Client.TryLock] makes one attempt, and [Client.Do] runs a
// function under a lock that is refreshed until the function returns. A [RetryStrategy] decides how long a
// caller waits for a key that others hold; all waits also end with their ctx. [FailFast] is for callers that
// can do without the lock when Redis is down.
//
// The ttl is how long a key stays locked if its holder dies. For longer work [Lock.AutoRefresh]
// renews the lock, and [Lock.Context] ends when the lock is lost. With a ctx made by Lock.Context,
// locks are reentrant, and [FromContext] returns the lock.
//
// # Errors
//
// Test errors with [errors.Is]: [ErrNotAcquired] means that others hold the lock, [ErrUnavailable] that no
// majority of the nodes could be reached. A lock that is over is [ErrNotHeld] to its methods, and
// [ErrLockLost] to [Lock.Err] if it was lost. A [*QuorumError] has the answer of each node.
//
// # Caches
//
// Package [github.com/flightlock/flightlock/fetch] protects a cache from stampedes: of all callers in
// all processes that miss a key, one loads it. Package [github.com/flightlock/flightlock/rediscache] is
// such a cache with its values in Redis.
//
// # Guarantees
//
// While [Lock.Err] is nil, no other client holds a lock on the same key, provided that all clients use the
// same nodes, that fewer than a majority of them lose their data (and, with three nodes or more, the
// quarantine is on: see [Options.DisableQuarantine]), and that the clocks of client and nodes drift by less
// than [Options.DriftFactor]. A process can be paused at any moment. Therefore an operation that must not
// take effect after the lock was lost has to check the token, [Lock.Fence], where it takes effect; package
// [github.com/flightlock/flightlock/fenced] does so for Redis values. A lock is not a transaction: work
// continues after the lock was lost, unless it watches [Lock.Context].
//
// docs/guarantees.md lists all guarantees, and the tests that attack them.
//
// # Operation
//
// [Options.Observers] receive what happens: package [github.com/flightlock/flightlock/prom] makes
// Prometheus metrics of it, and module github.com/flightlock/flightlock/otel traces. [Options.Logger]
// receives changes of state, and [Client.Stats] returns counters. docs/operations.md describes topologies,
// ACL rules, settings, upgrades, and what to do about each error. For tests of code that locks, package
// [github.com/flightlock/flightlock/flightlocktest] has nodes in memory, which lose a lock on demand.
//
// # Sources
//
// Redlock, https://redis.io/docs/latest/develop/use/patterns/distributed-locks/. Fencing tokens: Kleppmann,
// "How to do distributed locking" (2016). Handoff: Dice, Marathe, Shavit, "Lock Cohorting" (PPoPP 2012).
package flightlock
