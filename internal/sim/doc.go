// Package sim runs whole clients against simulated nodes, in virtual time, and injects faults into what
// can break: one number, the seed, says everything that happens, and gives the same again.
//
// What is real: the Client with its Locks, Contexts and AutoRefresh, the local tier, the
// quorum, the nodes with their links, debts, suspension and notices, go-redis, and the Lua
// scripts. What is simulated: the network below go-redis (net.go), the servers that execute
// the scripts (server.go, store.go, script.go), their clocks, and the programs that lock
// (worker.go).
//
// A world (world.go) is a testing/synctest bubble in which one thing happens at a time: the
// loop takes the next event, runs it, and waits until every goroutine is blocked. What they
// have written to connections by then is sorted before it gets its delays, so the order in
// which they ran does not show. All chance comes from generators that the seed starts.
//
// After each step the invariants are looked at (check.go).
package sim
