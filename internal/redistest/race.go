//go:build race

package redistest

// Raced says that the race detector is on, which makes tests several times slower.
const Raced = true
