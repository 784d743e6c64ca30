// Package flightlock is a distributed lock client over Redis, made for hot keys.
//
// It has two tiers. Within the process, all goroutines that want one key form one flight: a queue
// in order of arrival, in which a held lease is handed from one goroutine to the next without
// Redis. Across processes, the one contender of each flight acquires the lease from a majority of N
// independent Redis nodes (Redlock). Every lock carries a fencing token that is strictly larger
// than the tokens of all earlier locks on its key.
//
//	c, err := flightlock.New(flightlock.Options{Nodes: []redis.UniversalClient{rdb}})
//	...
//	lock, err := c.SingleFlightLock(ctx, "user:42", 10*time.Second, nil)
//	if err != nil {
//		return err
//	}
//	defer lock.Release(ctx)
//
// [Client.Do] and [Wrap] run a function under a lock. [Fetcher] protects a cache from stampedes,
// with one load per miss across all processes.
//
// # Guarantees
//
// While [Lock.Err] is nil, no other client holds a lock on the same key, provided that fewer than a
// majority of the nodes lose their data, and that the clocks of client and nodes drift by less than
// [Options.DriftFactor]. A process can be paused at any moment. Therefore an operation that must
// not happen twice has to check the token, [Lock.Fence], where it takes effect. A lock is not a
// transaction: work continues after the lock was lost, unless it watches [Lock.Context].
//
// # Sources
//
// The quorum protocol is Redlock,
// https://redis.io/docs/latest/develop/use/patterns/distributed-locks/. Fencing tokens follow
// Kleppmann, "How to do distributed locking" (2016). Handoff is lock cohorting: Dice, Marathe,
// Shavit, "Lock Cohorting" (PPoPP 2012).
package flightlock
