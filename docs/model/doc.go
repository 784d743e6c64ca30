// Command model tries the protocol by which the key goes from one process to another: by a release that
// grants the key to the next contender, of which the vote comes by message. It plays it in small worlds of
// three nodes, or one Cluster, and three clients that want one key, in virtual time, with the faults that
// nodes, networks and processes have, each world by its own seed; and then with each rule of the protocol
// taken out, to see which faults the rule is for. After that it has spin look at every interleaving of
// grants.pml, which is the core of the same protocol, and of retained.pml, which is a lease that is kept
// for the next caller, if spin and gcc are there. Before all of them it has internal/links make random walks:
// that is the protocol that internal/link is made for, and which is not built yet.
//
//	go run ./docs/model              # every variant, 500 worlds each, and the exhaustive searches
//	go run ./docs/model -only NAME -worlds 20000
//	go run ./docs/model -only NAME -trace SEED
//
// docs/model/README.md has what was found.
package main
