// Package flightlock is a distributed lock client over Redis, made for hot keys.
//
// It has two tiers. In the process, all goroutines that want one key form one flight: a
// queue in order of arrival, through which a held lease is handed on without asking Redis.
// Across processes, the one contender of each flight acquires by a majority of N
// independent Redis nodes (Redlock). Every lock carries a fencing token that is strictly
// larger than those of all earlier locks on its key.
//
//	c, err := flightlock.New(flightlock.Options{Nodes: []redis.UniversalClient{rdb}})
//	...
//	lock, err := c.SingleFlightLock(ctx, "user:42", 10*time.Second, nil)
//	if err != nil {
//		return err
//	}
//	defer lock.Release(ctx)
//
// [Client.Do] and [Wrap] run a function under a lock; [Fetcher] protects a cache from
// stampedes, with one load per miss across all processes.
//
// # What it promises
//
// While [Lock.Err] is nil, no other client holds a lock on the same key, as long as fewer
// than a majority of the nodes lose their data, and clocks of client and nodes run apart by
// less than [Options.DriftFactor]. A process can be stopped at any moment, so what must not
// happen twice has to check the token, [Lock.Fence], where it takes effect. A lock is not
// a transaction: work that outlives it goes on unless it watches [Lock.Context].
//
// # Sources
//
// The quorum protocol is Redlock, https://redis.io/docs/latest/develop/use/patterns/distributed-locks/.
// Tokens answer Kleppmann, "How to do distributed locking" (2016). Handoff is lock cohorting:
// Dice, Marathe, Shavit, "Lock Cohorting" (PPoPP 2012).
package flightlock
