// Package jitter is where chance comes from, so that a simulation can repeat what it did.
package jitter

import (
	"math/rand/v2"
	"time"
)

// N is a random time from 0 to below d, which must be above 0. Only a simulation replaces it,
// before anything runs.
var N = rand.N[time.Duration]
