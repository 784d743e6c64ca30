// Package fetch protects caches from stampedes: a value that is missing is loaded once over all processes.
//
// A Fetcher reads through to a Store, which has the values, and gets those that are missing by a Loader, under
// locks of a [flightlock.Client]. Package rediscache is a Fetcher over a Store in Redis, with expiry and
// invalidation; use this package for values that are elsewhere, or have a cache already (see Plain).
package fetch
