// Package redistest gives tests something to lock on: real redis-server processes
// and clusters of them, in-memory nodes that live inside a testing/synctest bubble, and the
// faults of a network in between.
//
// What to take for which test:
//
//   - [StartServer]: one redis-server process; it can be killed, restarted empty or from an
//     append-only file of a while ago, stopped
//     with SIGSTOP and continued.
//   - [StartSentinel]: one in Sentinel mode.
//   - [StartCluster]: masters of a real Redis Cluster; a slot can be moved while a test runs.
//   - [StartProxy]: a TCP proxy in front of either one, which delays, swallows, cuts or
//     holds bytes on demand.
//   - [StartKind]: a proxy that makes a server look like one of another product: [Kinds] has those that there
//     are.
//   - [StartFake]: a scripted server, for answers that a real one gives rarely.
//   - [BlackHole], [StartLostSYN] and [RefusedAddr]: addresses that accept and never answer, that do not even
//     answer a connect, and that refuse.
//   - [StartMini]: miniredis on loopback TCP.
//   - [StartMemNode] and [NewBubble]: miniredis without a socket, for virtual time.
//
// Everything started with a testing.TB ends in its cleanup, and the cleanup waits until
// it has ended: no process, goroutine or port is left behind. [Launch], [LaunchGrowingCluster],
// [NewProxy] and [LaunchMemNode] do the same with a Close method, for code that is not a test.
//
// All types are safe for concurrent use. Methods that take a testing.TB end the test on
// failure, so they belong on the test's own goroutine.
package redistest
