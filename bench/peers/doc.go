// Command peers runs flightlock and its rivals side by side: the same loads, on the same
// redis-servers, in one run, taking turns. It writes RESULTS.md, the raw figures and plots.
//
//	make compare             everything, 5 rounds, about an hour
//	go run . -only "cold keys;invalidation" -out DIR    the caches only, about 2 minutes
//	make compare QUICK=1     one round of short loads, about 5 minutes
//	go run . -uncontended    one goroutine beside redsync in alternating slices, a minute; writes no file
//	go run . -permits        a semaphore beside a counter on each node: how many it admits, 30 s; no file
//	go run . -h              single loads, more rounds, a report from what was measured before
//
// It is a module of its own, so that the library does not depend on its rivals.
//
// `go mod tidy` wants packages for tests of redsync's, which the module proxy did not serve when this
// was written; so go.mod and go.sum come from `go get` and `go mod tidy -e`.
package main
