//go:build race

package flightlock_test

// raced says that the race detector makes tests slow: a share of what needs no more than a processor
// is enough, for the rest runs without it, on Valkey.
const raced = true
