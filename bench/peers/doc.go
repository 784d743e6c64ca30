// Command peers runs flightlock and its rivals side by side: the same loads, on the same
// redis-servers, in one run, taking turns. It writes RESULTS.md, the raw figures and plots.
//
//	make compare             everything, 5 rounds, about 25 minutes
//	make compare QUICK=1     one round of short loads, about 3 minutes
//	go run . -h              single loads, more rounds, a report from what was measured before
//
// It is a module of its own, so that the library does not depend on its rivals.
//
// Two things could not be had when this was written. `go mod tidy` wants
// github.com/redis/rueidis/rueidiscompat, for a test of redsync's, which the module proxy did not
// serve; so go.mod and go.sum come from `go get` and `go mod tidy -e`. And
// github.com/redis/rueidis/rueidisaside was not served either: the stampede has rueidislock behind
// a singleflight in its place.
package main
