// Package fetch protects caches from stampedes: a value that is missing is loaded once over all processes.
//
// A Fetcher reads through to a Store, which has the values, and gets what is missing by a Loader, under locks
// of a [flightlock.Client]. Package rediscache does this with values in Redis. docs/caches.md has the
// details.
package fetch
