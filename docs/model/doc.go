// Command model tries the protocol of turns, and a faster one that is not built: a release that grants the
// key to the next contender, of which the vote comes by message. It plays both in small worlds of three
// nodes and three clients that want one key, in virtual time, with the faults that nodes, networks and
// processes have, each world by its own seed; and then with each rule of the protocol taken out, to
// see which faults the rule is for.
//
//	go run ./docs/model              # every variant, 1000 worlds each
//	go run ./docs/model -only NAME -worlds 20000
//	go run ./docs/model -only NAME -trace SEED
//
// docs/model/README.md has what was found.
package main
