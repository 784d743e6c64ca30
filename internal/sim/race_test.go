//go:build race

package sim

// fewSeeds is how many worlds are run by default. The race detector makes them slow, and puts
// goroutines into another order each time.
const fewSeeds = 3
